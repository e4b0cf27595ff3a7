// Kernels whose output row needs one input row: norm, gated activation, softcap, add, row selection, argmax.
//
// Orders that are contract (same bits at every level and for every split over threads):
//   norm      sum of squares as in rows.hpp; factor = 1 / sqrt(sum / width + eps); (x * factor) * w; residual + that.
//   gated     silu: gate / (1 + exp(-gate)); gelu_tanh: gate / (1 + exp(-c * fma(0.044715 g^2, g, g))); then times up.
//             The activations with parameters: as situ, swiglu_clamp and clamp below are written.
//   softcap   cap * tanh(x / cap).
// Rows are dealt to threads whole where a row has a reduction; other kernels may also cut a row, between groups of 32
// where it is rounded to int8.
//
// REQUIRES: with yq set, ctx.scratch holds one row of floats, and the row's width is a multiple of 32.
#include "rows.hpp"

#include "table.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

// Cuts m rows of `width` columns into pieces, in steps of `unit` columns, for elementwise work: whole rows, or n_threads pieces a row when
// rows are few.
template <class Fn>
TIERCEL_INLINE void for_pieces(int64_t m, int64_t width, int64_t unit, const ThreadCtx& ctx, Fn fn) {
  const int64_t n_cuts = m < ctx.n_threads ? ctx.n_threads : 1;
  const int64_t cut = ((width + n_cuts - 1) / n_cuts + unit - 1) / unit * unit;
  const Range mine = share(m * n_cuts, ctx);
  for (int64_t u = mine.begin; u < mine.end; ++u) {
    const int64_t begin = u % n_cuts * cut;
    const int64_t end = begin + cut < width ? begin + cut : width;
    if (begin < end) fn(u / n_cuts, begin, end);
  }
}

// Applies fn to the 16-lane vectors of columns [begin, end); the last may be short.
template <class Fn>
TIERCEL_INLINE void for_vectors(int64_t begin, int64_t end, Fn fn) {
  for (int64_t i = begin; i < end; i += 16) fn(i, lanes_left(i, end));
}

TIERCEL_INLINE F16v load_part(const float* p, int n) { return n == 16 ? load(p) : load_n(p, n); }
TIERCEL_INLINE void store_part(float* p, F16v v, int n) {
  if (n == 16)
    store(p, v);
  else
    store_n(p, v, n);
}

TIERCEL_INLINE F16v silu(F16v g) { return div(g, add(set1(1.0f), exp(neg(g)))); }

// g / 2 * (1 + tanh(u)) is g * sigmoid(2u), which keeps its digits where the tanh is near -1.
TIERCEL_INLINE F16v gelu_tanh(F16v g) {
  const F16v cubic = fma(mul(mul(g, g), set1(0.044715f)), g, g);
  return div(g, add(set1(1.0f), exp(mul(cubic, set1(-1.5957691216057308f))))); // -2 sqrt(2 / pi)
}

// tanh with its digits near zero too, where 1 - 2 / (e^2x + 1) loses them: up to 0.625 an odd polynomial, relative error below 2e-7.
TIERCEL_INLINE F16v tanh_everywhere(F16v x) {
  const F16v z = mul(x, x), size = abs(x);
  F16v p = set1(-5.70498872745e-3f);
  p = fma(p, z, set1(2.06390887954e-2f));
  p = fma(p, z, set1(-5.37397155531e-2f));
  p = fma(p, z, set1(1.33314422036e-1f));
  p = fma(p, z, set1(-3.33332819422e-1f));
  const F16v near = fma(mul(p, z), x, x);
  // 0.62500006 is the next float: one of the two is zero, or both are NaN.
  return add(zero_below(near, neg(size), set1(-0.625f)), zero_below(tanh(x), size, set1(0.62500006f)));
}

// beta * tanh(g / beta) * sigmoid(g), times linear_beta * tanh(u / linear_beta), or u if that is 0.
TIERCEL_INLINE F16v situ(F16v g, F16v u, F16v beta, F16v linear_beta, bool is_capped) {
  const F16v a = mul(mul(beta, tanh_everywhere(div(g, beta))), sigmoid(g));
  return mul(a, is_capped ? mul(linear_beta, tanh_everywhere(div(u, linear_beta))) : u);
}

// min and max give their second operand when one is NaN: the value must stand there, or a NaN would become the limit.
TIERCEL_INLINE F16v clamp(F16v x, F16v limit) { return max(neg(limit), min(limit, x)); }

TIERCEL_INLINE F16v swiglu_clamp(F16v g, F16v u, F16v alpha, F16v limit) {
  const F16v capped = min(limit, g);
  return mul(add(clamp(u, limit), set1(1.0f)), mul(capped, sigmoid(mul(alpha, capped))));
}

template <class Act>
TIERCEL_INLINE void gated_part(const float* x, int64_t f, int64_t begin, int64_t end, float* y, Act act) {
  for_vectors(begin, end, [&](int64_t i, int n) { store_part(y + i, act(load_part(x + i, n), load_part(x + f + i, n)), n); });
}

