// Packing of weight files into tiles (layout.hpp), and the sizes that belong to it. Independent of the instruction set.
//
// Source blocks are GGUF's: the byte offsets below follow its block structs, the values its dequantisation, which is exact up to
// one final rounding in every format, so that any order of evaluation gives the same bits. NVFP4's are ours (quant/formats.py): two f32
// scales, 16 bytes of nibbles.
#include <cstring>

#include "layout.hpp"
#include "tiercel/packed.hpp"

namespace tiercel {
namespace {

struct BlockSize {
  int64_t weights;
  int64_t bytes;
};

BlockSize block_size(Format format) {
  switch (format) {
    case Format::F32: return {1, 4};
    case Format::F16:
    case Format::BF16: return {1, 2};
    case Format::Q4_0: return {32, 18};
    case Format::Q4_1: return {32, 20};
    case Format::Q5_0: return {32, 22};
    case Format::Q5_1: return {32, 24};
    case Format::Q8_0: return {32, 34};
    case Format::Q4_K: return {256, 144};
    case Format::Q5_K: return {256, 176};
    case Format::Q6_K: return {256, 210};
    case Format::MXFP4: return {32, 17};
    case Format::NVFP4: return {32, 24};
  }
  return {0, 0};
}

int64_t tile_bytes_of(Format format, int64_t k) {
  const TileLayout layout = tile_layout(format);
  if (layout.groups == 0) return (k * kTileRows * block_size(format).bytes + 63) / 64 * 64;
  const int64_t n_groups = k / kGroup;
  return (n_groups + layout.groups - 1) / layout.groups * unit_bytes(layout);
}

template <class T>
T read(const uint8_t* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class T>
void write(uint8_t* p, T v) {
  std::memcpy(p, &v, sizeof v);
}

float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  uint32_t u;
  if (magnitude >= 0x7c00u) {
    u = 0x7f800000u | ((magnitude & 0x3ffu) << 13);
  } else if (magnitude >= 0x400u) {
    u = (magnitude << 13) + (112u << 23);
  } else {
    const float tiny = static_cast<float>(magnitude) * 5.9604644775390625e-08f; // 2^-24
    std::memcpy(&u, &tiny, 4);
  }
  u |= sign;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

float read_half(const uint8_t* p) { return half_to_float(read<uint16_t>(p)); }

// Neither NaN nor infinity.
bool is_number(uint16_t half) { return (half & 0x7c00u) != 0x7c00u; }
bool is_number(float f) { return (read<uint32_t>(reinterpret_cast<const uint8_t*>(&f)) & 0x7f800000u) != 0x7f800000u; }
bool is_half_number(const uint8_t* p) { return is_number(read<uint16_t>(p)); }

// Scale and minimum of 32-group s (0..7) of a Q4_K or Q5_K block, from its 12 bytes of 6-bit numbers.
struct KScale {
  uint8_t scale, minimum;
};

KScale k_scale(const uint8_t* packed, int s) {
  if (s < 4) return {static_cast<uint8_t>(packed[s] & 63), static_cast<uint8_t>(packed[s + 4] & 63)};
  const int low = packed[s + 4];
  return {static_cast<uint8_t>((low & 15) | (packed[s - 4] >> 6 << 4)), static_cast<uint8_t>((low >> 4) | (packed[s] >> 6 << 4))};
}

// --- one row's 32-group into its lane of a body ---------------------------------------------------------------------------------

constexpr uint32_t kLowNibbles = 0x0f0f0f0fu;

// The 8 quads of a group, one weight a byte: to a nibble plane.
void put_nibbles(const uint32_t quads[8], uint8_t* body, int lane) {
  for (int j = 0; j < 4; ++j) write(body + j * 64 + lane * 4, (quads[j] & kLowNibbles) | (quads[j + 4] & kLowNibbles) << 4);
}

// Bit b, b + 4, b + 8, ... of x as the bits 0..7 of a byte.
uint32_t every_fourth_bit(uint32_t x, int b) {
  x = (x >> b) & 0x11111111u;
  x = (x | x >> 3) & 0x03030303u;
  x = (x | x >> 6) & 0x000f000fu;
  return (x | x >> 12) & 0xffu;
}

// A GGUF nibble block: low nibbles are weights 0..15, high nibbles 16..31, which is the plane's own order.
void copy_nibbles(const uint8_t* qs, uint8_t* body, int lane) {
  for (int j = 0; j < 4; ++j) std::memcpy(body + j * 64 + lane * 4, qs + j * 4, 4);
}

void put_fifth_bits(uint32_t qh, uint8_t* plane, int lane) {
  const uint32_t bits =
      every_fourth_bit(qh, 0) | every_fourth_bit(qh, 1) << 8 | every_fourth_bit(qh, 2) << 16 | every_fourth_bit(qh, 3) << 24;
  write(plane + lane * 4, bits);
}

// Group s of a 4-bit super-block: 32 bytes shared by an even group (low nibbles) and an odd one.
void put_k_nibbles(const uint8_t* qs, int s, uint8_t* body, int lane) {
  uint32_t quads[8];
  for (int j = 0; j < 8; ++j) quads[j] = read<uint32_t>(qs + (s / 2) * 32 + j * 4) >> (s % 2 * 4);
  put_nibbles(quads, body, lane);
}

void put_q6(const uint8_t* block, int s, uint8_t* body, int lane) {
  const uint8_t* ql = block + (s / 4) * 64 + (s % 2) * 32;
  const uint8_t* qh = block + 128 + (s / 4) * 32;
  const int nibble = (s % 4) / 2 * 4, pair = (s % 4) * 2;
  uint32_t quads[8], high[2] = {0, 0};
  for (int j = 0; j < 8; ++j) {
    quads[j] = read<uint32_t>(ql + j * 4) >> nibble;
    high[j / 4] |= ((read<uint32_t>(qh + j * 4) >> pair) & 0x03030303u) << (j % 4 * 2);
  }
  put_nibbles(quads, body, lane);
  write(body + 256 + lane * 4, high[0]);
  write(body + 320 + lane * 4, high[1]);
}

constexpr uint8_t kE8m0Nan = 255;

// --- one row's unit (all its groups) ----------------------------------------------------------------------------------------------

// n_groups: how many of the unit's groups exist. Returns whether all their scales are numbers.
using PutUnit = bool (*)(const uint8_t* block, int n_groups, uint8_t* unit, int lane);

template <Format F>
bool put_unit(const uint8_t* block, int n_groups, uint8_t* unit, int lane) {
  constexpr TileLayout layout = tile_layout(F);
  constexpr bool has_fifth = F == Format::Q5_0 || F == Format::Q5_1;
  constexpr bool has_min = F == Format::Q4_1 || F == Format::Q5_1;
  constexpr int64_t bits_at = has_min ? 4 : 2;
  constexpr int64_t quants_at = bits_at + (has_fifth ? 4 : 0);
  constexpr int64_t bytes = F == Format::Q8_0 ? 34 : quants_at + 16;
  bool is_finite = true;
  for (int g = 0; g < n_groups; ++g, block += bytes) {
    uint8_t* body = unit + layout.head_bytes + g * layout.body_bytes;
    std::memcpy(unit + g * 32 + lane * 2, block, 2);
    if constexpr (has_min) std::memcpy(unit + 32 + lane * 2, block + 2, 2);
    is_finite &= is_half_number(block) && (!has_min || is_half_number(block + 2));
    if constexpr (F == Format::Q8_0) {
      for (int j = 0; j < 8; ++j) write(body + j * 64 + lane * 4, read<uint32_t>(block + 2 + j * 4) ^ 0x80808080u);
    } else {
      copy_nibbles(block + quants_at, body, lane);
      if constexpr (has_fifth) put_fifth_bits(read<uint32_t>(block + bits_at), body + 256, lane);
    }
  }
  return is_finite;
}

template <bool HasFifth>
bool put_k_unit(const uint8_t* block, uint8_t* unit, int lane) {
  constexpr TileLayout layout = tile_layout(HasFifth ? Format::Q5_K : Format::Q4_K);
  std::memcpy(unit + lane * 2, block, 2);
  std::memcpy(unit + 32 + lane * 2, block + 2, 2);
  for (int s = 0; s < 8; ++s) {
    uint8_t* body = unit + layout.head_bytes + s * layout.body_bytes;
    const KScale scale = k_scale(block + 4, s);
    unit[64 + s * 32 + lane] = scale.scale;
    unit[64 + s * 32 + 16 + lane] = scale.minimum;
    put_k_nibbles(block + (HasFifth ? 48 : 16), s, body, lane);
    if constexpr (HasFifth) {
      uint32_t bits = 0;
      for (int t = 0; t < 8; ++t) bits |= ((read<uint32_t>(block + 16 + t * 4) >> s) & 0x01010101u) << t;
      write(body + 256 + lane * 4, bits);
    }
  }
  return is_half_number(block) && is_half_number(block + 2);
}

template <>
bool put_unit<Format::Q4_K>(const uint8_t* block, int, uint8_t* unit, int lane) {
  return put_k_unit<false>(block, unit, lane);
}

template <>
bool put_unit<Format::Q5_K>(const uint8_t* block, int, uint8_t* unit, int lane) {
  return put_k_unit<true>(block, unit, lane);
}

template <>
bool put_unit<Format::Q6_K>(const uint8_t* block, int, uint8_t* unit, int lane) {
  constexpr TileLayout layout = tile_layout(Format::Q6_K);
  std::memcpy(unit + lane * 2, block + 208, 2);
  for (int s = 0; s < 8; ++s) {
    unit[64 + s * 32 + lane] = block[192 + 2 * s];
    unit[64 + s * 32 + 16 + lane] = block[192 + 2 * s + 1];
    put_q6(block, s, unit + layout.head_bytes + s * layout.body_bytes, lane);
  }
  return is_half_number(block + 208);
}

template <>
bool put_unit<Format::MXFP4>(const uint8_t* block, int n_groups, uint8_t* unit, int lane) {
  constexpr TileLayout layout = tile_layout(Format::MXFP4);
  bool is_finite = true;
  for (int g = 0; g < n_groups; ++g, block += 17) {
    unit[g * 16 + lane] = block[0];
    is_finite &= block[0] != kE8m0Nan;
    copy_nibbles(block + 1, unit + layout.head_bytes + g * layout.body_bytes, lane);
  }
  return is_finite;
}

template <>
bool put_unit<Format::NVFP4>(const uint8_t* block, int, uint8_t* unit, int lane) {
  write(unit + lane * 4, read<float>(block) * 0.5f);
  write(unit + 64 + lane * 4, read<float>(block + 4) * 0.5f);
  copy_nibbles(block + 8, unit + tile_layout(Format::NVFP4).head_bytes, lane);
  return is_number(read<float>(block)) && is_number(read<float>(block + 4));
}

PutUnit unit_writer(Format format) {
  switch (format) {
    case Format::Q4_0: return put_unit<Format::Q4_0>;
    case Format::Q4_1: return put_unit<Format::Q4_1>;
    case Format::Q5_0: return put_unit<Format::Q5_0>;
    case Format::Q5_1: return put_unit<Format::Q5_1>;
    case Format::Q8_0: return put_unit<Format::Q8_0>;
    case Format::Q4_K: return put_unit<Format::Q4_K>;
    case Format::Q5_K: return put_unit<Format::Q5_K>;
    case Format::Q6_K: return put_unit<Format::Q6_K>;
    case Format::MXFP4: return put_unit<Format::MXFP4>;
    case Format::NVFP4: return put_unit<Format::NVFP4>;
    default: return nullptr;
  }
}

// --- dequantisation, for expand_to_f32 ----------------------------------------------------------------------------------------------

void dequantize_simple(Format format, const uint8_t* block, float* out) {
  const float d = read_half(block);
  if (format == Format::Q8_0) {
    for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(static_cast<int8_t>(block[2 + i]));
    return;
  }
  const bool has_min = format == Format::Q4_1 || format == Format::Q5_1;
  const bool has_fifth = format == Format::Q5_0 || format == Format::Q5_1;
  const uint8_t* qs = block + (has_min ? 4 : 2) + (has_fifth ? 4 : 0);
  const uint32_t qh = has_fifth ? read<uint32_t>(qs - 4) : 0;
  const float m = has_min ? read_half(block + 2) : 0.0f;
  const int zero = has_fifth ? 16 : 8;
  for (int i = 0; i < 32; ++i) {
    const int nibble = i < 16 ? qs[i] & 15 : qs[i - 16] >> 4;
    const int q = nibble | static_cast<int>((qh >> i) & 1u) << 4;
    out[i] = has_min ? d * static_cast<float>(q) + m : d * static_cast<float>(q - zero);
  }
}

void dequantize_k(bool has_fifth, const uint8_t* block, float* out) {
  const float d = read_half(block), dmin = read_half(block + 2);
  const uint8_t* qs = block + (has_fifth ? 48 : 16);
  for (int s = 0; s < 8; ++s) {
    const KScale scale = k_scale(block + 4, s);
    const float ds = d * static_cast<float>(scale.scale), m = dmin * static_cast<float>(scale.minimum);
    for (int i = 0; i < 32; ++i) {
      int q = (qs[(s / 2) * 32 + i] >> (s % 2 * 4)) & 15;
      if (has_fifth) q |= ((block[16 + i] >> s) & 1) << 4;
      out[s * 32 + i] = ds * static_cast<float>(q) - m;
    }
  }
}

void dequantize_q6(const uint8_t* block, float* out) {
  const float d = read_half(block + 208);
  for (int s = 0; s < 8; ++s)
    for (int i = 0; i < 32; ++i) {
      const int low = (block[(s / 4) * 64 + (s % 2) * 32 + i] >> ((s % 4) / 2 * 4)) & 15;
      const int high = (block[128 + (s / 4) * 32 + i] >> ((s % 4) * 2)) & 3;
      const float ds = d * static_cast<float>(static_cast<int8_t>(block[192 + 2 * s + i / 16]));
      out[s * 32 + i] = ds * static_cast<float>((low | high << 4) - 32);
    }
}

// Twice the value of an E2M1 code: sign, two bits of exponent, one of fraction.
constexpr int8_t kE2m1Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// scale: half of the group's, of weights 0..15 and 16..31.
void dequantize_e2m1(const uint8_t* qs, const float scale[2], float* out) {
  for (int i = 0; i < 16; ++i) {
    out[i] = scale[0] * static_cast<float>(kE2m1Doubled[qs[i] & 15]);
    out[i + 16] = scale[1] * static_cast<float>(kE2m1Doubled[qs[i] >> 4]);
  }
}

// 2^(exponent - 128); subnormal for 0 and 1, NaN for 255.
float half_e8m0(uint8_t exponent) {
  if (exponent == kE8m0Nan) return __builtin_nanf("");
  const uint32_t u = exponent < 2 ? 0x00200000u << exponent : (exponent - 1u) << 23;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

void dequantize_block(Format format, const uint8_t* block, float* out) {
  switch (format) {
    case Format::F32: std::memcpy(out, block, 4); break;
    case Format::F16: *out = read_half(block); break;
    case Format::BF16: {
      const uint32_t u = static_cast<uint32_t>(read<uint16_t>(block)) << 16;
      std::memcpy(out, &u, 4);
      break;
    }
    case Format::Q4_K: dequantize_k(false, block, out); break;
    case Format::Q5_K: dequantize_k(true, block, out); break;
    case Format::Q6_K: dequantize_q6(block, out); break;
    case Format::MXFP4: {
      const float half = half_e8m0(block[0]), scale[2] = {half, half};
      dequantize_e2m1(block + 1, scale, out);
      break;
    }
    case Format::NVFP4: {
      const float scale[2] = {read<float>(block) * 0.5f, read<float>(block + 4) * 0.5f};
      dequantize_e2m1(block + 8, scale, out);
      break;
    }
    default: dequantize_simple(format, block, out);
  }
}

// --- one tile; each function returns whether all its numbers are finite
// -------------------------------------------------------------------------------------------------------------------------

// The file rows of one tile; null past the matrix's end.
struct TileRows {
  const uint8_t* row[kTileRows];
  bool is_full;
};

bool pack_expanded(Format format, const TileRows& rows, int64_t k, uint8_t* tile) {
  const BlockSize size = block_size(format);
  float values[256];
  bool is_finite = true;
  for (int lane = 0; lane < kTileRows; ++lane) {
    if (!rows.row[lane]) continue;
    for (int64_t b = 0; b < k / size.weights; ++b) {
      dequantize_block(format, rows.row[lane] + b * size.bytes, values);
      for (int64_t i = 0; i < size.weights; ++i) {
        is_finite &= is_number(values[i]);
        write(tile + ((b * size.weights + i) * kTileRows + lane) * 4, values[i]);
      }
    }
  }
  return is_finite;
}

// Elements are copied as unsigned T, which hold one number each, or two of half the size. Their magnitudes' largest is an infinity's, or a
// NaN's, exactly when one of them is no number.
template <class T, bool HoldsTwo = false>
bool pack_float(const TileRows& rows, int64_t k, uint8_t* tile) {
  constexpr int64_t size = sizeof(T);
  constexpr T infinity = size == 2 ? 0x7c00u : 0x7f800000u, low_infinity = 0x7f80u;
  T largest = 0, largest_low = 0;
  // 32 columns at a time, so that the lines being written stay in cache while the 16 rows pass.
  for (int64_t k0 = 0; k0 < k; k0 += 32)
    for (int lane = 0; lane < kTileRows; ++lane) {
      if (!rows.row[lane]) continue;
      const int64_t end = k0 + 32 < k ? k0 + 32 : k;
      for (int64_t i = k0; i < end; ++i) {
        const T v = read<T>(rows.row[lane] + i * size);
        const T magnitude = v & static_cast<T>(~(T{1} << (size * 8 - 1)));
        largest = magnitude > largest ? magnitude : largest;
        if constexpr (HoldsTwo) {
          const T low = v & 0x7fffu;
          largest_low = low > largest_low ? low : largest_low;
        }
        write(tile + (i * kTileRows + lane) * size, v);
      }
    }
  return largest < infinity && largest_low < low_infinity;
}

// Two columns of K are one dword; a last odd one has a zero beside it.
bool pack_bf16(const TileRows& rows, int64_t k, uint8_t* tile) {
  bool is_finite = pack_float<uint32_t, true>(rows, k / 2, tile);
  if (k % 2 == 0) return is_finite;
  for (int lane = 0; lane < kTileRows; ++lane) {
    if (!rows.row[lane]) continue;
    const uint32_t last = read<uint16_t>(rows.row[lane] + (k - 1) * 2);
    is_finite &= (last & 0x7f80u) != 0x7f80u;
    write(tile + (k / 2 * kTileRows + lane) * 4, last);
  }
  return is_finite;
}

bool pack_quantized(Format format, const TileRows& rows, int64_t k, uint8_t* tile) {
  const TileLayout layout = tile_layout(format);
  const PutUnit put = unit_writer(format);
  const BlockSize size = block_size(format);
  const int64_t n_groups = k / kGroup;
  bool is_finite = true;
  for (int64_t g = 0; g < n_groups; g += layout.groups) {
    const int here = static_cast<int>(n_groups - g < layout.groups ? n_groups - g : layout.groups);
    const int64_t at = g * kGroup / size.weights * size.bytes;
    for (int lane = 0; lane < kTileRows; ++lane)
      if (rows.row[lane]) is_finite &= put(rows.row[lane] + at, here, tile, lane);
    tile += unit_bytes(layout);
  }
  return is_finite;
}

} // namespace

int64_t quant_row_bytes(int64_t k) {
  // An odd number of lines, so that consecutive rows do not fall into the same few sets of the L1 cache.
  return (k / kGroup | 1) * static_cast<int64_t>(sizeof(ActGroup));
}

void read_quant_row(const uint8_t* row, int64_t k, int8_t* q, float* scale) {
  const ActGroup* groups = reinterpret_cast<const ActGroup*>(row);
  for (int64_t g = 0; g < k / kGroup; ++g) {
    std::memcpy(q + g * kGroup, groups[g].q, kGroup);
    scale[g] = groups[g].scale;
  }
}

int64_t packed_bytes(Format format, int64_t n, int64_t k) {
  const BlockSize size = block_size(format);
  if (n <= 0 || k <= 0 || size.weights == 0 || k % size.weights != 0) return 0;
  return (n + kTileRows - 1) / kTileRows * tile_bytes_of(format, k);
}

int64_t file_row_bytes(Format format, int64_t k) {
  const BlockSize size = block_size(format);
  return size.weights == 0 || k % size.weights != 0 ? 0 : k / size.weights * size.bytes;
}

bool pack_matrix(Format format, bool expand_to_f32, const uint8_t* rows, int64_t row_bytes, const int32_t* row_order, int64_t n, int64_t k,
                 uint8_t* out, int64_t tile_begin, int64_t tile_end) {
  const Format packed = expand_to_f32 ? Format::F32 : format;
  const int64_t tile_bytes = tile_bytes_of(packed, k);
  const TileLayout layout = tile_layout(packed);
  const bool is_padded = layout.groups > 1 && k / kGroup % layout.groups != 0;
  bool is_finite = true;
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    TileRows source = {{}, (tile + 1) * kTileRows <= n};
    for (int64_t lane = 0; lane < kTileRows; ++lane) {
      const int64_t i = tile * kTileRows + lane;
      source.row[lane] = i < n ? rows + (row_order ? row_order[i] : i) * row_bytes : nullptr;
    }
    uint8_t* to = out + tile * tile_bytes;
    if (!source.is_full || is_padded) std::memset(to, 0, static_cast<size_t>(tile_bytes));
    if (expand_to_f32 && format != Format::F32)
      is_finite &= pack_expanded(format, source, k, to);
    else if (packed == Format::F32)
      is_finite &= pack_float<uint32_t>(source, k, to);
    else if (packed == Format::F16)
      is_finite &= pack_float<uint16_t>(source, k, to);
    else if (packed == Format::BF16)
      is_finite &= pack_bf16(source, k, to);
    else
      is_finite &= pack_quantized(format, source, k, to);
  }
  return is_finite;
}

int64_t linear_thread_bytes(int64_t max_k, int64_t max_m) {
  (void)max_m; // the kernels block over rows
  return (max_k + kGroup - 1) / kGroup * kPanelTiles * kPanelGroupBytes + 4096;
}

} // namespace tiercel
