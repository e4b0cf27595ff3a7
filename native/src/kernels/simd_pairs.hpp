// Exact products of 16-bit numbers by stored bytes, for attention over int8 keys and values; the companion of simd_int.hpp.
//
// Pairs is 16 lanes of two signed numbers. dot2 adds both products of a lane to its 32-bit sum. Sums are exact integers, so
// their order is free and the levels agree. What fits: 32767 * 128 * 512 < 2^31, so up to 512 products a lane.
#pragma once

#include "simd_int.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

#if defined(__AVX512VNNI__)

struct Pairs {
  __m512i v;
};
TIERCEL_INLINE Int16v zero_int() { return {_mm512_setzero_si512()}; }
// 32 bytes, widened.
TIERCEL_INLINE Pairs load_pairs(const int8_t* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
// One pair in every lane.
TIERCEL_INLINE Pairs set_pair(const int16_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return {_mm512_set1_epi32(x)};
}
// By hand: gcc 12 copies and spills the sums around the intrinsic, which made the loops twice as slow.
TIERCEL_INLINE Int16v dot2(Int16v sum, Pairs a, Pairs b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));
  return sum;
}
// Rounded half to even; |x| <= 32767, anything for lanes that are not finite.
TIERCEL_INLINE void store_i16(int16_t* p, F16v x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x.v)));
}

#elif defined(__AVX2__)

struct Pairs {
  __m256i a, b;
};
TIERCEL_INLINE Int16v zero_int() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
TIERCEL_INLINE Pairs load_pairs(const int8_t* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
TIERCEL_INLINE Pairs set_pair(const int16_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
TIERCEL_INLINE Int16v dot2(Int16v sum, Pairs x, Pairs y) {
  return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(sum.b, _mm256_madd_epi16(x.b, y.b))};
}
TIERCEL_INLINE void store_i16(int16_t* p, F16v x) {
  const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)); // by halves: a0 b0 a1 b1
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

#else

struct Pairs {
  int16_t v[32];
};
TIERCEL_INLINE Int16v zero_int() {
  return int_lanes([](int) { return 0; });
}
TIERCEL_INLINE Pairs load_pairs(const int8_t* p) {
  Pairs r;
  for (int i = 0; i < 32; ++i) r.v[i] = p[i];
  return r;
}
TIERCEL_INLINE Pairs set_pair(const int16_t* p) {
  Pairs r;
  for (int i = 0; i < 32; ++i) r.v[i] = p[i % 2];
  return r;
}
TIERCEL_INLINE Int16v dot2(Int16v sum, Pairs a, Pairs b) {
  return int_lanes([&](int i) { return sum.v[i] + a.v[2 * i] * b.v[2 * i] + a.v[2 * i + 1] * b.v[2 * i + 1]; });
}
TIERCEL_INLINE void store_i16(int16_t* p, F16v x) {
  for (int i = 0; i < 16; ++i) {
    const bool fits = x.v[i] > -32769.0f && x.v[i] < 32768.0f;
    p[i] = static_cast<int16_t>(fits ? __builtin_rintf(x.v[i]) : -32768.0f);
  }
}

#endif

} // namespace
} // namespace tiercel::TIERCEL_LEVEL
