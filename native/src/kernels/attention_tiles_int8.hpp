// attention_tiles.hpp for int8 pages: keys and values stay bytes, and what meets them is rounded to 16 bits, so that both
// products are exact integers, twice as many an instruction as floats, whose order is free.
//
//   query    q' = the scaled row; unit = max|q'| / 32767; q16 = rint(q' / unit)
//   score    s = float(q16 . k8) * k_scale of the first 64 columns, s = fma(float(q16 . k8), k_scale, s) of each 64 after them; then
//            s * unit, then the softcap
//   weight   p = 2^(score - max), summed as ever; t = p * v_scale; unit = max t / 32767; p16 = rint(t * (32767 / max t))
//   output   float(p16 . v8) * unit
//
// Maximum and unit are of one row, one split and the tokens that the row sees: unseen ones have p16 = 0, so what lies there
// never matters. A row's largest p is 1 and its p16 are steps of 1/32767 of the largest weighted value.
// A token whose key or value is not finite has scales of NaN (rope.cpp): p, the sum and thereby the output become NaN.
#pragma once

#include "attention_tiles.hpp"
#include "simd_pairs.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

// Below this a unit's inverse might overflow; such a row's values count as 0.
constexpr float kLeastRounded = 0x1p-90f;
constexpr float kInt16Max = 32767.0f;

TIERCEL_INLINE const uint16_t* key_scales(const int8_t* run, int64_t head_dim) {
  return reinterpret_cast<const uint16_t*>(run + 32 * head_dim);
}
TIERCEL_INLINE const uint16_t* value_scales(const int8_t* run, int64_t head_dim) {
  return key_scales(run, head_dim) + key_blocks(head_dim) * kRunTokens;
}

// q16 [D] of one scaled query row; returns its unit: NaN, with q16 = 0, for a row that is not finite.
TIERCEL_INLINE float round_query(const float* q, int64_t head_dim, int16_t* q16) {
  F16v top = zero(), poison = zero();
  for (int64_t d = 0; d < head_dim; d += 16) {
    const F16v x = load_n(q + d, head_dim - d < 16 ? 8 : 16);
    top = max(abs(x), top);
    poison = fma(x, zero(), poison);
  }
  const float bad = reduce_add(poison), most = reduce_max(top);
  const bool is_rounded = bad == 0.0f && most >= kLeastRounded;
  const F16v unit = set1(most / kInt16Max);
  for (int64_t d = 0; d < head_dim; d += 16) {
    const int n = head_dim - d < 16 ? 8 : 16;
    int16_t rounded[16];
    store_i16(rounded, is_rounded ? min(max(div(load_n(q + d, n), unit), set1(-kInt16Max)), set1(kInt16Max)) : zero());
    std::memcpy(q16 + d, rounded, static_cast<size_t>(n) * sizeof(int16_t));
  }
  return is_rounded ? most / kInt16Max : bad;
}

// What the scores of all but the last columns are multiplied by.
constexpr float kOnes[kMaxTileRows] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};

// Columns begin .. end, which share their scales: scores[r][16 v ...] of NV runs = (scores[r][16 v ...] + products) * factor[r], or
// with kIsFirst products * factor[r]. A call of its own, so that no loop around it costs registers. Prefetches those columns' share of
// V.
template <int MR, int NV, bool kIsFirst>
__attribute__((noinline)) void score_columns_int8(const int8_t* const* runs, int64_t head_dim, int64_t begin, int64_t end, const int16_t* q,
                                                  const float* factor, float* scores) {
  const int8_t* k[NV];
  for (int v = 0; v < NV; ++v) k[v] = runs[v];
  Int16v acc[MR][NV];
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) acc[r][v] = zero_int();
  for (int64_t d0 = begin; d0 < end; d0 += 4) { // 4 d a cache line
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) __builtin_prefetch(k[v] + (head_dim + d0) * 16, 0, 2);
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2) {
      const int64_t d = d0 + i;
      Pairs b[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) b[v] = load_pairs(k[v] + d * 16);
#pragma GCC unroll 6
      for (int r = 0; r < MR; ++r) {
        const Pairs a = set_pair(q + r * head_dim + d);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[r][v] = dot2(acc[r][v], b[v], a);
      }
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
    const F16v scale = load_f16(key_scales(k[v], head_dim) + begin / kKeyBlock * kRunTokens);
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r) {
      float* score = scores + r * kScoreStride + 16 * v;
      F16v sum;
      if constexpr (kIsFirst)
        sum = mul(to_float(acc[r][v]), scale);
      else
        sum = fma(to_float(acc[r][v]), scale, load(score));
      store(score, mul(sum, set1(factor[r])));
    }
  }
}

