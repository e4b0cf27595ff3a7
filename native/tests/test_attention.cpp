// Attention and the writing of keys and values: the same bits however a sequence is computed, and close to a plain
// double version.
#include <algorithm>
#include <cmath>
#include <memory>

#include "check.hpp"
#include "kernel_rig.hpp"

namespace {

using namespace tiercel;
using namespace tiercel::test;

struct Shape {
  int32_t H, K, D;
  KvType type = KvType::F16;
  int32_t window = 0;
  float softcap = 0.0f;
  int32_t page_tokens = 16;
};

// A sequence's projected rows: [q | k | v] by position.
struct Sequence {
  int32_t length;
  std::vector<float> qkv;
};

int64_t row_width(const Shape& s) { return int64_t{s.H + 2 * s.K} * s.D; }

Sequence sequence(const Shape& s, int32_t length, uint64_t seed) { return {length, Numbers(seed).floats(length * row_width(s), 1.5f)}; }

// Rows of one sequence that one step computes.
struct Piece {
  int32_t seq, n_rows;
};
using Step = std::vector<Piece>;

struct Run {
  const KernelTable* level;
  int32_t n_threads = 1;
  uint64_t page_seed = 1; // order of page ids in the pool
  bool has_shared_scratch = true;
};

// Computes sequences step by step over a pool of poisoned pages; returns each sequence's outputs [length, H * D].
class Rig {
 public:
  Rig(const Shape& s, const std::vector<Sequence>& seqs, const Run& run) : s_(s), seqs_(seqs), run_(run), done_(seqs.size(), 0) {
    int32_t longest = 1;
    for (const Sequence& q : seqs) longest = std::max(longest, q.length);
    stride_ = (longest + s.page_tokens - 1) / s.page_tokens;
    const int64_t n_slots = static_cast<int64_t>(seqs.size());
    table_.resize(static_cast<size_t>(n_slots * stride_));
    for (size_t i = 0; i < table_.size(); ++i) table_[i] = static_cast<int32_t>(i);
    Numbers numbers(run.page_seed);
    for (size_t i = table_.size(); i > 1; --i) std::swap(table_[i - 1], table_[numbers.next() % i]);
    head_bytes_ = s.page_tokens / 16 * kv_run_bytes(s.type, s.D);
    pool_ = std::make_unique<Poisoned>(static_cast<int64_t>(table_.size()) * s.K * head_bytes_);
    shared_bytes_ = run.has_shared_scratch ? attention_shared_bytes(s.H, s.D, n_slots, longest, run.n_threads) : 0;
    for (const Sequence& q : seqs) outputs.emplace_back(static_cast<size_t>(int64_t{q.length} * s.H * s.D));
  }

  void compute(const Step& step) {
    std::vector<int32_t> slot, start, rows{0}, pos, row_seq;
    std::vector<float> qkv;
    for (const Piece& p : step) {
      slot.push_back(p.seq);
      start.push_back(done_[p.seq]);
      rows.push_back(rows.back() + p.n_rows);
      for (int32_t i = 0; i < p.n_rows; ++i) {
        pos.push_back(done_[p.seq] + i);
        row_seq.push_back(static_cast<int32_t>(slot.size()) - 1);
      }
      const auto from = seqs_[p.seq].qkv.begin() + done_[p.seq] * row_width(s_);
      qkv.insert(qkv.end(), from, from + p.n_rows * row_width(s_));
    }
    StepView view{};
    view.n_tokens = rows.back();
    view.n_seqs = static_cast<int32_t>(slot.size());
    view.seq_slot = slot.data();
    view.seq_start = start.data();
    view.seq_rows = rows.data();
    view.row_pos = pos.data();
    view.row_seq = row_seq.data();
    view.page_table = table_.data();
    view.page_table_stride = stride_;
    std::vector<float> y(static_cast<size_t>(int64_t{view.n_tokens} * s_.H * s_.D));
    launch(view, qkv, y);
    size_t at = 0;
    for (const Piece& p : step) {
      const size_t n = static_cast<size_t>(int64_t{p.n_rows} * s_.H * s_.D);
      std::copy_n(y.data() + at, n, outputs[p.seq].data() + int64_t{done_[p.seq]} * s_.H * s_.D);
      at += n;
      done_[p.seq] += p.n_rows;
    }
  }

  std::vector<std::vector<float>> outputs;