TIERCEL_INLINE void gated_columns(const GatedArgs& a, const float* x, int64_t begin, int64_t end, float* y) {
  const F16v p0 = set1(a.p0), p1 = set1(a.p1);
  switch (a.act) {
    case Activation::Silu: return gated_part(x, a.f, begin, end, y, [](F16v g, F16v u) { return mul(silu(g), u); });
    case Activation::GeluTanh: return gated_part(x, a.f, begin, end, y, [](F16v g, F16v u) { return mul(gelu_tanh(g), u); });
    case Activation::Situ: return gated_part(x, a.f, begin, end, y, [&](F16v g, F16v u) { return situ(g, u, p0, p1, a.p1 != 0.0f); });
    case Activation::SwigluClamp: return gated_part(x, a.f, begin, end, y, [&](F16v g, F16v u) { return swiglu_clamp(g, u, p0, p1); });
    case Activation::SiluClamp:
      return gated_part(x, a.f, begin, end, y, [&](F16v g, F16v u) { return mul(min(p0, silu(g)), clamp(u, p0)); });
  }
}

// A block of argmax: small enough that finding the index again inside the winner costs nothing.
constexpr int64_t kArgmaxBlock = 1024;

// The scalar definition, also for rows with a NaN or a +infinity.
int64_t argmax_plain(const float* x, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (x[i] != x[i]) return -1;
    if (x[i] > x[best]) best = i;
  }
  return n > 0 ? best : -1;
}

} // namespace

void norm(const NormArgs& a, const ThreadCtx& ctx) {
  const Range rows = share(a.m, ctx);
  float* buffer = reinterpret_cast<float*>(ctx.scratch);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const float* residual = a.residual != nullptr ? a.residual + r * a.ld_residual : nullptr;
    float* y = a.yq != nullptr ? buffer : a.y + r * a.ldy;
    norm_row(a.x + r * a.ldx, a.width, a.w, a.eps, residual, y);
    if (a.yq != nullptr) quantize_row(y, a.width, a.yq->data + r * a.yq->stride_bytes);
  }
}

void gated(const GatedArgs& a, const ThreadCtx& ctx) {
  float* buffer = reinterpret_cast<float*>(ctx.scratch);
  // A piece is whole groups of 32, which are rounded each by itself.
  for_pieces(a.m, a.f, 32, ctx, [&](int64_t r, int64_t begin, int64_t end) {
    const float* x = a.x + r * a.ldx;
    float* y = a.yq != nullptr ? buffer : a.y + r * a.ldy;
    gated_columns(a, x, begin, end, y);
    if (a.yq != nullptr) quantize_columns(y, begin, end, a.yq->data + r * a.yq->stride_bytes);
  });
}

void select_rows(const SelectRowsArgs& a, const StepView& view, const ThreadCtx& ctx) {
  const Range rows = share(view.n_rows, ctx);
  for (int64_t r = rows.begin; r < rows.end; ++r)
    std::memcpy(a.y + r * a.ldy, a.x + view.logits_rows[r] * a.ldx, static_cast<size_t>(a.width) * sizeof(float));
}

void softcap(const SoftcapArgs& a, const ThreadCtx& ctx) {
  const F16v cap = set1(a.cap);
  for_pieces(a.m, a.width, 16, ctx, [&](int64_t r, int64_t begin, int64_t end) {
    float* x = a.x + r * a.ldx;
    for_vectors(begin, end, [&](int64_t i, int n) { store_part(x + i, mul(cap, tanh(div(load_part(x + i, n), cap))), n); });
  });
}

void add(const AddArgs& a, const ThreadCtx& ctx) {
  for_pieces(a.m, a.width, 16, ctx, [&](int64_t r, int64_t begin, int64_t end) {
    float* x = a.x + r * a.ldx;
    const float* y = a.y + r * a.ldy;
    for_vectors(begin, end, [&](int64_t i, int n) { store_part(x + i, add(load_part(x + i, n), load_part(y + i, n)), n); });
  });
}

int64_t argmax(const float* x, int64_t n) {
  const F16v infinity = set1(__builtin_inff()), one = set1(1.0f);
  F16v odd = zero(); // 1 in a lane that met a NaN or +infinity: neither is below +infinity
  int64_t winner = 0;
  float best = -__builtin_inff();
  const int64_t whole = n / 16 * 16;
  for (int64_t block = 0; block < whole; block += kArgmaxBlock) {
    const int64_t end = block + kArgmaxBlock < whole ? block + kArgmaxBlock : whole;
    F16v top = set1(-__builtin_inff());
    for (int64_t i = block; i < end; i += 16) {
      const F16v v = load(x + i);
      top = max(v, top);
      odd = max(odd, zero_below(one, v, infinity));
    }
    const float block_best = reduce_max(top);
    if (block_best > best) best = block_best, winner = block;
  }
  if (reduce_max(odd) != 0.0f) return argmax_plain(x, n);
  int64_t index = -1;
  for (int64_t i = winner; i < whole && index < 0; ++i)
    if (x[i] == best) index = i;
  const int64_t tail = argmax_plain(x + whole, n - whole);
  if (tail < 0) return whole < n ? -1 : index;
  return index < 0 || x[whole + tail] > best ? whole + tail : index;
}

} // namespace tiercel::TIERCEL_LEVEL
