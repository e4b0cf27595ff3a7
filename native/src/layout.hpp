// How packed weights and rounded activations lie in memory: one set of numbers for the packer and for every level's kernels.
//
// Constants and plain structs only, with internal linkage: this header is compiled for several instruction sets.
//
// A matrix W [N, K] is ceil(N / 16) tiles of 16 consecutive output rows. A quantised tile runs over the 32-groups of K in order, as units
// of kGroups groups:
//
//   unit  = head (scales of all its groups), then one body a group
//   body  = nibble plane 256 B [| high plane], or 512 B of whole bytes for Q8_0
//
// In a 64-byte vector of a body, dword c belongs to output row c, and its 4 bytes are 4 consecutive weights: a "quad". Group g holds quads
// 0..7. Nibble plane: vector j (0..3) has quad j in the low and quad j + 4 in the high nibbles. One-bit high plane (Q5): bit t of byte b is
// the fifth bit of weight 4 t + b. Two-bit high plane (Q6_K): vector h, bits 2 t and 2 t + 1 of byte b belong to weight 16 h + 4 t + b.
// Q8_0: vector j is quad j, stored as weight + 128. Every vector is 64-byte aligned. A last unit with fewer groups is padded.
//
// Heads (16 values a line, one for each output row):
//   Q4_0 Q5_0 Q8_0   2 groups: f16 scale of group 0, f16 scale of group 1
//   Q4_1 Q5_1        1 group:  f16 scale, f16 minimum
//   Q4_K Q5_K        8 groups: f16 d, f16 dmin, then for each group u8 scale and u8 minimum
//   Q6_K             8 groups: f16 d, 32 B unused, then for each group two i8 scales (weights 0..15 and 16..31)
//   MXFP4            4 groups: for each group the exponent byte of its scale
//   NVFP4            1 group:  f32 scales of weights 0..15 and 16..31, halved: nibbles are E2M1 codes, which count in halves
// Scales stay as the file has them, because d * scale of Q4_K does not fit an f16.
//
// A float tile is [K][16] values of its type, rounded up to 64 bytes. BF16: [ceil(K / 2)][16] dwords, weight 2 j in the low and 2 j + 1 in
// the high half of dword line j, so that a shift or a mask makes either a float.
#pragma once

#include "tiercel/kernels.hpp"

namespace tiercel {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kGroup = 32;

struct TileLayout {
  int64_t groups; // groups a unit
  int64_t head_bytes;
  int64_t body_bytes; // a group
};

constexpr TileLayout tile_layout(Format format) {
  switch (format) {
    case Format::Q4_0: return {2, 64, 256};
    case Format::Q4_1: return {1, 64, 256};
    case Format::Q5_0: return {2, 64, 320};
    case Format::Q5_1: return {1, 64, 320};
    case Format::Q8_0: return {2, 64, 512};
    case Format::Q4_K: return {8, 320, 256};
    case Format::Q5_K: return {8, 320, 320};
    case Format::Q6_K: return {8, 320, 384};
    case Format::MXFP4: return {4, 64, 256};
    case Format::NVFP4: return {1, 128, 256};
    default: return {0, 0, 0}; // float formats have no groups
  }
}

constexpr int64_t unit_bytes(TileLayout l) { return l.head_bytes + l.groups * l.body_bytes; }

// One 32-group of a rounded activation row: 64 bytes, a cache line, so that a kernel needs one pointer a row.
struct ActGroup {
  int8_t q[32];       // -127..127
  float scale;        // x = q * scale
  float scaled_sum;   // scale * sum(q), one rounding: what a weight's minimum is multiplied by
  int32_t start8;     // -8 * sum(q): where the dot product starts to undo a zero point of 8
  int32_t start16;    // -16 * sum(q)
  int32_t start128;   // -128 * sum(q)
  int32_t start32[2]; // -32 * sum of each half of q
  int32_t unused;
};
static_assert(sizeof(ActGroup) == 64);

// The integer panel kernel's scratch for one tile and group: 8 quads as bytes, two lines of scales (or, for Q6_K, three).
constexpr int64_t kPanelGroupBytes = 512 + 192;
constexpr int64_t kPanelTiles = 2;

} // namespace
} // namespace tiercel