 private:
  void launch(const StepView& view, std::vector<float>& qkv, std::vector<float>& y) {
    const KvLayer kv{pool_->data(), s_.K * head_bytes_, head_bytes_, s_.page_tokens, s_.type};
    RopeKvArgs write{};
    write.qkv = qkv.data();
    write.ld = row_width(s_);
    write.n_heads = s_.H, write.n_kv_heads = s_.K, write.head_dim = s_.D;
    write.kv = kv;
    Poisoned shared(shared_bytes_);
    AttentionArgs a{};
    a.q = qkv.data();
    a.ldq = row_width(s_);
    a.y = y.data();
    a.ldy = int64_t{s_.H} * s_.D;
    a.n_heads = s_.H, a.n_kv_heads = s_.K, a.head_dim = s_.D;
    a.scale = 1.0f / std::sqrt(static_cast<float>(s_.D));
    a.window = s_.window;
    a.softcap = s_.softcap;
    a.kv = kv;
    a.shared_scratch = run_.has_shared_scratch ? shared.data() : nullptr;
    a.shared_scratch_bytes = shared_bytes_;
    on_team(run_.n_threads, attention_thread_bytes(s_.H, s_.K, s_.D), [&](const ThreadCtx& ctx) {
      run_.level->rope_kv(write, view, ctx);
      ctx.barrier->wait(ctx.barrier, ctx.thread);
      run_.level->attention(a, view, ctx);
    });
  }

