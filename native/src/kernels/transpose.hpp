// Sixteen rows of sixteen floats, turned: to[d * 16 + s] = from[s * ld + d]. Kernel sources only.
#pragma once

#include "simd.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

#if defined(__AVX2__)

TIERCEL_INLINE void transpose8(const float* from, int64_t ld, float* to) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(from + i * ld);
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * 16, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * 16, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}

TIERCEL_INLINE void transpose16(const float* from, int64_t ld, float* to) {
  for (int s = 0; s < 16; s += 8)
    for (int d = 0; d < 16; d += 8) transpose8(from + s * ld + d, ld, to + d * 16 + s);
}

#else

TIERCEL_INLINE void transpose16(const float* from, int64_t ld, float* to) {
  for (int s = 0; s < 16; ++s)
    for (int d = 0; d < 16; ++d) to[d * 16 + s] = from[s * ld + d];
}

#endif

} // namespace
} // namespace tiercel::TIERCEL_LEVEL
