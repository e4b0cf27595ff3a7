// Causal attention over paged keys and values, for steps that mix single rows (decode) with chunks of rows (prefill).
//
// Order of one output row, fixed by its position alone:
//   1. q is multiplied by scale * log2(e), so that weights are powers of two; a score is one fma chain over d. With a
//      softcap: q times scale, then (cap * log2(e)) * tanh(score / cap).
//   2. Positions are cut into absolute splits of 256. In a split: max, weights 2^(score - max) and their sum in 16
//      lanes, runs of 16 tokens ascending, then the fixed trees; each output column is one fma chain over the visible
//      tokens, ascending.
//   3. Splits that the row sees are merged ascending, from the first: with M = max(m0, m1), a = 2^(m0 - M) and
//      b = 2^(m1 - M):
//      sum = fma(sum0, a, sum1 * b), out = fma(out0, a, out1 * b). At the end, out * (1 / sum).
// Over int8 pages, both products are exact integers of operands rounded to 16 bits: attention_tiles_int8.hpp says how.
// Splits, runs and tokens that the row does not see take part in nothing: what they hold never matters, NaN included.
//
// With sees_block, all rows of a sequence in the step stand where its last one does: a drafter's block, which sees itself whole.
//
// A row of `sinks` joins its logit to the softmax at the very end: with M = max(m, sink), the sum is fma(sum, 2^(m - M), 2^(sink - M)).
// Latent rows are the keys, and their first columns the values: one copy in the pages, both forms in the expanded split.
//
// Blocks of many rows (of latent rows, all) first expand the split to float; smaller ones read the pages. A chain that is cut between
// threads leaves each later split's partial result in shared scratch; after a barrier the thread that began it merges
// them.
//
// REQUIRES: rows of a sequence stand at consecutive positions from seq_start; ctx.scratch holds attention_thread_bytes;
// the caller puts a barrier between this call and the next that writes q, y, the pages or the shared scratch.
#include <type_traits>

#include "attention_plan.hpp"
#include "attention_tiles.hpp"
#include "attention_tiles_int8.hpp"
#include "table.hpp"
#include "transpose.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

// Results of some rows: row r's largest score, sum of weights and weighted values.
struct Results {
  float* max;
  float* sum;
  float* out;
  int64_t ld;

  Results rows_from(int64_t r) const { return {max + r, sum + r, out + r * ld, ld}; }
};

Results results_at(float* base, int64_t n_rows, int64_t head_dim) {
  return {base, base + pad16(n_rows), base + 2 * pad16(n_rows), pad16(head_dim)};
}

struct Chain {
  Block block;
  int32_t kv_head;
  int64_t start; // on the plan's line
};

class Worker {
 public:
  Worker(const Plan& plan, const ThreadCtx& ctx)
      : plan_(plan),
        a_(plan.args),
        view_(plan.view),
        ctx_(ctx),
        D_(plan.args.head_dim),
        V_(plan.args.latent_values > 0 ? plan.args.latent_values : D_),
        run_bytes_(plan.args.latent_values > 0 ? latent_bytes(plan.args.kv.type, D_) : run_bytes(plan.args.kv.type, D_)) {
    float* p = reinterpret_cast<float*>(ctx.scratch);
    q_ = p;
    p += query_floats(plan.group, D_);
    running_base_ = p;
    p += record_floats(block_rows(plan.group), D_);
    tile_ = results_at(p, kMaxTileRows, D_);
    p += record_floats(kMaxTileRows, D_);
    scores_ = p;
    p += kMaxTileRows * kScoreStride;
    if (a_.kv.type == KvType::I8) { // which expands nothing
      query_units_ = p;
      rounded_q_ = reinterpret_cast<int16_t*>(p + pad16(block_rows(plan.group)));
    } else {
      expanded_ = p;
    }
  }

  // Walks this thread's part of the line.
  void run() {
    int64_t start = 0;
    for (int32_t seq = 0; seq < view_.n_seqs; ++seq) {
      bool unused = false;
      const int64_t cost = plan_.sequence_cost(seq, &unused);
      if (plan_.may_own(ctx_.thread, start, cost)) run_sequence(seq, start, cost / a_.n_kv_heads);
      start += cost;
    }
  }

  // After the barrier: completes the chain that this thread began and others went on with, if there is one.
  void finish_cut_chain() {
    if (!has_cut_chain_) return;
    const Block& block = cut_.block;
    const Results running = results_at(tail_record(ctx_.thread), block.n_rows, D_);
    int32_t other = ctx_.thread + 1;
    int64_t record = 0;
    for (int64_t c = cut_at_; c < block.split_end(); ++c, ++record) {
      while (!plan_.owns_split(other, block, cut_.start, c)) ++other, record = 0;
      const Results partial = results_at(part(other) + record * record_floats(block.n_rows, D_), block.n_rows, D_);
      for (int64_t r = 0; r < block.n_rows; r += kTileRows)
        merge(block, c, r, at_most(kTileRows, block.n_rows - r), partial.rows_from(r), running);
    }
    write_outputs(cut_, running);
  }

