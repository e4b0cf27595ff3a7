// How a kernel reads each quantised format's tiles: Weights<F> walks the groups of one tile (layout.hpp draws it).
#pragma once

#include "../layout.hpp"
#include "simd_int.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

// What multiplies what, apart from where it lies. Formats of equal kind share their panel kernel.
enum class Kind { Plain, Min, Halves };

constexpr Kind kind_of(Format f) {
  switch (f) {
    case Format::Q4_1:
    case Format::Q5_1:
    case Format::Q4_K:
    case Format::Q5_K: return Kind::Min;    // w = scale * q + minimum
    case Format::Q6_K: return Kind::Halves; // w = scale * sub_scale[i / 16] * (q - 32)
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
    case Format::Q5_K: return 31;
    case Format::Q6_K: return 63;
    default: return 255;
  }
}

// Where in an ActGroup the dot product's start lies, for Kind::Plain.
constexpr int64_t start_offset(Format f) {
  switch (f) {
    case Format::Q4_0: return offsetof(ActGroup, start8);
    case Format::Q5_0: return offsetof(ActGroup, start16);
    default: return offsetof(ActGroup, start128);
  }
}

constexpr bool has_fifth_bit(Format f) { return f == Format::Q5_0 || f == Format::Q5_1 || f == Format::Q5_K; }

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

  // Adds to a quad's nibbles the bits kept in the high planes.
  template <int J>
  TIERCEL_INLINE Bytes with_high_bits(Bytes low) const {
    if constexpr (has_fifth_bit(F))
      return or_shifted<4 - J, 16>(low, load_bytes(body + 256));
    else if constexpr (F == Format::Q6_K)
      return or_shifted<4 - J % 4 * 2, 48>(low, load_bytes(body + 256 + J / 4 * 64));
    else
      return low;
  }

  // Calls fn.template operator()<step, quad>(bytes) for the 8 quads, in the order that reads each vector once.
  template <int J, class Fn>
  TIERCEL_INLINE void nibble_pair(Fn& fn) const {
    const Bytes both = load_bytes(body + J * 64);
    fn.template operator()<2 * J, J>(with_high_bits<J>(low_nibbles(both)));
    fn.template operator()<2 * J + 1, J + 4>(with_high_bits<J + 4>(high_nibbles(both)));
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
