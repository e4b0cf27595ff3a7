// Integer lanes for the dot products of rounded activations with packed weights; the companion of simd.hpp, with the same rule: the
// same bits at every level. Here that is easy, because every sum is an exact integer.
//
// Bytes is one 64-byte vector of a packed body: 16 lanes (output rows) of 4 unsigned weights. Quad is 4 signed activations, the same for
// all lanes. Dot<Max> sums lane by lane the products of up to 8 Bytes x Quad steps, with weights in 0..Max.
//
// AVX2 has no VNNI. vpmaddubsw multiplies u8 by i8 and adds pairs with signed saturation at 16 bits, so what fits decides how many
// products may be summed before widening: 15 * 127 * 2 * 8 = 30480, 31 * 127 * 2 * 4 = 31496, 63 * 127 * 2 * 2 = 32004, all below
// 32768. For whole bytes (255 * 127 * 2 does not fit) the sign moves to the activation: |w - 128| * (+-a), at most 128 * 127 * 2 = 32512.
#pragma once

// gcc 12 warns of its own avx512fintrin.h (bug 105593) wherever these intrinsics are inlined, so this holds to the end of the file.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include "simd.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

#if defined(__AVX512VNNI__)

struct Int16v {
  __m512i v;
};
TIERCEL_INLINE Int16v load_int(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
TIERCEL_INLINE void store_int(int32_t* p, Int16v a) { _mm512_storeu_si512(p, a.v); }
TIERCEL_INLINE Int16v load_i8(const int8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
TIERCEL_INLINE Int16v load_u8(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
TIERCEL_INLINE Int16v add(Int16v a, Int16v b) { return {_mm512_add_epi32(a.v, b.v)}; }
TIERCEL_INLINE Int16v mul(Int16v a, Int16v b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
TIERCEL_INLINE F16v to_float(Int16v a) { return {_mm512_cvtepi32_ps(a.v)}; }

// 2^(e - 128) of each lane's e, 0..255: the bits are (e - 1) << 23, or a subnormal number's for 0 and 1.
TIERCEL_INLINE F16v half_e8m0(Int16v e) {
  const __m512i one = _mm512_set1_epi32(1);
  const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e.v, one), 23), tiny = _mm512_slli_epi32(_mm512_add_epi32(e.v, one), 21);
  return {_mm512_castsi512_ps(_mm512_max_epi32(normal, tiny))};
}

struct Bytes {
  __m512i v;
};
struct Quad {
  __m512i v;
};
TIERCEL_INLINE Bytes load_bytes(const uint8_t* p) { return {_mm512_load_si512(p)}; }
TIERCEL_INLINE void store_bytes(uint8_t* p, Bytes a) { _mm512_store_si512(p, a.v); }
TIERCEL_INLINE Quad load_quad(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return {_mm512_set1_epi32(x)};
}
TIERCEL_INLINE Bytes low_nibbles(Bytes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
TIERCEL_INLINE Bytes high_nibbles(Bytes a) { return {_mm512_and_si512(_mm512_srli_epi32(a.v, 4), _mm512_set1_epi8(15))}; }
// table[a] of each byte a, 0..15.
TIERCEL_INLINE Bytes look_up(const uint8_t (&table)[16], Bytes a) {
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), a.v)};
}
// a | (b shifted left by Shift bits, or right if negative) & Mask, byte by byte; Mask must drop the bits that crossed bytes.
template <int Shift, int Mask>
TIERCEL_INLINE Bytes or_shifted(Bytes a, Bytes b) {
  const __m512i s = Shift >= 0 ? _mm512_slli_epi32(b.v, Shift >= 0 ? Shift : 0) : _mm512_srli_epi32(b.v, Shift < 0 ? -Shift : 0);
  return {_mm512_ternarylogic_epi32(a.v, s, _mm512_set1_epi8(Mask), 0xf8)}; // a | (s & mask)
}

template <int Max>
struct Dot {
  __m512i sum;
  // start: minus the zero point times the sum of the activations of all steps.
  TIERCEL_INLINE void begin(int32_t start) { sum = _mm512_set1_epi32(start); }
  template <int Step>
  TIERCEL_INLINE void step(Bytes w, Quad a) {
    sum = _mm512_dpbusd_epi32(sum, w.v, a.v);
  }
  TIERCEL_INLINE Int16v end() const { return {sum}; }
};

#elif defined(__AVX2__)

