// What the machine can do at most at this level: one kind of work, in registers or in order through memory, and nothing else.
// 12 independent chains hide the latency of either unit on the processors we know.
#include "simd_int.hpp"
#include "table.hpp"

namespace tiercel::TIERCEL_LEVEL {

namespace {

constexpr int kChains = 12;

float fma_rounds(int64_t n) {
  F16v sums[kChains];
  for (int c = 0; c < kChains; ++c) sums[c] = set1(1.0f + static_cast<float>(c));
  const F16v a = set1(0.999f), b = set1(0.001f);
  for (int64_t i = 0; i < n; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) sums[c] = fma(sums[c], a, b);
  }
  F16v all = zero();
  for (const F16v& s : sums) all = add(all, s);
  return reduce_add(all);
}

template <int Step>
TIERCEL_INLINE void dot_steps(Dot<15>* dots, Bytes w, const uint8_t* quads) {
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) dots[c].template step<Step>(w, load_quad(reinterpret_cast<const int8_t*>(quads + 4 * c)));
}

float dot_rounds(const uint8_t* data, int64_t n) {
  Dot<15> dots[kChains];
  F16v all = zero();
  for (int64_t i = 0; i < n; i += 8) {
    // Others each time and for each chain, or the compiler would find equal products.
    const Bytes w = low_nibbles(load_bytes(data + 8 * (i & 56)));
    const uint8_t* quads = data + 512 + (i & 56);
    for (int c = 0; c < kChains; ++c) dots[c].begin(c);
    dot_steps<0>(dots, w, quads);
    dot_steps<1>(dots, w, quads + 48);
    dot_steps<2>(dots, w, quads + 96);
    dot_steps<3>(dots, w, quads + 144);
    dot_steps<4>(dots, w, quads + 192);
    dot_steps<5>(dots, w, quads + 240);
    dot_steps<6>(dots, w, quads + 32);
    dot_steps<7>(dots, w, quads + 80);
    for (auto& d : dots) all = add(all, to_float(d.end()));
  }
  return reduce_add(all);
}

float read_bytes(const uint8_t* data, int64_t n) {
  F16v sums[8];
  for (auto& s : sums) s = zero();
  for (int64_t i = 0; i + 512 <= n; i += 512) {
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) sums[c] = max(sums[c], load(reinterpret_cast<const float*>(data + i + 64 * c)));
  }
  F16v all = zero();
  for (const F16v& s : sums) all = max(all, s);
  return reduce_max(all);
}

} // namespace

float probe(Probe kind, const uint8_t* data, int64_t n) {
  switch (kind) {
    case Probe::Fma: return fma_rounds(n);
    case Probe::Dot: return dot_rounds(data, n);
    case Probe::Read: break;
  }
  return read_bytes(data, n);
}

} // namespace tiercel::TIERCEL_LEVEL