 private:
  void run_sequence(int32_t seq, int64_t start, int64_t head_cost) {
    for (int32_t h = 0; h < a_.n_kv_heads; ++h, start += head_cost) {
      if (!plan_.may_own(ctx_.thread, start, head_cost)) continue;
      int64_t at = start;
      for (int64_t b = 0; b < plan_.n_blocks(seq); ++b) {
        const Chain chain{plan_.block(seq, b), h, at};
        if (plan_.may_own(ctx_.thread, at, chain.block.cost())) run_chain(chain);
        at += chain.block.cost();
      }
    }
  }

  void run_chain(const Chain& chain) {
    const Block& block = chain.block;
    int64_t begin = block.split_begin(), end = block.split_end();
    while (begin < end && !plan_.owns_split(ctx_.thread, block, chain.start, begin)) ++begin;
    while (begin < end && !plan_.owns_split(ctx_.thread, block, chain.start, end - 1)) --end;
    if (begin == end) return;
    pack_queries(chain);
    const Results running = results_at(running_base_, block.n_rows, D_);
    const bool is_continued = begin > block.split_begin();
    for (int64_t c = begin; c < end; ++c) {
      float* record = part(ctx_.thread) + (c - begin) * record_floats(block.n_rows, D_);
      attend_split(chain, c, is_continued ? results_at(record, block.n_rows, D_) : running, is_continued);
    }
    if (is_continued) return;
    if (end == block.split_end()) return write_outputs(chain, running);
    std::memcpy(tail_record(ctx_.thread), running_base_, static_cast<size_t>(record_floats(block.n_rows, D_)) * sizeof(float));
    has_cut_chain_ = true;
    cut_ = chain;
    cut_at_ = end;
  }

  // A thread's part of shared scratch: the running results of the chain it leaves to others, then the partials of the
  // one it continues.
  float* tail_record(int32_t thread) const { return reinterpret_cast<float*>(a_.shared_scratch) + thread * plan_.part_floats; }
  float* part(int32_t thread) const { return tail_record(thread) + record_floats(block_rows(plan_.group), D_); }

  // Rows of a block are query-major: row r is head r % group of query r / group.
  void pack_queries(const Chain& chain) {
    const F16v scale = set1(a_.softcap > 0.0f ? a_.scale : a_.scale * kLog2E);
    float* to = q_;
    for (int64_t i = 0; i < chain.block.n_queries; ++i) {
      const float* from = a_.q + (chain.block.row + i) * a_.ldq + chain.kv_head * plan_.group * D_;
      const int64_t n = plan_.group * D_;
      int64_t j = 0;
      for (; j + 16 <= n; j += 16) store(to + j, mul(load(from + j), scale));
      if (j < n) store_n(to + j, mul(load_n(from + j, static_cast<int>(n - j)), scale), static_cast<int>(n - j));
      to += n;
    }
    if (a_.kv.type == KvType::I8)
      for (int64_t r = 0; r < chain.block.n_rows; ++r) query_units_[r] = round_query(q_ + r * D_, D_, rounded_q_ + r * D_);
  }

  // K^T of the n runs from position pos on, which is a multiple of 16.
  template <class T>
  void find_runs(int32_t seq, int32_t kv_head, int64_t pos, int64_t n, const T** runs) const {
    const int32_t* pages = view_.page_table + view_.seq_slot[seq] * view_.page_table_stride;
    int64_t page = pos / a_.kv.page_tokens, in_page = pos % a_.kv.page_tokens;
    for (int64_t i = 0; i < n; ++i) {
      const uint8_t* head = a_.kv.base + pages[page] * a_.kv.page_stride_bytes + kv_head * a_.kv.head_stride_bytes;
      runs[i] = reinterpret_cast<const T*>(head + in_page / kRunTokens * run_bytes_);
      in_page += kRunTokens;
      if (in_page == a_.kv.page_tokens) in_page = 0, ++page;
    }
  }