// scores[r][16 v ...] of NV runs.
template <int MR, int NV>
TIERCEL_INLINE void score_tile_int8(const int8_t* const* runs, int64_t head_dim, const int16_t* q, const float* units, float* scores) {
  if (head_dim <= kKeyBlock) return score_columns_int8<MR, NV, true>(runs, head_dim, 0, head_dim, q, units, scores);
  score_columns_int8<MR, NV, true>(runs, head_dim, 0, kKeyBlock, q, kOnes, scores);
  for (int64_t begin = kKeyBlock; begin < head_dim; begin += kKeyBlock) {
    const int64_t end = begin + kKeyBlock < head_dim ? begin + kKeyBlock : head_dim;
    score_columns_int8<MR, NV, false>(runs, head_dim, begin, end, q, end == head_dim ? units : kOnes, scores);
  }
}

template <int MR>
TIERCEL_INLINE void score_runs_int8(const SplitRuns<int8_t>& runs, int begin, int end, int64_t head_dim, const int16_t* q,
                                    const float* units, float* scores) {
  constexpr int kNv = tile_vectors(MR);
  int i = begin;
  for (; i + kNv <= end; i += kNv) score_tile_int8<MR, kNv>(runs.at + i, head_dim, q, units, scores + 16 * i);
  if constexpr (kNv > 2)
    for (; i + 2 <= end; i += 2) score_tile_int8<MR, 2>(runs.at + i, head_dim, q, units, scores + 16 * i);
  if constexpr (kNv > 1)
    for (; i < end; ++i) score_tile_int8<MR, 1>(runs.at + i, head_dim, q, units, scores + 16 * i);
}

// One row's scores become p16, int16 by token, at the beginning of the same row; 0 for what the row does not see of the
// tile's runs tile_begin .. tile_end. scales: of the split's values, by token. Returns the unit of p16.
TIERCEL_INLINE float round_weights(const float* scales, float* scores, int begin, int end, int tile_begin, int tile_end, float softcap,
                                   float* row_max, float* row_sum) {
  const int first = begin / 16 * 16, last = (end + 15) / 16 * 16;
  *row_max = top_score(scores, begin, end, softcap);
  const F16v top = set1(*row_max);
  F16v sum = zero(), top_weight = zero();
  for (int i = first; i < last; i += 16) {
    const F16v p = exp2_nonpositive(sub(load(scores + i), top));
    F16v t = mul(p, load(scales + i));
    store(scores + i, t);
    sum = add(sum, p);
    if (i < begin || i + 16 > end) { // slots that the row does not see may hold NaN scales
      if (i < begin) store_n(scores + i, zero(), begin - i);
      if (i + 16 > end) store_n(scores + end, zero(), i + 16 - end);
      t = load(scores + i);
    }
    top_weight = max(top_weight, t);
  }
  *row_sum = reduce_add(sum);
  const float most = reduce_max(top_weight);
  const bool is_rounded = most >= kLeastRounded;
  const F16v inverse = set1(is_rounded ? kInt16Max / most : 0.0f);
  // In place: token s is read as bytes 4 s and written as bytes 2 s, so writing never gets ahead of reading.
  int16_t* p16 = reinterpret_cast<int16_t*>(scores);
  for (int i = 16 * tile_begin; i < first; i += 16) store_i16(p16 + i, zero());
  for (int i = first; i < last; i += 16) store_i16(p16 + i, mul(load(scores + i), inverse));
  for (int i = last; i < 16 * tile_end; i += 16) store_i16(p16 + i, zero());
  return is_rounded ? most / kInt16Max : 0.0f;
}

TIERCEL_INLINE Pairs load_pairs_half(const int8_t* p) {
  int8_t t[32] = {};
  std::memcpy(t, p, 16);
  return load_pairs(t);
}

// out[r][col + 16 v ...] of NV vectors. Prefetches the runs that come next.
template <int MR, int NV, bool kHalf>
TIERCEL_INLINE void value_tile_int8(const SplitRuns<int8_t>& runs, int begin, int end, int64_t head_dim, int64_t col, const float* scores,
                                    const float* units, float* out, int64_t ld_out) {
  Int16v acc[MR][NV];
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) acc[r][v] = zero_int();
  for (int i = begin; i < end; ++i) {
    const int8_t* value = runs.at[i] + 16 * head_dim + 2 * col;
    const int8_t* ahead = runs.ahead[i] + 2 * col;
    if (col == 0)
      for (int64_t b = 32 * head_dim; b < run_bytes(KvType::I8, head_dim); b += 64) __builtin_prefetch(runs.ahead[i] + b, 0, 2);
    for (int s = 0; s < 16; s += 2, value += 2 * head_dim, ahead += 2 * head_dim) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; v += 2) __builtin_prefetch(ahead + 32 * v, 0, 2);
      Pairs b[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        if constexpr (kHalf)
          b[v] = load_pairs_half(value + 32 * v);
        else
          b[v] = load_pairs(value + 32 * v);
      }