struct Int16v {
  __m256i a, b;
};
TIERCEL_INLINE __m256i load_half(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
TIERCEL_INLINE Int16v load_int(const int32_t* p) { return {load_half(p), load_half(p + 8)}; }
TIERCEL_INLINE void store_int(int32_t* p, Int16v x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
TIERCEL_INLINE Int16v load_i8(const int8_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))};
}
TIERCEL_INLINE Int16v load_u8(const uint8_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
TIERCEL_INLINE Int16v add(Int16v x, Int16v y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
TIERCEL_INLINE Int16v mul(Int16v x, Int16v y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
TIERCEL_INLINE F16v to_float(Int16v x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

TIERCEL_INLINE __m256 half_e8m0_half(__m256i e) {
  const __m256i one = _mm256_set1_epi32(1);
  const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23), tiny = _mm256_slli_epi32(_mm256_add_epi32(e, one), 21);
  return _mm256_castsi256_ps(_mm256_max_epi32(normal, tiny));
}
TIERCEL_INLINE F16v half_e8m0(Int16v e) { return {half_e8m0_half(e.a), half_e8m0_half(e.b)}; }

struct Bytes {
  __m256i a, b;
};
struct Quad {
  __m256i v;
};
TIERCEL_INLINE Bytes load_bytes(const uint8_t* p) { return {load_half(p), load_half(p + 32)}; }
TIERCEL_INLINE void store_bytes(uint8_t* p, Bytes x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), x.b);
}
TIERCEL_INLINE Quad load_quad(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return {_mm256_set1_epi32(x)};
}
TIERCEL_INLINE Bytes low_nibbles(Bytes x) {
  const __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
TIERCEL_INLINE Bytes high_nibbles(Bytes x) { return low_nibbles({_mm256_srli_epi32(x.a, 4), _mm256_srli_epi32(x.b, 4)}); }
TIERCEL_INLINE Bytes look_up(const uint8_t (&table)[16], Bytes x) {
  const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(t, x.a), _mm256_shuffle_epi8(t, x.b)};
}
template <int Shift, int Mask>
TIERCEL_INLINE __m256i or_shifted_half(__m256i a, __m256i b) {
  const __m256i s = Shift >= 0 ? _mm256_slli_epi32(b, Shift >= 0 ? Shift : 0) : _mm256_srli_epi32(b, Shift < 0 ? -Shift : 0);
  return _mm256_or_si256(a, _mm256_and_si256(s, _mm256_set1_epi8(Mask)));
}
template <int Shift, int Mask>
TIERCEL_INLINE Bytes or_shifted(Bytes x, Bytes y) {
  return {or_shifted_half<Shift, Mask>(x.a, y.a), or_shifted_half<Shift, Mask>(x.b, y.b)};
}

template <int Max>
struct Dot {
  // Steps whose 16-bit sums fit (see the top of the file).
  static constexpr int kSteps = Max <= 15 ? 8 : Max <= 31 ? 4 : 2;
  __m256i part_a, part_b; // sums of pairs, 16 bits
  Int16v sum;
  TIERCEL_INLINE void begin(int32_t start) { sum = {_mm256_set1_epi32(start), _mm256_set1_epi32(start)}; }
  template <int Step>
  TIERCEL_INLINE void step(Bytes w, Quad a) {
    const __m256i pa = _mm256_maddubs_epi16(w.a, a.v), pb = _mm256_maddubs_epi16(w.b, a.v);
    part_a = Step % kSteps == 0 ? pa : _mm256_add_epi16(part_a, pa);
    part_b = Step % kSteps == 0 ? pb : _mm256_add_epi16(part_b, pb);
    if constexpr (Step % kSteps == kSteps - 1) widen();
  }
  TIERCEL_INLINE void widen() {
    const __m256i one = _mm256_set1_epi16(1);
    sum = add(sum, Int16v{_mm256_madd_epi16(part_a, one), _mm256_madd_epi16(part_b, one)});
  }
  TIERCEL_INLINE Int16v end() const { return sum; }
};

template <>
struct Dot<255> {
  Int16v sum;
  TIERCEL_INLINE void begin(int32_t) { sum = {_mm256_setzero_si256(), _mm256_setzero_si256()}; } // steps use w - 128 itself
  template <int Step>
  TIERCEL_INLINE void step(Bytes w, Quad a) {
    sum = add(sum, Int16v{products(w.a, a.v), products(w.b, a.v)});
  }
  static TIERCEL_INLINE __m256i products(__m256i w, __m256i a) {
    const __m256i s = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(s), _mm256_sign_epi8(a, s)), _mm256_set1_epi16(1));
  }
  TIERCEL_INLINE Int16v end() const { return sum; }
};

