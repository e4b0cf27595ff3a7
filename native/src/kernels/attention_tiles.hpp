// The inner loops of attention: a tile is up to kTileRows query rows against the keys or values of one split,
// everything summed in registers. Few rows read the pages themselves (T = uint16_t or float); many read a copy of the
// split expanded to float.
//
// Prefetching (F16 pages): while scores are computed, this split's V; while values are summed, the K of the next one,
// so that memory is never idle. To L2 only: prefetches to L1 share the line fill buffers with loads and were 1.7 times
// slower out of cache (Zen 4).
//
// Every result is one fma chain (over d for scores, over tokens for outputs), so tile shapes and T never show in the
// bits.
#pragma once

#include "attention_layout.hpp"
#include "simd.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

// Accumulators a tile may use: 24 of 32 zmm; 12 of 16 ymm (6 or 8 vectors of two); the plain version needs no more than
// one.
#if defined(__AVX512F__)
constexpr int kTileRows = 6;
constexpr int tile_vectors(int) { return 4; }
#elif defined(__AVX2__)
constexpr int kTileRows = 6;
constexpr int tile_vectors(int n_rows) { return n_rows == 1 ? 4 : n_rows <= 3 ? 2 : 1; }
#else
constexpr int kTileRows = 2;
constexpr int tile_vectors(int) { return 1; }
#endif
static_assert(kTileRows <= kMaxTileRows);

// The runs of one split. at[i] is run i's K^T; runs outside [begin, end) are not read. ahead: runs that the thread will
// read next, one for each of this split; they are only prefetched.
template <class T>
struct SplitRuns {
  const T* at[kRunsPerSplit];
  const T* ahead[kRunsPerSplit];
  int begin, end;
};

// Which tokens of the split each row of a tile sees: begin[r] <= s < end[r], empty where begin[r] >= end[r].
struct RowBounds {
  int begin[kMaxTileRows], end[kMaxTileRows];
};

// Float runs are mostly the expanded copy, which is in cache.
template <class T>
constexpr bool kPrefetches = sizeof(T) == 2;

TIERCEL_INLINE F16v load_kv(const float* p) { return load(p); }
TIERCEL_INLINE F16v load_kv(const uint16_t* p) { return load_f16(p); }
// The last 8 columns of a head whose width is no multiple of 16: what lies behind them may not be ours to read.
template <class T>
TIERCEL_INLINE F16v load_kv_half(const T* p) {
  T t[16] = {};
  std::memcpy(t, p, 8 * sizeof(T));
  return load_kv(t);
}

// Scores are in units of ln 2, so that a weight is a power of two and needs no reduction by constants.
constexpr float kLog2E = 0x1.715476p+0f;

// 2^x for x <= 0, and 2^-100 below -100; NaN stays NaN. Relative error below 2e-7. Why -100: times the least half, 2^-24, it is
// still a normal float, so no product with an F16 value or an int8 scale is denormal, whatever MXCSR says; and against the
// largest weight, which is 1, it changes nothing.
constexpr float kLeastExponent = -100.0f;
TIERCEL_INLINE F16v exp2_nonpositive(F16v x) {
  const F16v y = max(set1(kLeastExponent), x); // operand order keeps NaN
  const F16v n = round_even(y);
  const F16v r = sub(y, n);
  F16v p = set1(1.3264727e-3f);
  p = fma(p, r, set1(9.671513e-3f));
  p = fma(p, r, set1(5.5507336e-2f));
  p = fma(p, r, set1(2.4022242e-1f));
  p = fma(p, r, set1(6.93147e-1f));
  p = fma(p, r, set1(1.0f));
  return scale_pow2(p, n);
}

// scores[r][16 v ...] = q[r] . K of NV runs. Prefetches those runs' V.
template <class T, int MR, int NV>
TIERCEL_INLINE void score_tile(const T* const* runs, int64_t head_dim, const float* q, float* scores) {
  constexpr int64_t kStep = 4 / static_cast<int64_t>(sizeof(T)); // d a cache line
  const T* k[NV];
  for (int v = 0; v < NV; ++v) k[v] = runs[v];
  F16v acc[MR][NV];
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) acc[r][v] = zero();
  for (int64_t d0 = 0; d0 < head_dim; d0 += kStep) {
    if constexpr (kPrefetches<T>) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        __builtin_prefetch(k[v] + (head_dim + d0) * 16, 0, 2);
      }
    }
#pragma GCC unroll 2
    for (int64_t d = d0; d < d0 + kStep; ++d) {
      F16v b[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) b[v] = load_kv(k[v] + d * 16);
#pragma GCC unroll 6
      for (int r = 0; r < MR; ++r) {
        const F16v a = set1(q[r * head_dim + d]);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[r][v] = fma(a, b[v], acc[r][v]);
      }
    }
  }
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) store(scores + r * kScoreStride + 16 * v, acc[r][v]);
}

