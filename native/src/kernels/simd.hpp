// Sixteen float lanes, the same at every level: one zmm, two ymm, or an array. Included by kernel sources only, which are compiled
// once a level with TIERCEL_LEVEL naming the namespace.
//
// Contract: every function here gives the same bits at all levels. Fused multiply-adds are explicit; horizontal sums use one fixed
// tree (lane i with i+8, then i+4, i+2, i+1); max(a, b) is a > b ? a : b, so a NaN in b survives and a NaN in a does not.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define TIERCEL_INLINE inline __attribute__((always_inline))

namespace tiercel::TIERCEL_LEVEL {
namespace {

#if defined(__AVX512F__)

struct F16v {
  __m512 v;
};
TIERCEL_INLINE F16v zero() { return {_mm512_setzero_ps()}; }
TIERCEL_INLINE F16v set1(float x) { return {_mm512_set1_ps(x)}; }
TIERCEL_INLINE F16v load(const float* p) { return {_mm512_loadu_ps(p)}; }
TIERCEL_INLINE void store(float* p, F16v a) { _mm512_storeu_ps(p, a.v); }
// The first n (0..16) lanes; the others read as zero and are not written.
TIERCEL_INLINE F16v load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p)}; }
TIERCEL_INLINE void store_n(float* p, F16v a, int n) { _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), a.v); }
TIERCEL_INLINE F16v add(F16v a, F16v b) { return {_mm512_add_ps(a.v, b.v)}; }
TIERCEL_INLINE F16v sub(F16v a, F16v b) { return {_mm512_sub_ps(a.v, b.v)}; }
TIERCEL_INLINE F16v mul(F16v a, F16v b) { return {_mm512_mul_ps(a.v, b.v)}; }
TIERCEL_INLINE F16v div(F16v a, F16v b) { return {_mm512_div_ps(a.v, b.v)}; }
TIERCEL_INLINE F16v fma(F16v a, F16v b, F16v c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
TIERCEL_INLINE F16v max(F16v a, F16v b) { return {_mm512_max_ps(a.v, b.v)}; }
TIERCEL_INLINE F16v min(F16v a, F16v b) { return {_mm512_min_ps(a.v, b.v)}; }
TIERCEL_INLINE F16v abs(F16v a) { return {_mm512_abs_ps(a.v)}; }
TIERCEL_INLINE F16v neg(F16v a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))}; }
TIERCEL_INLINE F16v round_even(F16v a) { return {_mm512_roundscale_ps(a.v, 8)}; }
// x < limit ? 0 : a, lane by lane
TIERCEL_INLINE F16v zero_below(F16v a, F16v x, F16v limit) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), a.v)};
}
// a * 2^n for integral n with a normal result
TIERCEL_INLINE F16v scale_pow2(F16v a, F16v n) {
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(_mm512_cvtps_epi32(n.v), 23)))};
}
TIERCEL_INLINE F16v load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
TIERCEL_INLINE void store_f16(uint16_t* p, F16v a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// The low, and the high, bf16 of sixteen dwords.
TIERCEL_INLINE F16v load_bf16_low(const uint8_t* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
TIERCEL_INLINE F16v load_bf16_high(const uint8_t* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
TIERCEL_INLINE float reduce_add(F16v a) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
TIERCEL_INLINE float reduce_max(F16v a) {
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

#elif defined(__AVX2__)

struct F16v {
  __m256 a, b;
};
TIERCEL_INLINE F16v zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
TIERCEL_INLINE F16v set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TIERCEL_INLINE F16v load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TIERCEL_INLINE void store(float* p, F16v x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
TIERCEL_INLINE F16v load_n(const float* p, int n) {
  float t[16] = {};
  std::memcpy(t, p, static_cast<size_t>(n) * 4);
  return load(t);
}
TIERCEL_INLINE void store_n(float* p, F16v x, int n) {
  float t[16];
  store(t, x);
  std::memcpy(p, t, static_cast<size_t>(n) * 4);
}
TIERCEL_INLINE F16v add(F16v x, F16v y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
TIERCEL_INLINE F16v sub(F16v x, F16v y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
TIERCEL_INLINE F16v mul(F16v x, F16v y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
TIERCEL_INLINE F16v div(F16v x, F16v y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
TIERCEL_INLINE F16v fma(F16v x, F16v y, F16v z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
TIERCEL_INLINE F16v max(F16v x, F16v y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
TIERCEL_INLINE F16v min(F16v x, F16v y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
TIERCEL_INLINE F16v abs(F16v x) {
  const __m256 s = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(s, x.a), _mm256_andnot_ps(s, x.b)};
}
TIERCEL_INLINE F16v neg(F16v x) {
  const __m256 s = _mm256_set1_ps(-0.0f);
  return {_mm256_xor_ps(x.a, s), _mm256_xor_ps(x.b, s)};
}
TIERCEL_INLINE F16v round_even(F16v x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
TIERCEL_INLINE F16v zero_below(F16v v, F16v x, F16v limit) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_NLT_UQ), v.a), _mm256_and_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_NLT_UQ), v.b)};
}
TIERCEL_INLINE __m256 scale_pow2_half(__m256 v, __m256 n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}
TIERCEL_INLINE F16v scale_pow2(F16v v, F16v n) { return {scale_pow2_half(v.a, n.a), scale_pow2_half(v.b, n.b)}; }
TIERCEL_INLINE F16v load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
TIERCEL_INLINE void store_f16(uint16_t* p, F16v x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, 0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, 0));
}
TIERCEL_INLINE F16v load_bf16_low(const uint8_t* p) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}
TIERCEL_INLINE F16v load_bf16_high(const uint8_t* p) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
  return {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))};
}
TIERCEL_INLINE float reduce_add(F16v x) {
  const __m256 h = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
TIERCEL_INLINE float reduce_max(F16v x) {
  const __m256 h = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

#else

struct F16v {
  float v[16];
};
template <class Fn>
TIERCEL_INLINE F16v lanes(Fn fn) {
  F16v r;
  for (int i = 0; i < 16; ++i) r.v[i] = fn(i);
  return r;
}
TIERCEL_INLINE F16v set1(float x) {
  return lanes([&](int) { return x; });
}
TIERCEL_INLINE F16v zero() { return set1(0.0f); }
TIERCEL_INLINE F16v load_n(const float* p, int n) {
  F16v r = zero();
  std::memcpy(r.v, p, static_cast<size_t>(n) * 4);
  return r;
}
TIERCEL_INLINE void store_n(float* p, F16v a, int n) { std::memcpy(p, a.v, static_cast<size_t>(n) * 4); }
TIERCEL_INLINE F16v load(const float* p) { return load_n(p, 16); }
TIERCEL_INLINE void store(float* p, F16v a) { store_n(p, a, 16); }
TIERCEL_INLINE F16v add(F16v a, F16v b) {
  return lanes([&](int i) { return a.v[i] + b.v[i]; });
}
TIERCEL_INLINE F16v sub(F16v a, F16v b) {
  return lanes([&](int i) { return a.v[i] - b.v[i]; });
}
TIERCEL_INLINE F16v mul(F16v a, F16v b) {
  return lanes([&](int i) { return a.v[i] * b.v[i]; });
}
TIERCEL_INLINE F16v div(F16v a, F16v b) {
  return lanes([&](int i) { return a.v[i] / b.v[i]; });
}
TIERCEL_INLINE F16v fma(F16v a, F16v b, F16v c) {
  return lanes([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
TIERCEL_INLINE F16v max(F16v a, F16v b) {
  return lanes([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
TIERCEL_INLINE F16v min(F16v a, F16v b) {
  return lanes([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
TIERCEL_INLINE uint32_t bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
TIERCEL_INLINE float from_bits(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
TIERCEL_INLINE F16v abs(F16v a) {
  return lanes([&](int i) { return from_bits(bits(a.v[i]) & 0x7fffffffu); });
}
TIERCEL_INLINE F16v neg(F16v a) {
  return lanes([&](int i) { return from_bits(bits(a.v[i]) ^ 0x80000000u); });
}
TIERCEL_INLINE F16v round_even(F16v a) {
  return lanes([&](int i) { return __builtin_rintf(a.v[i]); });
}
TIERCEL_INLINE F16v zero_below(F16v a, F16v x, F16v limit) {
  return lanes([&](int i) { return x.v[i] < limit.v[i] ? 0.0f : a.v[i]; });
}
TIERCEL_INLINE F16v scale_pow2(F16v a, F16v n) {
  return lanes([&](int i) {
    const bool fits = n.v[i] > -2147483648.0f && n.v[i] < 2147483648.0f; // as cvtps2dq: else 0x80000000, which shifts to 0
    const uint32_t e = fits ? static_cast<uint32_t>(static_cast<int32_t>(__builtin_rintf(n.v[i]))) : 0x80000000u;
    return from_bits(bits(a.v[i]) + (e << 23));
  });
}
// IEEE half to float, exact, subnormals, infinities and NaNs included.
TIERCEL_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exp = (h >> 10) & 31u, man = h & 1023u;
  if (exp == 31) return from_bits(sign | 0x7f800000u | (man ? (man << 13) | 0x400000u : 0u));
  if (exp == 0) {
    const float m = static_cast<float>(man) * 5.9604644775390625e-08f; // 2^-24
    return from_bits(bits(m) | sign);
  }
  return from_bits(sign | ((exp + 112u) << 23) | (man << 13));
}
// Float to half, round to nearest even, as F16C does.
TIERCEL_INLINE uint16_t float_to_half(float f) {
  const uint32_t x = bits(f);
  const uint16_t sign = static_cast<uint16_t>((x >> 16) & 0x8000u);
  const uint32_t a = x & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
  if (a >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (a < 0x38800000u) { // subnormal half: let the float adder round at 2^-24
    const float r = from_bits(a) + 0.5f;
    return static_cast<uint16_t>(sign | (bits(r) - 0x3f000000u));
  }
  const uint32_t odd = (a >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((a - 0x38000000u + 0xfffu + odd) >> 13));
}
TIERCEL_INLINE F16v load_f16(const uint16_t* p) {
  return lanes([&](int i) { return half_to_float(p[i]); });
}
TIERCEL_INLINE void store_f16(uint16_t* p, F16v a) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(a.v[i]);
}
TIERCEL_INLINE uint32_t dword(const uint8_t* p, int i) {
  uint32_t u;
  std::memcpy(&u, p + 4 * i, 4);
  return u;
}
TIERCEL_INLINE F16v load_bf16_low(const uint8_t* p) {
  return lanes([&](int i) { return from_bits(dword(p, i) << 16); });
}
TIERCEL_INLINE F16v load_bf16_high(const uint8_t* p) {
  return lanes([&](int i) { return from_bits(dword(p, i) & 0xffff0000u); });
}
TIERCEL_INLINE float reduce_add(F16v a) {
  for (int h = 8; h >= 1; h /= 2)
    for (int i = 0; i < h; ++i) a.v[i] = a.v[i] + a.v[i + h];
  return a.v[0];
}
TIERCEL_INLINE float reduce_max(F16v a) {
  for (int h = 8; h >= 1; h /= 2)
    for (int i = 0; i < h; ++i) a.v[i] = a.v[i] > a.v[i + h] ? a.v[i] : a.v[i + h];
  return a.v[0];
}

#endif

// e^x. Exactly 0 below -87 (no denormal ever appears, whatever MXCSR says); infinity above 88.7; NaN stays NaN.
// Cody-Waite reduction and a degree-6 polynomial; relative error below 2e-7. Same bits at all levels.
TIERCEL_INLINE F16v exp(F16v x) {
  const F16v lo = set1(-87.0f), hi = set1(88.72f);
  const F16v y = min(hi, max(lo, x)); // operand order keeps NaN
  const F16v n = round_even(mul(y, set1(1.44269504088896341f)));
  F16v r = fma(n, set1(-0.693359375f), y);
  r = fma(n, set1(2.12194440e-4f), r);
  F16v p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.0f)));
  // n = 128 happens only with p < 1, so the result is always a normal float and the scaling exact.
  return zero_below(scale_pow2(p, n), x, lo);
}

// 1 / (1 + e^-x)
TIERCEL_INLINE F16v sigmoid(F16v x) { return div(set1(1.0f), add(set1(1.0f), exp(neg(x)))); }

// tanh by 1 - 2 / (e^2x + 1): absolute error below 2e-7, exact limits at both ends.
TIERCEL_INLINE F16v tanh(F16v x) {
  const F16v e = exp(add(x, x));
  return sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
}

} // namespace
} // namespace tiercel::TIERCEL_LEVEL
