// Rounds rows of f32 to int8 groups of 32 (ActGroup in layout.hpp).
//
// Contract, for each group x[0..32):
//   amax = max |x|
//   amax is Inf or NaN (as it is when any x is):  scale = NaN, q = 0, so that every output of the row becomes NaN
//   amax < 2^-100:                                scale = 0, q = 0; keeps 127 / amax finite and denormals out, whatever MXCSR says
//   otherwise:                                    scale = amax / 127, q = round_to_even(x * (127 / amax)), each operation rounded once
#include "formats.hpp"
#include "table.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

constexpr int32_t kInfinityBits = 0x7f800000;
constexpr int32_t kNothingBits = 27 << 23; // 2^-100

struct Rounding {
  float scale, inverse;
};

// From the bits of amax: as integers, NaN > Inf > every finite number.
TIERCEL_INLINE Rounding rounding_of(int32_t amax_bits) {
  if (amax_bits >= kInfinityBits) return {__builtin_nanf(""), 0.0f};
  if (amax_bits < kNothingBits) return {0.0f, 0.0f};
  float amax;
  std::memcpy(&amax, &amax_bits, 4);
  return {amax / 127.0f, 127.0f / amax};
}

TIERCEL_INLINE void finish(ActGroup* out, float scale, int32_t sum0, int32_t sum1) {
  const int32_t sum = sum0 + sum1;
  out->scale = scale;
  out->scaled_sum = scale * static_cast<float>(sum);
  out->start8 = -8 * sum;
  out->start16 = -16 * sum;
  out->start128 = -128 * sum;
  out->start32[0] = -32 * sum0;
  out->start32[1] = -32 * sum1;
  out->unused = 0;
}

#if defined(__AVX512F__)

TIERCEL_INLINE void quantize_group(const float* x, ActGroup* out) {
  const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i top =
      _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a), magnitude), _mm512_and_si512(_mm512_castps_si512(b), magnitude));
  const Rounding r = rounding_of(_mm512_reduce_max_epi32(top));
  __m512i qa = _mm512_setzero_si512(), qb = qa;
  if (r.inverse != 0.0f) {
    const __m512 inverse = _mm512_set1_ps(r.inverse);
    qa = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse));
    qb = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
  }
  _mm_store_si128(reinterpret_cast<__m128i*>(out->q), _mm512_cvtepi32_epi8(qa));
  _mm_store_si128(reinterpret_cast<__m128i*>(out->q + 16), _mm512_cvtepi32_epi8(qb));
  finish(out, r.scale, _mm512_reduce_add_epi32(qa), _mm512_reduce_add_epi32(qb));
}

// Sixteen groups at once: their maxima and sums go through one tree of shuffles each, three times as fast as one by one.
constexpr int64_t kChunk = 16;

struct Max {
  TIERCEL_INLINE __m512i operator()(__m512i a, __m512i b) const { return _mm512_max_epi32(a, b); }
};
struct Sum {
  TIERCEL_INLINE __m512i operator()(__m512i a, __m512i b) const { return _mm512_add_epi32(a, b); }
};

// Four vectors to one: in each 128-bit lane, dword c is the reduction of v[c]'s four dwords of that lane.
template <class Op>
TIERCEL_INLINE __m512i reduce_lanes(const __m512i* v, Op op) {
  const __m512i a = op(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
  const __m512i b = op(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
  return op(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

TIERCEL_INLINE __m512i max_magnitudes(const float* x) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i lanes[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512i top[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const float* group = x + (4 * i + j) * kGroup;
      top[j] = _mm512_max_epi32(_mm512_and_si512(_mm512_loadu_si512(group), magnitude),
                                _mm512_and_si512(_mm512_loadu_si512(group + 16), magnitude));
    }
    lanes[i] = reduce_lanes(top, Max());
  }
  const __m512i low = _mm512_max_epi32(_mm512_shuffle_i32x4(lanes[0], lanes[1], 0x88), _mm512_shuffle_i32x4(lanes[0], lanes[1], 0xdd));
  const __m512i high = _mm512_max_epi32(_mm512_shuffle_i32x4(lanes[2], lanes[3], 0x88), _mm512_shuffle_i32x4(lanes[2], lanes[3], 0xdd));
  return _mm512_max_epi32(_mm512_shuffle_i32x4(low, high, 0x88), _mm512_shuffle_i32x4(low, high, 0xdd));
}

// Rounds two groups, stores their q, and returns the sums of its quads: 128-bit lanes are half 0 and 1 of the first, then of the second.
TIERCEL_INLINE __m512i round_pair(const float* x, float inverse0, float inverse1, ActGroup* out) {
  const __m512 first = _mm512_set1_ps(inverse0), second = _mm512_set1_ps(inverse1);
  const __m512i a = _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), first)),
                                       _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16), first)));
  const __m512i b = _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 32), second)),
                                       _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 48), second)));
  // Packing works within 128-bit lanes, so dword 4 L + i holds quad L of half i.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i q = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(a, b));
  _mm256_store_si256(reinterpret_cast<__m256i*>(out[0].q), _mm512_castsi512_si256(q));
  _mm256_store_si256(reinterpret_cast<__m256i*>(out[1].q), _mm512_extracti64x4_epi64(q, 1));
  return _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), q);
}