  // The runs of split c, and those that the thread will probably read afterwards.
  template <class T>
  SplitRuns<T> find_split(const Chain& chain, int64_t c) const {
    const Block& block = chain.block;
    const int64_t base = c * kSplitTokens;
    SplitRuns<T> runs;
    runs.begin = static_cast<int>(at_least(block.begin - base, 0) / kRunTokens);
    runs.end = static_cast<int>((at_most(block.end - base, kSplitTokens) + kRunTokens - 1) / kRunTokens);
    find_runs(block.seq, chain.kv_head, base + runs.begin * kRunTokens, runs.end - runs.begin, runs.at + runs.begin);
    int32_t seq = block.seq, kv_head = chain.kv_head;
    int64_t from = base + kSplitTokens, to = block.end;
    if (from >= to) {
      if (++kv_head == a_.n_kv_heads) kv_head = 0, ++seq;
      if (seq == view_.n_seqs || view_.seq_rows[seq] == view_.seq_rows[seq + 1]) seq = block.seq;
      from = plan_.first_visible(view_.seq_start[seq]) / kRunTokens * kRunTokens;
      to = view_.seq_start[seq] + 1;
    }
    const int64_t n_here = runs.end - runs.begin, n_ahead = at_most((to - from + kRunTokens - 1) / kRunTokens, n_here);
    find_runs(seq, kv_head, from, n_ahead, runs.ahead + runs.begin);
    for (int i = static_cast<int>(runs.begin + n_ahead); i < runs.end; ++i) runs.ahead[i] = runs.ahead[runs.begin];
    return runs;
  }

  // Copies the runs to float scratch, so that many rows pay for one conversion.
  SplitRuns<float> expand(const SplitRuns<uint16_t>& pages) const {
    SplitRuns<float> runs;
    runs.begin = pages.begin;
    runs.end = pages.end;
    const int64_t n = 2 * kRunTokens * D_;
    for (int i = pages.begin; i < pages.end; ++i) {
      float* to = expanded_ + i * expanded_run_floats(D_);
      for (int64_t j = 0; j < n; j += 16) store(to + j, load_f16(pages.at[i] + j));
      runs.at[i] = runs.ahead[i] = to;
    }
    return runs;
  }

  // The same of latent rows: each run as keys, transposed, and as values.
  template <class T>
  SplitRuns<float> expand_latents(const SplitRuns<T>& pages) const {
    SplitRuns<float> runs;
    runs.begin = pages.begin;
    runs.end = pages.end;
    for (int i = pages.begin; i < pages.end; ++i) {
      float* keys = expanded_ + i * expanded_run_floats(D_);
      float* values = keys + kRunTokens * D_;
      for (int64_t j = 0; j < kRunTokens * D_; j += 16) {
        if constexpr (kPrefetches<T>) __builtin_prefetch(pages.ahead[i] + j, 0, 2);
        store(values + j, load_kv(pages.at[i] + j));
      }
      int64_t d = 0;
      for (; d + 16 <= D_; d += 16) transpose16(values + d, D_, keys + d * kRunTokens);
      for (; d < D_; ++d)
        for (int64_t s = 0; s < kRunTokens; ++s) keys[d * kRunTokens + s] = values[s * D_ + d];
      runs.at[i] = runs.ahead[i] = keys;
    }
    return runs;
  }

  void attend_split(const Chain& chain, int64_t c, const Results& results, bool is_partial) {
    if (a_.latent_values > 0 && a_.kv.type == KvType::F32)
      attend_tiles(chain.block, c, expand_latents(find_split<float>(chain, c)), results, is_partial);
    else if (a_.latent_values > 0)
      attend_tiles(chain.block, c, expand_latents(find_split<uint16_t>(chain, c)), results, is_partial);
    else if (a_.kv.type == KvType::I8)
      attend_tiles(chain.block, c, find_split<int8_t>(chain, c), results, is_partial);
    else if (a_.kv.type == KvType::F32)
      attend_tiles(chain.block, c, find_split<float>(chain, c), results, is_partial);
    else if (chain.block.n_rows > kExpandRows)
      attend_tiles(chain.block, c, expand(find_split<uint16_t>(chain, c)), results, is_partial);
    else
      attend_tiles(chain.block, c, find_split<uint16_t>(chain, c), results, is_partial);
  }

  template <class T>
  void attend_tiles(const Block& block, int64_t c, const SplitRuns<T>& runs, const Results& results, bool is_partial) {
    const int64_t n_tiles = (block.n_rows + kTileRows - 1) / kTileRows;
    for (int64_t i = 0; i < n_tiles; ++i) {
      const int64_t r = block.n_rows * i / n_tiles,
                    n = block.n_rows * (i + 1) / n_tiles - r; // even tiles: 4 + 4, not 6 + 2
      RowBounds bounds = {};
      for (int64_t j = 0; j < n; ++j) {
        const int64_t pos = plan_.position(block, (r + j) / plan_.group);
        bounds.begin[j] = static_cast<int>(at_most(at_least(plan_.first_visible(pos) - c * kSplitTokens, 0), kSplitTokens));
        bounds.end[j] = static_cast<int>(at_most(at_least(pos + 1 - c * kSplitTokens, 0), kSplitTokens));
      }
      const Results out = is_partial ? results.rows_from(r) : tile_;
      if constexpr (std::is_same_v<T, int8_t>)
        attend_rows_int8(static_cast<int>(n), runs, bounds, D_, a_.softcap, rounded_q_ + r * D_, query_units_ + r, scores_, out.max,
                         out.sum, out.out);
      else
        attend_rows<T>(static_cast<int>(n), runs, bounds, D_, V_, a_.softcap, q_ + r * D_, scores_, out.max, out.sum, out.out);
      if (!is_partial) merge(block, c, r, n, out, results);
    }
  }

