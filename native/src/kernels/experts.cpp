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

// One product of a chosen expert's rows; tells linear what is read next.
void product(LinearArgs args, const LinearPart* next, const ThreadCtx& ctx) {
  ThreadCtx mine = ctx;
  mine.ahead = nullptr;
  if (next) {
    LinearArgs later = args;
    later.parts = next;
    mine.ahead = linear_start(later, ctx).data;
  }
  linear(args, mine);
}

void run_rows(const ExpertsArgs& a, int64_t first, int64_t n, const ThreadCtx& ctx) {
  const Scratch s = lay_out(a, ctx);
  const int64_t n_pairs = n * a.top_k, f = a.f;
  sort_pairs(a, first, n, s);

  const uint8_t* x = a.xq ? a.xq->data : reinterpret_cast<const uint8_t*>(a.x);
  const int64_t x_stride = a.xq ? a.xq->stride_bytes : a.ldx * 4, x_bytes = a.xq ? a.xq->stride_bytes : a.k * 4;
  const auto row_of = [&](int64_t pair) { return x + (first + s.pair_row[pair]) * x_stride; };
  if (n > 1) {
    const Range mine = share(n_pairs, ctx);
    for (int64_t p = mine.begin; p < mine.end; ++p) std::memcpy(s.x + p * x_bytes, row_of(p), static_cast<size_t>(x_bytes));
    wait(ctx);
  }

  each_expert(a, s, [&](int32_t e, int64_t pair, int64_t m, int32_t next) {
    const auto parts_of = [&](int32_t i, LinearPart* to) {
      to[0] = {a.gate + i, a.gate_bias ? a.gate_bias + i * f : nullptr, 0};
      to[1] = {a.up + i, a.up_bias ? a.up_bias + i * f : nullptr, f};
    };
    LinearPart parts[2], later[2];
    parts_of(e, parts);
    if (next >= 0) parts_of(next, later);
    const uint8_t* rows = n == 1 ? row_of(pair) : s.x + pair * x_bytes;
    const QuantRows q = {const_cast<uint8_t*>(rows), x_bytes, a.k};
    const LinearArgs args = {parts,
                             2,
                             m,
                             a.xq ? &q : nullptr,
                             a.xq ? nullptr : reinterpret_cast<const float*>(rows),
                             x_bytes / 4,
                             s.gate_up + pair * 2 * f,
                             2 * f,
                             nullptr,
                             0};
    product(args, next >= 0 ? later : nullptr, ctx);
  });
  wait(ctx);

  const int64_t hidden_bytes = a.is_hidden_quantized ? quant_row_bytes(f) : f * 4;
  const QuantRows hidden = {s.hidden, hidden_bytes, f};
  float* hidden_floats = reinterpret_cast<float*>(s.hidden);
  gated({s.gate_up, 2 * f, n_pairs, f, a.act, hidden_floats, f, a.is_hidden_quantized ? &hidden : nullptr, a.p0, a.p1}, ctx);
  wait(ctx);

  each_expert(a, s, [&](int32_t e, int64_t pair, int64_t m, int32_t next) {
    const auto part_of = [&](int32_t i) { return LinearPart{a.down + i, a.down_bias ? a.down_bias + i * a.width : nullptr, 0}; };
    const LinearPart part = part_of(e), later = part_of(next >= 0 ? next : e);
    const QuantRows q = {s.hidden + pair * hidden_bytes, hidden_bytes, f};
    const bool is_int = a.is_hidden_quantized;
    const LinearArgs args = {
        &part, 1, m, is_int ? &q : nullptr, is_int ? nullptr : hidden_floats + pair * f, f, s.down + pair * a.width, a.width, nullptr, 0};
    product(args, next >= 0 ? &later : nullptr, ctx);
  });
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