template <class T, int MR>
TIERCEL_INLINE void score_runs(const SplitRuns<T>& runs, int begin, int end, int64_t head_dim, const float* q, float* scores) {
  constexpr int kNv = tile_vectors(MR);
  int i = begin;
  for (; i + kNv <= end; i += kNv) score_tile<T, MR, kNv>(runs.at + i, head_dim, q, scores + 16 * i);
  if constexpr (kNv > 2)
    for (; i + 2 <= end; i += 2) score_tile<T, MR, 2>(runs.at + i, head_dim, q, scores + 16 * i);
  if constexpr (kNv > 1)
    for (; i < end; ++i) score_tile<T, MR, 1>(runs.at + i, head_dim, q, scores + 16 * i);
}

// A row's scores as weights are taken from them: capped, and -inf in the lanes of edge runs that the row does not see. Returns
// the largest. Order: run by run ascending in 16 lanes, then the fixed tree.
TIERCEL_INLINE float top_score(float* scores, int begin, int end, float softcap) {
  const int first = begin / 16 * 16, last = (end + 15) / 16 * 16;
  if (softcap > 0.0f) {
    const F16v cap = set1(softcap), cap2 = set1(softcap * kLog2E);
    for (int i = first; i < last; i += 16) store(scores + i, mul(cap2, tanh(div(load(scores + i), cap))));
  }
  const F16v lowest = set1(-__builtin_inff());
  if (begin > first) store_n(scores + first, lowest, begin - first);
  if (last > end) store_n(scores + end, lowest, last - end);
  F16v top = lowest;
  for (int i = first; i < last; i += 16) top = max(top, load(scores + i));
  return reduce_max(top);
}

// One row's scores become weights 2^(score - max) in place. Order as top_score's; lanes that the row does not see add 2^-100
// each to the sum, the same for a row however it is computed.
TIERCEL_INLINE void softmax_row(float* scores, int begin, int end, float softcap, float* row_max, float* row_sum) {
  const int first = begin / 16 * 16, last = (end + 15) / 16 * 16;
  *row_max = top_score(scores, begin, end, softcap);
  const F16v top = set1(*row_max);
  F16v sum = zero();
  for (int i = first; i < last; i += 16) {
    const F16v p = exp2_nonpositive(sub(load(scores + i), top));
    store(scores + i, p);
    sum = add(sum, p);
  }
  *row_sum = reduce_add(sum);
}

// out[r][16 v ...] = sum over the tokens that row r sees, ascending, of p[r][s] * V[s][col + 16 v ...]. Unseen tokens
// are not multiplied by zero but left out: their V may hold anything, and -0 + 0 would change a bit.
template <class T, int MR, int NV, bool kHalf>
TIERCEL_INLINE void value_tile(const SplitRuns<T>& runs, const RowBounds& bounds, int64_t head_dim, int64_t col, const float* p, float* out,
                               int64_t ld_out) {
  int any_begin = static_cast<int>(kSplitTokens), all_begin = 0, all_end = any_begin, any_end = 0;
  for (int r = 0; r < MR; ++r) {
    all_begin = bounds.begin[r] > all_begin ? bounds.begin[r] : all_begin;
    all_end = bounds.end[r] < all_end ? bounds.end[r] : all_end;
    if (bounds.begin[r] >= bounds.end[r]) continue;
    any_begin = bounds.begin[r] < any_begin ? bounds.begin[r] : any_begin;
    any_end = bounds.end[r] > any_end ? bounds.end[r] : any_end;
  }
  F16v acc[MR][NV];
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) acc[r][v] = zero();
  const auto load_value = [](const T* v) __attribute__((always_inline)) {
    if constexpr (kHalf)
      return load_kv_half(v);
    else
      return load_kv(v);
  };
  const auto value_at = [&](int s) __attribute__((always_inline)) { return runs.at[s / 16] + (16 + s % 16) * head_dim + col; };
  const auto some_rows = [&](int s_begin, int s_end) __attribute__((always_inline)) {
    for (int s = s_begin; s < s_end; ++s) {
      const T* value = value_at(s);
      F16v b[NV];
      for (int v = 0; v < NV; ++v) b[v] = load_value(value + 16 * v);
#pragma GCC unroll 6
      for (int r = 0; r < MR; ++r) {
        if (s < bounds.begin[r] || s >= bounds.end[r]) continue;
        const F16v a = set1(p[r * kScoreStride + s]);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[r][v] = fma(a, b[v], acc[r][v]);
      }
    }
  };
  if (all_begin >= all_end) all_begin = all_end = any_end;
  some_rows(any_begin, all_begin);
  for (int s = all_begin; s < all_end;) {
    const int stop = (s | 15) + 1 < all_end ? (s | 15) + 1 : all_end;
    const T* ahead = runs.ahead[s / 16] + s % 16 * head_dim + col;
    for (const T* value = value_at(s); s < stop; ++s, value += head_dim, ahead += head_dim) {
      F16v b[NV];
      if constexpr (kPrefetches<T>) {
#pragma GCC unroll 2
        for (int i = 0; i < NV; i += 2) __builtin_prefetch(ahead + 16 * i, 0, 2);
      }
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) b[v] = load_value(value + 16 * v);
#pragma GCC unroll 6
      for (int r = 0; r < MR; ++r) {
        const F16v a = set1(p[r * kScoreStride + s]);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[r][v] = fma(a, b[v], acc[r][v]);
      }
    }
  }
  some_rows(all_end, any_end);
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) store(out + r * ld_out + col + 16 * v, acc[r][v]);
}