  // Merges split c of rows r .. r + n (at most 16) into their running results. Rows that do not see the split keep
  // every bit.
  void merge(const Block& block, int64_t c, int64_t r, int64_t n, const Results& split, const Results& running) const {
    const int count = static_cast<int>(n);
    const F16v old_max = load_n(running.max + r, count), new_max = load_n(split.max, count);
    const F16v top = max(old_max, new_max);
    const F16v keep = exp2_nonpositive(sub(old_max, top)), gain = exp2_nonpositive(sub(new_max, top));
    float tops[16], keeps[16], gains[16], sums[16];
    store(tops, top);
    store(keeps, keep);
    store(gains, gain);
    store(sums, fma(load_n(running.sum + r, count), keep, mul(load_n(split.sum, count), gain)));
    for (int j = 0; j < count; ++j) {
      const int64_t pos = plan_.position(block, (r + j) / plan_.group);
      const int64_t first = plan_.first_visible(pos) / kSplitTokens;
      if (c < first || c > pos / kSplitTokens) continue;
      float* out = running.out + (r + j) * running.ld;
      const float* add_out = split.out + j * split.ld;
      if (c == first) {
        running.max[r + j] = split.max[j];
        running.sum[r + j] = split.sum[j];
        for (int64_t d = 0; d < V_; d += 16) store(out + d, load(add_out + d));
        continue;
      }
      running.max[r + j] = tops[j];
      running.sum[r + j] = sums[j];
      const F16v k = set1(keeps[j]), g = set1(gains[j]);
      for (int64_t d = 0; d < V_; d += 16) store(out + d, fma(load(out + d), k, mul(load(add_out + d), g)));
    }
  }

  void write_outputs(const Chain& chain, const Results& results) const {
    for (int64_t r = 0; r < chain.block.n_rows; ++r) {
      const int64_t head = chain.kv_head * plan_.group + r % plan_.group;
      float* y = a_.y + (chain.block.row + r / plan_.group) * a_.ldy + head * V_;
      const float* out = results.out + r * results.ld;
      const F16v inverse = set1(a_.sinks != nullptr ? with_sink(results.max[r], results.sum[r], a_.sinks[head]) : 1.0f / results.sum[r]);
      int64_t d = 0;
      for (; d + 16 <= V_; d += 16) store(y + d, mul(load(out + d), inverse));
      if (d < V_) store_n(y + d, mul(load(out + d), inverse), static_cast<int>(V_ - d));
    }
  }

  // What a row's weighted values are multiplied with where a sink takes its share.
  static float with_sink(float row_max, float row_sum, float sink) {
    const float logit = sink * kLog2E, top = row_max > logit ? row_max : logit;
    float both[16] = {};
    both[0] = row_max - top;
    both[1] = logit - top;
    store(both, exp2_nonpositive(load(both)));
    return both[0] / __builtin_fmaf(row_sum, both[0], both[1]);
  }

  const Plan& plan_;
  const AttentionArgs& a_;
  const StepView& view_;
  const ThreadCtx& ctx_;
  const int64_t D_;
  const int64_t V_; // columns of a value
  const int64_t run_bytes_;
  float* q_;
  float* running_base_;
  Results tile_;
  float* scores_;
  float* expanded_ = nullptr;
  float* query_units_ = nullptr;
  int16_t* rounded_q_ = nullptr;
  Chain cut_ = {};
  int64_t cut_at_ = 0; // first split of cut_ that is another thread's
  bool has_cut_chain_ = false;
};

} // namespace

void attention(const AttentionArgs& a, const StepView& view, const ThreadCtx& ctx) {
  const Plan plan(a, view, ctx.n_threads);
  if (plan.total == 0) return;
  Worker worker(plan, ctx);
  worker.run();
  if (ctx.n_threads == 1 || !plan.has_divisible) return;
  ctx.barrier->wait(ctx.barrier, ctx.thread);
  worker.finish_cut_chain();
}

} // namespace tiercel::TIERCEL_LEVEL