#else

struct Int16v {
  int32_t v[16];
};
template <class Fn>
TIERCEL_INLINE Int16v int_lanes(Fn fn) {
  Int16v r;
  for (int i = 0; i < 16; ++i) r.v[i] = fn(i);
  return r;
}
TIERCEL_INLINE Int16v load_int(const int32_t* p) {
  return int_lanes([&](int i) { return p[i]; });
}
TIERCEL_INLINE void store_int(int32_t* p, Int16v a) { std::memcpy(p, a.v, sizeof a.v); }
TIERCEL_INLINE Int16v load_i8(const int8_t* p) {
  return int_lanes([&](int i) { return static_cast<int32_t>(p[i]); });
}
TIERCEL_INLINE Int16v load_u8(const uint8_t* p) {
  return int_lanes([&](int i) { return static_cast<int32_t>(p[i]); });
}
TIERCEL_INLINE Int16v add(Int16v a, Int16v b) {
  return int_lanes([&](int i) { return a.v[i] + b.v[i]; });
}
TIERCEL_INLINE Int16v mul(Int16v a, Int16v b) {
  return int_lanes([&](int i) { return a.v[i] * b.v[i]; });
}
TIERCEL_INLINE F16v to_float(Int16v a) {
  return lanes([&](int i) { return static_cast<float>(a.v[i]); });
}

TIERCEL_INLINE F16v half_e8m0(Int16v e) {
  return lanes([&](int i) {
    const uint32_t bits = e.v[i] < 2 ? 0x00200000u << e.v[i] : static_cast<uint32_t>(e.v[i] - 1) << 23;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  });
}

struct Bytes {
  uint8_t v[64];
};
struct Quad {
  int8_t v[4];
};
TIERCEL_INLINE Bytes load_bytes(const uint8_t* p) {
  Bytes r;
  std::memcpy(r.v, p, 64);
  return r;
}
TIERCEL_INLINE void store_bytes(uint8_t* p, Bytes a) { std::memcpy(p, a.v, 64); }
TIERCEL_INLINE Quad load_quad(const int8_t* p) {
  Quad r;
  std::memcpy(r.v, p, 4);
  return r;
}
TIERCEL_INLINE Bytes low_nibbles(Bytes a) {
  for (int i = 0; i < 64; ++i) a.v[i] = a.v[i] & 15;
  return a;
}
TIERCEL_INLINE Bytes high_nibbles(Bytes a) {
  for (int i = 0; i < 64; ++i) a.v[i] = static_cast<uint8_t>(a.v[i] >> 4);
  return a;
}
TIERCEL_INLINE Bytes look_up(const uint8_t (&table)[16], Bytes a) {
  for (int i = 0; i < 64; ++i) a.v[i] = table[a.v[i]];
  return a;
}
template <int Shift, int Mask>
TIERCEL_INLINE Bytes or_shifted(Bytes a, Bytes b) {
  for (int i = 0; i < 64; ++i) {
    const int s = Shift >= 0 ? b.v[i] << (Shift >= 0 ? Shift : 0) : b.v[i] >> (Shift < 0 ? -Shift : 0);
    a.v[i] = static_cast<uint8_t>(a.v[i] | (s & Mask));
  }
  return a;
}

// A call, because unrolling it into every kernel would take minutes to compile.
__attribute__((noinline)) inline void add_products(Int16v& sum, const Bytes& w, Quad a) {
  for (int i = 0; i < 16; ++i)
    for (int b = 0; b < 4; ++b) sum.v[i] += w.v[4 * i + b] * a.v[b];
}

template <int Max>
struct Dot {
  Int16v sum;
  TIERCEL_INLINE void begin(int32_t start) {
    sum = int_lanes([&](int) { return start; });
  }
  template <int Step>
  TIERCEL_INLINE void step(const Bytes& w, Quad a) {
    add_products(sum, w, a);
  }
  TIERCEL_INLINE Int16v end() const { return sum; }
};

#endif

// Into all caches; harmless past the end of memory.
TIERCEL_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p, 0, 3); }

} // namespace
} // namespace tiercel::TIERCEL_LEVEL