template <class T, int MR>
TIERCEL_INLINE void value_columns(const SplitRuns<T>& runs, const RowBounds& bounds, int64_t head_dim, int64_t n_columns, const float* p,
                                  float* out, int64_t ld_out) {
  constexpr int kNv = tile_vectors(MR);
  int64_t col = 0;
  for (; col + 16 * kNv <= n_columns; col += 16 * kNv) value_tile<T, MR, kNv, false>(runs, bounds, head_dim, col, p, out, ld_out);
  if constexpr (kNv > 2)
    for (; col + 32 <= n_columns; col += 32) value_tile<T, MR, 2, false>(runs, bounds, head_dim, col, p, out, ld_out);
  if constexpr (kNv > 1)
    for (; col + 16 <= n_columns; col += 16) value_tile<T, MR, 1, false>(runs, bounds, head_dim, col, p, out, ld_out);
  if (col < n_columns) value_tile<T, MR, 1, true>(runs, bounds, head_dim, col, p, out, ld_out);
}

// Tokens of the split that any row of a tile sees; empty where begin >= end.
struct TileBounds {
  int begin, end;
};

template <int MR>
TIERCEL_INLINE TileBounds bounds_of(const RowBounds& rows) {
  TileBounds tile{static_cast<int>(kSplitTokens), 0};
  for (int r = 0; r < MR; ++r) {
    if (rows.begin[r] >= rows.end[r]) continue;
    tile.begin = rows.begin[r] < tile.begin ? rows.begin[r] : tile.begin;
    tile.end = rows.end[r] > tile.end ? rows.end[r] : tile.end;
  }
  return tile;
}

// What MR rows get from one split: max[r], sum[r], out[r][pad16(D)], of which n_values columns are made. Rows that see none of it are left
// with arbitrary values.
template <class T, int MR>
__attribute__((noinline)) void attend_tile(const SplitRuns<T>& runs, const RowBounds& bounds, int64_t head_dim, int64_t n_values,
                                           float softcap, const float* q, float* scores, float* row_max, float* row_sum, float* out) {
  const TileBounds tile = bounds_of<MR>(bounds);
  if (tile.begin >= tile.end) return;
  score_runs<T, MR>(runs, tile.begin / 16, (tile.end + 15) / 16, head_dim, q, scores);
  for (int r = 0; r < MR; ++r)
    if (bounds.begin[r] < bounds.end[r])
      softmax_row(scores + r * kScoreStride, bounds.begin[r], bounds.end[r], softcap, row_max + r, row_sum + r);
  value_columns<T, MR>(runs, bounds, head_dim, n_values, scores, out, pad16(head_dim));
}

template <class T>
TIERCEL_INLINE void attend_rows(int n_rows, const SplitRuns<T>& runs, const RowBounds& bounds, int64_t head_dim, int64_t n_values,
                                float softcap, const float* q, float* scores, float* row_max, float* row_sum, float* out) {
  switch (n_rows) {
    case 1: return attend_tile<T, 1>(runs, bounds, head_dim, n_values, softcap, q, scores, row_max, row_sum, out);
    case 2: return attend_tile<T, 2>(runs, bounds, head_dim, n_values, softcap, q, scores, row_max, row_sum, out);
#if defined(__AVX2__)
    case 3: return attend_tile<T, 3>(runs, bounds, head_dim, n_values, softcap, q, scores, row_max, row_sum, out);
    case 4: return attend_tile<T, 4>(runs, bounds, head_dim, n_values, softcap, q, scores, row_max, row_sum, out);
    case 5: return attend_tile<T, 5>(runs, bounds, head_dim, n_values, softcap, q, scores, row_max, row_sum, out);
    case 6: return attend_tile<T, 6>(runs, bounds, head_dim, n_values, softcap, q, scores, row_max, row_sum, out);
#endif
    default: return;
  }
}

} // namespace
} // namespace tiercel::TIERCEL_LEVEL
