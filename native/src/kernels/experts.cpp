// A mixture's experts: rows sorted by expert, one product an expert and projection, then each row's weighted sum.
//
// Contract, for every row, at every level, for any M, number of threads and rows_at_once:
//
//   h_e = act(gate_e x (+ bias), up_e x (+ bias)), d_e = down_e h_e (+ bias): what linear and gated compute for that row
//   acc = 0; for the row's experts e by ascending number: acc = fma(weight_e, d_e, acc); y = acc
//
// Only matrices of experts that some row chose are read. Every thread sorts for itself, which is cheaper than a barrier. A pair is a row
// with one of its experts; pairs stand in the order of experts, then of rows. An expert's rows of x must lie together: unless there is one
// row only, they are copied.
#include "rows.hpp"
#include "table.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

// Up to so many rows, experts are dealt out whole. Zen 4, two threads, 8 of 64 experts of 1024 x 256 in Q4_0: 1 row 91 -> 77 us a layer,
// 8 rows 337 -> 266, 16 rows 596 -> 491, 32 rows 1066 -> 984; with 64 rows experts differ too much in length.
constexpr int64_t kWholeRows = 16;

int64_t align64(int64_t n) { return (n + 63) / 64 * 64; }

// Where things lie in the shared scratch; laid out as experts_shared_bytes (experts_scratch.cpp) counts.
struct Scratch {
  int32_t* begin;    // [n_experts + 1] first pair of each expert; this thread's own
  int32_t* pair_row; // [pairs] row of each pair, from the first of this pass; own
  int32_t* row_pair; // [rows, top_k] pair of each row's j-th expert; own
  uint8_t* x;        // [pairs] rows of x, floats or QuantRows
  float* gate_up;    // [pairs, 2 f]
  uint8_t* hidden;   // [pairs] of f, floats or QuantRows
  float* down;       // [pairs, width]
};

Scratch lay_out(const ExpertsArgs& a, const ThreadCtx& ctx) {
  const int64_t pairs = a.rows_at_once * a.top_k;
  const int64_t counts = align64((a.n_experts + 1) * 4), list = align64(pairs * 4);
  uint8_t* at = a.shared_scratch + ctx.thread * (counts + 2 * list);
  Scratch s;
  s.begin = reinterpret_cast<int32_t*>(at);
  s.pair_row = reinterpret_cast<int32_t*>(at + counts);
  s.row_pair = reinterpret_cast<int32_t*>(at + counts + list);
  at = a.shared_scratch + ctx.n_threads * (counts + 2 * list);
  s.x = at;
  at += pairs * align64(4 * a.k);
  s.gate_up = reinterpret_cast<float*>(at);
  at += align64(pairs * 8 * a.f);
  s.hidden = at;
  at += pairs * align64(4 * a.f);
  s.down = reinterpret_cast<float*>(at);
  return s;
}

// Counting sort of the pairs of rows first .. first + n.
void sort_pairs(const ExpertsArgs& a, int64_t first, int64_t n, const Scratch& s) {
  for (int32_t e = 0; e <= a.n_experts; ++e) s.begin[e] = 0;
  for (int64_t r = 0; r < n; ++r)
    for (int32_t j = 0; j < a.top_k; ++j) ++s.begin[static_cast<int64_t>(a.route[(first + r) * a.ld_route + j]) + 1];
  for (int32_t e = 0; e < a.n_experts; ++e) s.begin[e + 1] += s.begin[e];
  for (int64_t r = 0; r < n; ++r)
    for (int32_t j = 0; j < a.top_k; ++j) {
      const int32_t pair = s.begin[static_cast<int64_t>(a.route[(first + r) * a.ld_route + j])]++;
      s.pair_row[pair] = static_cast<int32_t>(r);
      s.row_pair[r * a.top_k + j] = pair;
    }
  for (int32_t e = a.n_experts; e > 0; --e) s.begin[e] = s.begin[e - 1];
  s.begin[0] = 0;
}

void wait(const ThreadCtx& ctx) {
  if (ctx.n_threads > 1) ctx.barrier->wait(ctx.barrier, ctx.thread);
}

// Calls fn(e, first pair, pairs, next) for each chosen expert; next is the one after it, or -1.
template <class Fn>
void each_expert(const ExpertsArgs& a, const Scratch& s, Fn fn) {
  int32_t e = 0;
  const auto skip = [&] {
    while (e < a.n_experts && s.begin[e + 1] == s.begin[e]) ++e;
  };
  skip();
  while (e < a.n_experts) {
    const int32_t now = e++;
    skip();
    fn(now, s.begin[now], s.begin[now + 1] - s.begin[now], e < a.n_experts ? e : -1);
  }
}

// What is the same for every expert of one pass.
struct Pass {
  const ExpertsArgs& a;
  const Scratch& s;
  int64_t first; // row of x
  bool is_one_row;
  int64_t hidden_bytes; // of a row

  const uint8_t* x_row(int64_t row) const {
    return a.xq ? a.xq->data + (first + row) * a.xq->stride_bytes : reinterpret_cast<const uint8_t*>(a.x + (first + row) * a.ldx);
  }
  int64_t x_bytes() const { return a.xq ? a.xq->stride_bytes : a.k * 4; }

  // y of gate and up, for m pairs of expert e from `pair` on; ahead: what this thread reads next.
  void gate_up(int32_t e, int64_t pair, int64_t m, const uint8_t* ahead, const ThreadCtx& ctx) const {
    const int64_t f = a.f;
    const LinearPart parts[2] = {{a.gate + e, a.gate_bias ? a.gate_bias + e * f : nullptr, 0},
                                 {a.up + e, a.up_bias ? a.up_bias + e * f : nullptr, f}};
    const uint8_t* rows = is_one_row ? x_row(0) : s.x + pair * x_bytes();
    const QuantRows q = {const_cast<uint8_t*>(rows), x_bytes(), a.k};
    const float* floats = a.xq ? nullptr : reinterpret_cast<const float*>(rows);
    ThreadCtx mine = ctx;
    mine.ahead = ahead;
    linear({parts, 2, m, a.xq ? &q : nullptr, floats, x_bytes() / 4, s.gate_up + pair * 2 * f, 2 * f, nullptr, 0}, mine);
  }

