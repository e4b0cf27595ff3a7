// What the row kernels share: how rows are dealt to threads, and the one RMS norm of the project. Kernel sources only.
#pragma once

#include "simd.hpp"
#include "tiercel/kernels.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

struct Range {
  int64_t begin, end;
};

// This thread's consecutive share of n things.
TIERCEL_INLINE Range share(int64_t n, const ThreadCtx& ctx) {
  return {n * ctx.thread / ctx.n_threads, n * (ctx.thread + 1) / ctx.n_threads};
}

TIERCEL_INLINE int lanes_left(int64_t i, int64_t n) { return n - i < 16 ? static_cast<int>(n - i) : 16; }

// Sum of squares: vector j of the row goes into accumulator j % 4 by fma, lanes past the end count as zero; then (0 +
// 1) + (2 + 3) and reduce_add's tree. The order depends on width alone.
TIERCEL_INLINE float sum_of_squares(const float* x, int64_t width) {
  F16v acc[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 64 <= width; i += 64) {
    for (int j = 0; j < 4; ++j) {
      const F16v v = load(x + i + 16 * j);
      acc[j] = fma(v, v, acc[j]);
    }
  }
  for (int j = 0; i < width; i += 16, ++j) {
    const F16v v = load_n(x + i, lanes_left(i, width));
    acc[j] = fma(v, v, acc[j]);
  }
  return reduce_add(add(add(acc[0], acc[1]), add(acc[2], acc[3])));
}

TIERCEL_INLINE float norm_factor(const float* x, int64_t width, float eps) {
  return 1.0f / __builtin_sqrtf(sum_of_squares(x, width) / static_cast<float>(width) + eps);
}

// y = (x * factor) * w (+ residual): normalise first, then the weight, as Hugging Face models do. y may be x or
// residual.
TIERCEL_INLINE void norm_row(const float* x, int64_t width, const float* w, float eps, const float* residual, float* y) {
  const F16v factor = set1(norm_factor(x, width, eps));
  for (int64_t i = 0; i < width; i += 16) {
    const int n = lanes_left(i, width);
    F16v v = n == 16 ? mul(mul(load(x + i), factor), load(w + i)) : mul(mul(load_n(x + i, n), factor), load_n(w + i, n));
    if (residual != nullptr) v = add(n == 16 ? load(residual + i) : load_n(residual + i, n), v);
    if (n == 16)
      store(y + i, v);
    else
      store_n(y + i, v, n);
  }
}

} // namespace
} // namespace tiercel::TIERCEL_LEVEL