#pragma GCC unroll 6
      for (int r = 0; r < MR; ++r) {
        const Pairs a = set_pair(reinterpret_cast<const int16_t*>(scores + r * kScoreStride) + 16 * i + s);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[r][v] = dot2(acc[r][v], b[v], a);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) store(out + r * ld_out + col + 16 * v, mul(to_float(acc[r][v]), set1(units[r])));
}

template <int MR>
TIERCEL_INLINE void value_columns_int8(const SplitRuns<int8_t>& runs, int begin, int end, int64_t head_dim, const float* scores,
                                       const float* units, float* out, int64_t ld_out) {
  constexpr int kNv = tile_vectors(MR);
  int64_t col = 0;
  for (; col + 16 * kNv <= head_dim; col += 16 * kNv)
    value_tile_int8<MR, kNv, false>(runs, begin, end, head_dim, col, scores, units, out, ld_out);
  if constexpr (kNv > 2)
    for (; col + 32 <= head_dim; col += 32) value_tile_int8<MR, 2, false>(runs, begin, end, head_dim, col, scores, units, out, ld_out);
  if constexpr (kNv > 1)
    for (; col + 16 <= head_dim; col += 16) value_tile_int8<MR, 1, false>(runs, begin, end, head_dim, col, scores, units, out, ld_out);
  if (col < head_dim) value_tile_int8<MR, 1, true>(runs, begin, end, head_dim, col, scores, units, out, ld_out);
}

// What attend_tile gives, over int8 pages; q16 and its units by row.
template <int MR>
__attribute__((noinline)) void attend_tile_int8(const SplitRuns<int8_t>& runs, const RowBounds& bounds, int64_t head_dim, float softcap,
                                                const int16_t* q, const float* units, float* scores, float* row_max, float* row_sum,
                                                float* out) {
  const TileBounds tile = bounds_of<MR>(bounds);
  if (tile.begin >= tile.end) return;
  const int begin = tile.begin / 16, end = (tile.end + 15) / 16;
  score_runs_int8<MR>(runs, begin, end, head_dim, q, units, scores);
  float value_units[MR], scales[kSplitTokens];
  for (int i = begin; i < end; ++i) store(scales + 16 * i, load_f16(value_scales(runs.at[i], head_dim)));
  for (int r = 0; r < MR; ++r) {
    value_units[r] = 0.0f;
    if (bounds.begin[r] < bounds.end[r])
      value_units[r] =
          round_weights(scales, scores + r * kScoreStride, bounds.begin[r], bounds.end[r], begin, end, softcap, row_max + r, row_sum + r);
  }
  value_columns_int8<MR>(runs, begin, end, head_dim, scores, value_units, out, pad16(head_dim));
}

TIERCEL_INLINE void attend_rows_int8(int n_rows, const SplitRuns<int8_t>& runs, const RowBounds& bounds, int64_t head_dim, float softcap,
                                     const int16_t* q, const float* units, float* scores, float* row_max, float* row_sum, float* out) {
  switch (n_rows) {
    case 1: return attend_tile_int8<1>(runs, bounds, head_dim, softcap, q, units, scores, row_max, row_sum, out);
    case 2: return attend_tile_int8<2>(runs, bounds, head_dim, softcap, q, units, scores, row_max, row_sum, out);
#if defined(__AVX2__)
    case 3: return attend_tile_int8<3>(runs, bounds, head_dim, softcap, q, units, scores, row_max, row_sum, out);
    case 4: return attend_tile_int8<4>(runs, bounds, head_dim, softcap, q, units, scores, row_max, row_sum, out);
    case 5: return attend_tile_int8<5>(runs, bounds, head_dim, softcap, q, units, scores, row_max, row_sum, out);
    case 6: return attend_tile_int8<6>(runs, bounds, head_dim, softcap, q, units, scores, row_max, row_sum, out);
#endif
    default: return;
  }
}

} // namespace
} // namespace tiercel::TIERCEL_LEVEL