  const Shape s_;
  const std::vector<Sequence>& seqs_;
  const Run run_;
  std::vector<int32_t> done_;
  std::vector<int32_t> table_;
  int64_t stride_, head_bytes_, shared_bytes_;
  std::unique_ptr<Poisoned> pool_;
};

const KernelTable* strongest() { return kernel_level(n_kernel_levels() - 1); }

std::vector<float> alone(const Shape& s, const Sequence& q, const Run& run, const std::vector<int32_t>& chunks) {
  const std::vector<Sequence> seqs{q};
  Rig rig(s, seqs, run);
  int32_t left = q.length;
  for (size_t i = 0; left > 0; ++i) {
    const int32_t n = std::min(left, chunks[i % chunks.size()]);
    rig.compute({{0, n}});
    left -= n;
  }
  return rig.outputs[0];
}

// A sequence whose keys and values are what the pool makes of them.
Sequence as_stored(const Shape& s, Sequence q) {
  if (s.type == KvType::F32) return q;
  for (int32_t t = 0; t < q.length; ++t)
    for (int32_t h = s.H; h < s.H + 2 * s.K; ++h) {
      float* x = q.qkv.data() + t * row_width(s) + h * s.D;
      const int32_t columns = h < s.H + s.K ? 64 : s.D; // that share a scale
      for (int32_t begin = 0; begin < s.D; begin += columns) {
        const int32_t end = std::min(begin + columns, s.D);
        float most = 0.0f;
        for (int32_t d = begin; d < end; ++d) most = std::max(most, std::fabs(x[d]));
        const float scale = static_cast<float>(static_cast<_Float16>(most / 127.0f));
        for (int32_t d = begin; d < end; ++d)
          x[d] = s.type == KvType::F16 ? static_cast<float>(static_cast<_Float16>(x[d]))
                                       : scale * std::max(-127.0f, std::min(127.0f, std::rint(x[d] / scale)));
      }
    }
  return q;
}

// One query head of one row in double.
std::vector<double> plain_row(const Shape& s, const Sequence& q, int32_t t, int32_t h) {
  const int64_t width = row_width(s), k_col = int64_t{s.H + h / (s.H / s.K)} * s.D, v_col = k_col + int64_t{s.K} * s.D;
  const int32_t first = s.window > 0 ? std::max(0, t - s.window + 1) : 0;
  std::vector<double> score, out(static_cast<size_t>(s.D), 0.0);
  for (int32_t i = first; i <= t; ++i) {
    double dot = 0.0;
    for (int32_t d = 0; d < s.D; ++d) dot += q.qkv[t * width + h * s.D + d] * double{q.qkv[i * width + k_col + d]};
    dot /= std::sqrt(static_cast<double>(s.D));
    score.push_back(s.softcap > 0.0f ? s.softcap * std::tanh(dot / s.softcap) : dot);
  }
  const double top = *std::max_element(score.begin(), score.end());
  double sum = 0.0;
  for (int32_t i = first; i <= t; ++i) {
    const double p = std::exp(score[i - first] - top);
    sum += p;
    for (int32_t d = 0; d < s.D; ++d) out[d] += p * double{q.qkv[i * width + v_col + d]};
  }
  for (double& v : out) v /= sum;
  return out;
}

double worst_error(const Shape& s, const Sequence& sequence, const std::vector<float>& y) {
  const Sequence q = as_stored(s, sequence);
  double worst = 0.0;
  for (int32_t t = 0; t < q.length; t += t < 40 ? 1 : 13)
    for (int32_t h = 0; h < s.H; ++h) {
      const std::vector<double> row = plain_row(s, q, t, h);
      for (int32_t d = 0; d < s.D; ++d) worst = std::max(worst, std::fabs(row[d] - y[(int64_t{t} * s.H + h) * s.D + d]));
    }
  return worst;
}

const Shape kShapes[] = {
    {9, 3, 64},
    {4, 1, 24, KvType::F16, 40},
    {4, 2, 24, KvType::F32, 0, 5.0f, 48},
    {8, 8, 64, KvType::F32, 300},
    {4, 2, 80, KvType::F16, 0, 0.0f, 32},
    {4, 1, 128, KvType::F16, 17, 30.0f},
    {4, 2, 256, KvType::F32},
    {14, 2, 64, KvType::F16, 257},
    {9, 3, 64, KvType::I8},
    {4, 1, 24, KvType::I8, 40, 0.0f, 32},
    {4, 2, 80, KvType::I8, 0, 20.0f},
    {4, 1, 256, KvType::I8, 270},
};

TEST(attention_is_close_to_its_definition) {
  for (const Shape& s : kShapes) {
    const Sequence q = sequence(s, 300, 11);
    // int8 pages: queries and weights are rounded to 16 bits
    CHECK(worst_error(s, q, alone(s, q, {strongest()}, {300})) < (s.type == KvType::I8 ? 4e-4 : 2e-5));
  }
}

TEST(attention_rows_have_the_same_bits_at_every_level) {
  for (const Shape& s : kShapes) {
    const Sequence q = sequence(s, 290, 12);
    const std::vector<float> expected = alone(s, q, {strongest()}, {290});
    for (int32_t i = 0; i + 1 < n_kernel_levels(); ++i) CHECK(same_bits(alone(s, q, {kernel_level(i), 2}, {290}), expected));
  }
}

TEST(attention_rows_have_the_same_bits_for_every_chunking_and_number_of_threads) {
  for (const Shape& s : kShapes) {
    const int32_t length = s.D <= 64 ? 517 : 280;
    const Sequence q = sequence(s, length, 13);
    const std::vector<float> expected = alone(s, q, {strongest()}, {length});
    for (int32_t n_threads = 1; n_threads <= 3; ++n_threads) {
      const Run run{strongest(), n_threads, static_cast<uint64_t>(n_threads) + 5};
      CHECK(same_bits(alone(s, q, run, {length}), expected));
      CHECK(same_bits(alone(s, q, run, {7, 1, 64, 2, 33, 1, 1, 128, 5}), expected));
      CHECK(same_bits(alone(s, q, run, {259, 3, 17}), expected));
    }
    CHECK(same_bits(alone(s, q, {strongest(), 1, 9}, {1}), expected));
  }
}

TEST(a_weaker_level_decodes_the_bits_that_the_strongest_prefilled) {
  for (const Shape& s : {Shape{9, 3, 64}, Shape{9, 3, 64, KvType::I8}}) {
    const Sequence q = sequence(s, 270, 14);
    const std::vector<float> expected = alone(s, q, {strongest()}, {270});
    for (int32_t i = 0; i + 1 < n_kernel_levels(); ++i)
      CHECK(same_bits(alone(s, q, {kernel_level(i), 1}, {200, 1, 1, 1, 40, 1}), expected));
  }
}

TEST(a_long_context_cut_between_threads_keeps_its_bits) {
  for (const Shape& s :
       {Shape{6, 2, 24}, Shape{4, 2, 24, KvType::F16, 1500}, Shape{4, 1, 24, KvType::F32, 0, 8.0f}, Shape{4, 2, 24, KvType::I8}}) {
    const Sequence q = sequence(s, 3003, 15);
    const std::vector<float> expected = alone(s, q, {strongest(), 1, 1, false}, {2999, 4});
    for (const int32_t n_threads : {1, 2, 3, 7}) CHECK(same_bits(alone(s, q, {strongest(), n_threads}, {2990, 1, 1, 5, 2, 4}), expected));
    CHECK(same_bits(alone(s, q, {strongest(), 3, 1, false}, {2990, 1, 1, 5, 2, 4}), expected));
  }
}

TEST(attention_of_a_sequence_does_not_depend_on_its_batch_mates) {
  for (const Shape& s : {Shape{9, 3, 64}, Shape{4, 1, 24, KvType::F16, 50}, Shape{9, 3, 64, KvType::I8, 100}}) {
    std::vector<Sequence> seqs;
    const int32_t lengths[] = {40, 600, 1, 130, 333};
    for (int32_t i = 0; i < 5; ++i) seqs.push_back(sequence(s, lengths[i], 20 + static_cast<uint64_t>(i)));
    for (const int32_t n_threads : {1, 2, 3}) {
      Rig rig(s, seqs, {strongest(), n_threads, 3});
      rig.compute({{1, 300}, {0, 39}, {4, 5}});
      rig.compute({{0, 1}, {1, 1}, {2, 1}, {3, 100}, {4, 1}});
      rig.compute({{4, 327}, {1, 298}, {3, 1}});
      rig.compute({{3, 29}, {1, 1}});
      for (int32_t i = 0; i < 5; ++i) CHECK(same_bits(rig.outputs[i], alone(s, seqs[i], {strongest()}, {lengths[i]})));
    }
  }
}

// Whether rows [0, n) of two outputs have the same bits.
bool same_rows(const Shape& s, const std::vector<float>& a, const std::vector<float>& b, int32_t begin, int32_t end) {
  const int64_t w = int64_t{s.H} * s.D;
  return std::memcmp(a.data() + begin * w, b.data() + begin * w, static_cast<size_t>((end - begin) * w) * sizeof(float)) == 0;
}

TEST(a_nan_reaches_only_the_rows_that_see_it) {
  for (const KvType type : {KvType::F16, KvType::F32, KvType::I8}) {
    const Shape s{6, 2, 24, type};
    const int32_t length = 300, at = 77;
    const Sequence clean = sequence(s, length, 30);
    const std::vector<float> expected = alone(s, clean, {strongest()}, {length});
    const int64_t first[] = {0, int64_t{s.H} * s.D, int64_t{s.H + s.K} * s.D, row_width(s)};
    for (int part = 0; part < 3; ++part) { // q, k, v
      Sequence bad = clean;
      for (int64_t c = first[part]; c < first[part + 1]; ++c) bad.qkv[at * row_width(s) + c] = std::nanf("");
      for (int32_t level = 0; level < n_kernel_levels(); ++level) {
        const std::vector<float> y = alone(s, bad, {kernel_level(level), 2}, {length});
        CHECK(same_rows(s, y, expected, 0, at));
        CHECK(std::isnan(y[int64_t{at} * s.H * s.D]));
        if (part == 0) CHECK(same_rows(s, y, expected, at + 1, length));
        if (part > 0) CHECK(std::isnan(y[int64_t{length - 1} * s.H * s.D]));
      }
    }
  }
}

TEST(int8_pages_take_extreme_and_zero_rows) {
  const Shape s{6, 2, 24, KvType::I8};
  Sequence q = sequence(s, 290, 32);
  const int64_t w = row_width(s);
  for (int32_t t = 3; t < 290; t += 7) { // rows of zeros, of tiny numbers and of the largest that a scale can tell
    const float factor = t % 3 == 0 ? 0.0f : t % 3 == 1 ? 1e-30f : 1e5f;
    for (int64_t c = int64_t{s.H} * s.D; c < w; ++c) q.qkv[t * w + c] *= factor;
  }
  for (int64_t c = 0; c < int64_t{s.H} * s.D; ++c) q.qkv[5 * w + c] = 0.0f, q.qkv[6 * w + c] *= 1e-35f;
  const std::vector<float> expected = alone(s, q, {strongest()}, {290});
  for (const float y : expected) CHECK(std::isfinite(y));
  for (int32_t i = 0; i < n_kernel_levels(); ++i) CHECK(same_bits(alone(s, q, {kernel_level(i), 2}, {100, 1, 1, 60, 128}), expected));
}

TEST(a_step_without_rows_is_legal) {
  const Shape s{6, 2, 24};
  const std::vector<Sequence> seqs{sequence(s, 20, 31)};
  Rig rig(s, seqs, {strongest(), 2});
  rig.compute({});
  rig.compute({{0, 0}});
  rig.compute({{0, 20}});
  CHECK(same_bits(rig.outputs[0], alone(s, seqs[0], {strongest()}, {20})));
}

TEST(attention_scratch_stays_modest) {
  CHECK(attention_thread_bytes(9, 3, 64) < int64_t{1} << 20);
  CHECK(attention_shared_bytes(9, 64, 64, 8192, 2) < int64_t{1} << 20);
  CHECK(attention_shared_bytes(32, 128, 64, 131072, 16) < int64_t{256} << 20);
}

} // namespace
