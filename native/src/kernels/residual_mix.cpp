// A row made of several: the softmax of what a vector says of each, normed, weighs them.
//
// Order that is contract (same bits at every level and for every split over threads): a source's score is its product with w, summed as
// rows.hpp sums squares, times its norm's factor; the largest is the first of equals; weights are exp(score - largest), divided by their
// sum, which is taken by ascending number; y is 0, then each source times its weight by fma, by ascending number.
#include "rows.hpp"
#include "table.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

TIERCEL_INLINE F16v load_some(const float* p, int n) { return n == 16 ? load(p) : load_n(p, n); }

// As sum_of_squares, of products.
TIERCEL_INLINE float sum_of_products(const float* x, const float* w, int64_t width) {
  F16v acc[4] = {zero(), zero(), zero(), zero()};
  for (int64_t i = 0, j = 0; i < width; i += 16, ++j) {
    const int n = lanes_left(i, width);
    acc[j % 4] = fma(load_some(x + i, n), load_some(w + i, n), acc[j % 4]);
  }
  return reduce_add(add(add(acc[0], acc[1]), add(acc[2], acc[3])));
}

} // namespace

void residual_mix(const ResidualMixArgs& a, const ThreadCtx& ctx) {
  const Range rows = share(a.m, ctx);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    float weights[kMaxResiduals] = {};
    float largest = 0.0f, total = 0.0f;
    for (int32_t j = 0; j < a.n; ++j) {
      const float* x = a.sources[j] + r * a.strides[j];
      weights[j] = sum_of_products(x, a.w, a.width) * norm_factor(x, a.width, a.eps);
      if (j == 0 || weights[j] > largest) largest = weights[j];
    }
    for (int32_t j = 0; j < a.n; j += 16) store(weights + j, exp(sub(load(weights + j), set1(largest))));
    for (int32_t j = 0; j < a.n; ++j) total += weights[j];
    for (int32_t j = 0; j < a.n; ++j) weights[j] /= total;
    float* y = a.y + r * a.ldy;
    for (int64_t i = 0; i < a.width; i += 16) {
      const int n = lanes_left(i, a.width);
      F16v sum = zero();
      for (int32_t j = 0; j < a.n; ++j) sum = fma(set1(weights[j]), load_some(a.sources[j] + r * a.strides[j] + i, n), sum);
      if (n == 16)
        store(y + i, sum);
      else
        store_n(y + i, sum, n);
    }
  }
}

} // namespace tiercel::TIERCEL_LEVEL
