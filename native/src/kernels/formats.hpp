// How a kernel reads each quantised format's tiles: Weights<F> walks the groups of one tile (layout.hpp draws it).
#pragma once

#include "../layout.hpp"
#include "simd_int.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

// What multiplies what, apart from where it lies. Formats of equal kind share their panel kernel.
enum class Kind { Plain, Min, Halves, Pair };

constexpr Kind kind_of(Format f) {
  switch (f) {
    case Format::Q4_1:
    case Format::Q5_1:
    case Format::Q4_K:
    case Format::Q5_K: return Kind::Min;    // w = scale * q + minimum
    case Format::Q6_K: return Kind::Halves; // w = scale * sub_scale[i / 16] * (q - 32)
    case Format::NVFP4: return Kind::Pair;  // w = scale[i / 16] * (q - 32)
    default: return Kind::Plain;            // w = scale * (q - zero point)
  }
}

// The largest stored weight: decides which Dot is exact.
constexpr int max_weight(Format f) {
  switch (f) {
    case Format::Q4_0:
    case Format::Q4_1:
    case Format::Q4_K: return 15;
    case Format::Q5_0:
    case Format::Q5_1:
    case Format::Q5_K:
    case Format::MXFP4: return 31;
    case Format::Q6_K:
    case Format::NVFP4: return 63;
    default: return 255;
  }
}

// Where in an ActGroup the dot product's start lies, for Kind::Plain.
constexpr int64_t start_offset(Format f) {
  switch (f) {
    case Format::Q4_0: return offsetof(ActGroup, start8);
    case Format::Q5_0:
    case Format::MXFP4: return offsetof(ActGroup, start16);
    default: return offsetof(ActGroup, start128);
  }
}

constexpr bool has_fifth_bit(Format f) { return f == Format::Q5_0 || f == Format::Q5_1 || f == Format::Q5_K; }

constexpr bool is_e2m1(Format f) { return f == Format::MXFP4 || f == Format::NVFP4; }

// Twice the value of each E2M1 code, plus the zero point that a group's sums start from.
constexpr uint8_t kE2m1Plus16[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
constexpr uint8_t kE2m1Plus32[16] = {32, 33, 34, 35, 36, 38, 40, 44, 32, 31, 30, 29, 28, 26, 24, 20};

TIERCEL_INLINE const uint16_t* halves_at(const uint8_t* p) { return reinterpret_cast<const uint16_t*>(p); }

template <Format F>
struct Weights {
  static constexpr TileLayout kLayout = tile_layout(F);
  static constexpr Kind kKind = kind_of(F);
  static constexpr int kMax = max_weight(F);

  const uint8_t* unit;
  const uint8_t* body;
  int64_t i; // the group's place in its unit

  explicit TIERCEL_INLINE Weights(const uint8_t* tile) : unit(tile), body(tile + kLayout.head_bytes), i(0) {}

  TIERCEL_INLINE void next() {
    body += kLayout.body_bytes;
    if (++i == kLayout.groups) {
      unit = body;
      body += kLayout.head_bytes;
      i = 0;
    }
  }

  TIERCEL_INLINE F16v scale() const {
    if constexpr (F == Format::Q4_K || F == Format::Q5_K)
      return mul(load_f16(halves_at(unit)), to_float(load_u8(unit + 64 + i * 32))); // exact: 11 + 6 bits
    else if constexpr (F == Format::MXFP4)
      return half_e8m0(load_u8(unit + i * 16));
    else if constexpr (F == Format::NVFP4)
      return scale_of(0);
    else if constexpr (F == Format::Q6_K || kLayout.groups == 1)
      return load_f16(halves_at(unit));
    else
      return load_f16(halves_at(unit + i * 32));
  }

  TIERCEL_INLINE F16v minimum() const {
    if constexpr (F == Format::Q4_K || F == Format::Q5_K)
      return neg(mul(load_f16(halves_at(unit + 32)), to_float(load_u8(unit + 64 + i * 32 + 16))));
    else
      return load_f16(halves_at(unit + 32));
  }

  // Q6_K: the scales of weights 0..15 and 16..31.
  TIERCEL_INLINE Int16v sub_scale(int half) const { return load_i8(reinterpret_cast<const int8_t*>(unit + 64 + i * 32 + half * 16)); }

  // Kind::Pair: the scale of weights 0..15 or 16..31.
  TIERCEL_INLINE F16v scale_of(int half) const { return load(reinterpret_cast<const float*>(unit + half * 64)); }

  // Makes a quad of its nibbles: adds to them's nibbles the bits kept in the high planes, or looks them up.
  template <int J>
  TIERCEL_INLINE Bytes quad_of(Bytes low) const {
    if constexpr (has_fifth_bit(F))
      return or_shifted<4 - J, 16>(low, load_bytes(body + 256));
    else if constexpr (F == Format::Q6_K)
      return or_shifted<4 - J % 4 * 2, 48>(low, load_bytes(body + 256 + J / 4 * 64));
    else if constexpr (is_e2m1(F))
      return look_up(F == Format::MXFP4 ? kE2m1Plus16 : kE2m1Plus32, low);
    else
      return low;
  }

  // Calls fn.template operator()<step, quad>(bytes) for the 8 quads, in the order that reads each vector once.
  template <int J, class Fn>
  TIERCEL_INLINE void nibble_pair(Fn& fn) const {
    const Bytes both = load_bytes(body + J * 64);
    fn.template operator()<2 * J, J>(quad_of<J>(low_nibbles(both)));
    fn.template operator()<2 * J + 1, J + 4>(quad_of<J + 4>(high_nibbles(both)));
  }
  template <class Fn>
  TIERCEL_INLINE void each_quad(Fn fn) const {
    if constexpr (F == Format::Q8_0) {
      fn.template operator()<0, 0>(load_bytes(body));
      fn.template operator()<1, 1>(load_bytes(body + 64));
      fn.template operator()<2, 2>(load_bytes(body + 128));
      fn.template operator()<3, 3>(load_bytes(body + 192));
      fn.template operator()<4, 4>(load_bytes(body + 256));
      fn.template operator()<5, 5>(load_bytes(body + 320));
      fn.template operator()<6, 6>(load_bytes(body + 384));
      fn.template operator()<7, 7>(load_bytes(body + 448));
    } else {
      nibble_pair<0>(fn);
      nibble_pair<1>(fn);
      nibble_pair<2>(fn);
      nibble_pair<3>(fn);
    }
  }
};

} // namespace
} // namespace tiercel::TIERCEL_LEVEL