// Writes what follows q in 16 groups: field f of group g is dword g of fields[f].
TIERCEL_INLINE void store_fields(const __m512i* fields, ActGroup* out) {
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const __m512i* f = fields + 4 * h;
    const __m512i a = _mm512_unpacklo_epi32(f[0], f[1]), b = _mm512_unpackhi_epi32(f[0], f[1]);
    const __m512i c = _mm512_unpacklo_epi32(f[2], f[3]), d = _mm512_unpackhi_epi32(f[2], f[3]);
    // Lane L of each is four fields of group 4 L + i.
    const __m512i groups[4] = {_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c), _mm512_unpacklo_epi64(b, d),
                               _mm512_unpackhi_epi64(b, d)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      auto at = [&](int lane) { return reinterpret_cast<__m128i*>(reinterpret_cast<uint8_t*>(out + 4 * lane + i) + 32 + 16 * h); };
      _mm_store_si128(at(0), _mm512_castsi512_si128(groups[i]));
      _mm_store_si128(at(1), _mm512_extracti32x4_epi32(groups[i], 1));
      _mm_store_si128(at(2), _mm512_extracti32x4_epi32(groups[i], 2));
      _mm_store_si128(at(3), _mm512_extracti32x4_epi32(groups[i], 3));
    }
  }
}

void quantize_chunk(const float* x, ActGroup* out) {
  const __m512i amax = max_magnitudes(x);
  const __mmask16 is_special =
      _mm512_cmpge_epi32_mask(amax, _mm512_set1_epi32(kInfinityBits)) | _mm512_cmplt_epi32_mask(amax, _mm512_set1_epi32(kNothingBits));
  if (is_special) {
    for (int64_t g = 0; g < kChunk; ++g) quantize_group(x + g * kGroup, out + g);
    return;
  }
  const __m512 scale = _mm512_div_ps(_mm512_castsi512_ps(amax), _mm512_set1_ps(127.0f));
  alignas(64) float inverse[16];
  _mm512_store_ps(inverse, _mm512_div_ps(_mm512_set1_ps(127.0f), _mm512_castsi512_ps(amax)));
  __m512i quads[8];
#pragma GCC unroll 8
  for (int p = 0; p < 8; ++p) quads[p] = round_pair(x + p * 2 * kGroup, inverse[2 * p], inverse[2 * p + 1], out + 2 * p);
  // Lanes: half 0 of groups 0 2 4 6 (or 8 10 12 14), half 1 of these, then the same of the odd groups.
  const __m512i low = reduce_lanes(quads, Sum()), high = reduce_lanes(quads + 4, Sum());
  const __m512i half0 = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 16, 24, 17, 25, 18, 26, 19, 27);
  const __m512i sum0 = _mm512_permutex2var_epi32(low, half0, high);
  const __m512i sum1 = _mm512_permutex2var_epi32(low, _mm512_add_epi32(half0, _mm512_set1_epi32(4)), high);
  const __m512i sum = _mm512_add_epi32(sum0, sum1), minus = _mm512_sub_epi32(_mm512_setzero_si512(), sum);
  const __m512i zero = _mm512_setzero_si512();
  const __m512i fields[8] = {_mm512_castps_si512(scale),
                             _mm512_castps_si512(_mm512_mul_ps(scale, _mm512_cvtepi32_ps(sum))),
                             _mm512_slli_epi32(minus, 3),
                             _mm512_slli_epi32(minus, 4),
                             _mm512_slli_epi32(minus, 7),
                             _mm512_slli_epi32(_mm512_sub_epi32(zero, sum0), 5),
                             _mm512_slli_epi32(_mm512_sub_epi32(zero, sum1), 5),
                             zero};
  store_fields(fields, out);
}

#else

TIERCEL_INLINE void quantize_group(const float* x, ActGroup* out) {
  int32_t amax_bits = 0;
  for (int i = 0; i < 32; ++i) {
    int32_t u;
    std::memcpy(&u, x + i, 4);
    u &= 0x7fffffff;
    amax_bits = u > amax_bits ? u : amax_bits;
  }
  const Rounding r = rounding_of(amax_bits);
  int32_t q[32] = {};
  if (r.inverse != 0.0f)
    for (int i = 0; i < 32; ++i) {
      // Adding 1.5 * 2^23 leaves the rounded integer in the low bits; it rounds to even as the conversion instruction does.
      const float shifted = x[i] * r.inverse + 12582912.0f;
      std::memcpy(&q[i], &shifted, 4);
      q[i] -= 0x4b400000;
    }
  int32_t sum0 = 0, sum1 = 0;
  for (int i = 0; i < 16; ++i) {
    sum0 += q[i];
    sum1 += q[i + 16];
  }
  for (int i = 0; i < 32; ++i) out->q[i] = static_cast<int8_t>(q[i]);
  finish(out, r.scale, sum0, sum1);
}

#endif

} // namespace

void quantize_columns(const float* x, int64_t begin, int64_t end, uint8_t* out) {
  ActGroup* group = reinterpret_cast<ActGroup*>(out);
  int64_t g = begin / kGroup;
#if defined(__AVX512F__)
  for (; g + kChunk <= end / kGroup; g += kChunk) quantize_chunk(x + g * kGroup, group + g);
#endif
  for (; g < end / kGroup; ++g) quantize_group(x + g * kGroup, group + g);
}

void quantize_row(const float* x, int64_t k, uint8_t* out) { quantize_columns(x, 0, k, out); }

void quantize(const QuantizeArgs& args, const ThreadCtx& ctx) {
  const int64_t begin = args.m * ctx.thread / ctx.n_threads, end = args.m * (ctx.thread + 1) / ctx.n_threads;
  for (int64_t row = begin; row < end; ++row)
    quantize_row(args.x + row * args.ldx, args.yq->k, args.yq->data + row * args.yq->stride_bytes);
}

} // namespace tiercel::TIERCEL_LEVEL