  void activate(int64_t pair, int64_t m, const ThreadCtx& ctx) const {
    const QuantRows q = {s.hidden + pair * hidden_bytes, hidden_bytes, a.f};
    gated({s.gate_up + pair * 2 * a.f, 2 * a.f, m, a.f, a.act, hidden_floats(pair), a.f, a.is_hidden_quantized ? &q : nullptr, a.p0, a.p1},
          ctx);
  }

  void down(int32_t e, int64_t pair, int64_t m, const uint8_t* ahead, const ThreadCtx& ctx) const {
    const LinearPart part = {a.down + e, a.down_bias ? a.down_bias + e * a.width : nullptr, 0};
    const QuantRows q = {s.hidden + pair * hidden_bytes, hidden_bytes, a.f};
    const bool is_int = a.is_hidden_quantized;
    ThreadCtx mine = ctx;
    mine.ahead = ahead;
    linear({&part, 1, m, is_int ? &q : nullptr, is_int ? nullptr : hidden_floats(pair), a.f, s.down + pair * a.width, a.width, nullptr, 0},
           mine);
  }

  float* hidden_floats(int64_t pair) const { return reinterpret_cast<float*>(s.hidden) + pair * a.f; }
};

void run_rows(const ExpertsArgs& a, int64_t first, int64_t n, const ThreadCtx& ctx) {
  const Scratch s = lay_out(a, ctx);
  const int64_t n_pairs = n * a.top_k;
  sort_pairs(a, first, n, s);
  const Pass pass = {a, s, first, n == 1, a.is_hidden_quantized ? quant_row_bytes(a.f) : a.f * 4};
  if (n > 1) {
    const Range mine = share(n_pairs, ctx);
    for (int64_t p = mine.begin; p < mine.end; ++p)
      std::memcpy(s.x + p * pass.x_bytes(), pass.x_row(s.pair_row[p]), static_cast<size_t>(pass.x_bytes()));
    wait(ctx);
  }

  // Few rows: as many experts as can be dealt out evenly are each computed by one thread, start to end. Its reads are longer and no barrier
  // stands between its products. The rest, and all experts of many rows, which differ in length, are shared by the threads tile by tile.
  int32_t n_whole = 0;
  if (n <= kWholeRows) {
    each_expert(a, s, [&](int32_t, int64_t, int64_t, int32_t) { ++n_whole; });
    n_whole -= n_whole % ctx.n_threads;
  }
  const int32_t own_begin = n_whole / ctx.n_threads * ctx.thread, own_end = n_whole / ctx.n_threads * (ctx.thread + 1);
  ThreadCtx alone = ctx;
  alone.thread = 0, alone.n_threads = 1;
  int32_t i = 0;
  each_expert(a, s, [&](int32_t e, int64_t pair, int64_t m, int32_t next) {
    if (const int32_t at = i++; at < own_begin || at >= own_end) return;
    pass.gate_up(e, pair, m, a.down[e].data, alone);
    pass.activate(pair, m, alone);
    pass.down(e, pair, m, i < own_end && next >= 0 ? a.gate[next].data : nullptr, alone);
  });

  i = 0;
  int64_t shared_pair = n_pairs;
  each_expert(a, s, [&](int32_t e, int64_t pair, int64_t m, int32_t) {
    if (i++ < n_whole) return;
    shared_pair = pair < shared_pair ? pair : shared_pair;
    pass.gate_up(e, pair, m, nullptr, ctx);
  });
  if (shared_pair < n_pairs) {
    wait(ctx);
    pass.activate(shared_pair, n_pairs - shared_pair, ctx);
    wait(ctx);
    i = 0;
    each_expert(a, s, [&](int32_t e, int64_t pair, int64_t m, int32_t) {
      if (i++ >= n_whole) pass.down(e, pair, m, nullptr, ctx);
    });
  }
  wait(ctx);

  // Pieces of 256 columns: with one row, every thread has some.
  const int64_t n_pieces = (a.width + 255) / 256;
  const Range mine = share(n * n_pieces, ctx);
  for (int64_t u = mine.begin; u < mine.end; ++u) {
    const int64_t r = u / n_pieces, begin = u % n_pieces * 256, end = begin + 256 < a.width ? begin + 256 : a.width;
    const float* weights = a.route + (first + r) * a.ld_route + a.top_k;
    for (int64_t i = begin; i < end; i += 16) {
      const int left = lanes_left(i, end);
      F16v acc = zero();
      for (int32_t j = 0; j < a.top_k; ++j) {
        const float* d = s.down + s.row_pair[r * a.top_k + j] * a.width + i;
        acc = fma(set1(weights[j]), left == 16 ? load(d) : load_n(d, left), acc);
      }
      store_n(a.y + (first + r) * a.ldy + i, acc, left);
    }
  }
}

} // namespace

void experts(const ExpertsArgs& a, const ThreadCtx& ctx) {
  for (int64_t first = 0; first < a.m; first += a.rows_at_once) {
    // The pass before is read to its end by all before its scratch is written again.
    if (first > 0) wait(ctx);
    run_rows(a, first, a.m - first < a.rows_at_once ? a.m - first : a.rows_at_once, ctx);
  }
}

} // namespace tiercel::TIERCEL_LEVEL
