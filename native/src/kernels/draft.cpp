// What drafters do beside what models do: rows of a block mixed with those before them, rows times a number; and what picks drafts:
// products of rows with one vector, and sums of exponentials.
//
// Orders that are contract:
//   block_conv    y = (base[0] + delta[0]) * x[i], then for each further tap, ascending, y = fma(base[t] + delta[t], x[i - t], y). With
//                 base 1, 0, .. and delta 0, y is x to the bit.
//   row_products  vector j of a row goes into accumulator j % 4 by fma, lanes past the end count as zero; then (0 + 1) + (2 + 3) and
//                 reduce_add's tree.
//   exp_sum       the same, of exponentials.
#include "rows.hpp"
#include "table.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

TIERCEL_INLINE F16v load_some(const float* p, int n) { return n == 16 ? load(p) : load_n(p, n); }

TIERCEL_INLINE void store_some(float* p, F16v v, int n) {
  if (n == 16)
    store(p, v);
  else
    store_n(p, v, n);
}

// delta of columns c .. c + 16 of one tap.
TIERCEL_INLINE F16v coefficients(const float* delta, int64_t c, int32_t group) {
  if (group % 16 == 0) return set1(delta[c / group]);
  float each[16];
  for (int64_t j = 0; j < 16; ++j) each[j] = delta[(c + j) / group];
  return load(each);
}

} // namespace

void block_conv(const BlockConvArgs& a, const StepView& view, const ThreadCtx& ctx) {
  const Range rows = share(view.n_tokens, ctx);
  const int64_t n_groups = a.width / a.group;
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    const int64_t in_block = i - view.seq_rows[view.row_seq[i]];
    const int64_t n_taps = a.taps < in_block + 1 ? a.taps : in_block + 1;
    const float* x = a.x + i * a.ldx;
    const float* delta = a.delta + i * a.ld_delta;
    float* y = a.y + i * a.ldy;
    for (int64_t c = 0; c < a.width; c += 16) {
      const int n = lanes_left(c, a.width);
      F16v sum = zero();
      for (int64_t t = 0; t < n_taps; ++t) {
        F16v own = zero();
        if (n == 16) {
          own = coefficients(delta + t * n_groups, c, a.group);
        } else {
          float each[16] = {};
          for (int64_t j = 0; j < n; ++j) each[j] = delta[t * n_groups + (c + j) / a.group];
          own = load(each);
        }
        const F16v w = add(load_some(a.base + t * a.width + c, n), own), before = load_some(x - t * a.ldx + c, n);
        sum = t == 0 ? mul(w, before) : fma(w, before, sum);
      }
      store_some(y + c, sum, n);
    }
  }
}

void scale(const ScaleArgs& a, const ThreadCtx& ctx) {
  const Range rows = share(a.m, ctx);
  const F16v factor = set1(a.factor);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    float* x = a.x + r * a.ldx;
    for (int64_t i = 0; i < a.width; i += 16) {
      const int n = lanes_left(i, a.width);
      store_some(x + i, mul(load_some(x + i, n), factor), n);
    }
  }
}

void row_products(const float* rows, int64_t n, int64_t k, const float* x, float* y) {
  for (int64_t i = 0; i < n; ++i, rows += k) {
    F16v acc[4] = {zero(), zero(), zero(), zero()};
    int64_t c = 0;
    for (; c + 64 <= k; c += 64)
      for (int j = 0; j < 4; ++j) acc[j] = fma(load(rows + c + 16 * j), load(x + c + 16 * j), acc[j]);
    for (int j = 0; c < k; c += 16, ++j) {
      const int left = lanes_left(c, k);
      acc[j] = fma(load_some(rows + c, left), load_some(x + c, left), acc[j]);
    }
    y[i] = reduce_add(add(add(acc[0], acc[1]), add(acc[2], acc[3])));
  }
}

float exp_sum(const float* x, int64_t n, float largest) {
  F16v acc[4] = {zero(), zero(), zero(), zero()};
  const F16v top = set1(largest);
  int64_t i = 0, j = 0;
  for (; i + 16 <= n; i += 16, ++j) acc[j % 4] = add(exp(sub(load(x + i), top)), acc[j % 4]);
  if (i < n) {
    float rest[16];
    store(rest, exp(sub(load_n(x + i, static_cast<int>(n - i)), top)));
    acc[j % 4] = add(load_n(rest, static_cast<int>(n - i)), acc[j % 4]);
  }
  return reduce_add(add(add(acc[0], acc[1]), add(acc[2], acc[3])));
}

} // namespace tiercel::TIERCEL_LEVEL
