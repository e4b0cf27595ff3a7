// Rows of a packed matrix as f32: the embedding look-up. Values are GGUF's dequantisation bit for bit, times args.scale (one rounding;
// no multiplication when it is 1).
#include "formats.hpp"
#include "table.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

TIERCEL_INLINE uint32_t lane_dword(const uint8_t* vector, int64_t lane) {
  uint32_t v;
  std::memcpy(&v, vector + lane * 4, 4);
  return v;
}

// The 32 stored weights of one output row in a body.
template <Format F>
TIERCEL_INLINE void gather_weights(const uint8_t* body, int64_t lane, uint8_t* q) {
  if constexpr (F == Format::Q8_0) {
    for (int j = 0; j < 8; ++j) std::memcpy(q + 4 * j, body + j * 64 + lane * 4, 4);
    return;
  }
  uint32_t quads[8];
  for (int j = 0; j < 4; ++j) {
    const uint32_t both = lane_dword(body + j * 64, lane);
    quads[j] = both & 0x0f0f0f0fu;
    quads[j + 4] = (both >> 4) & 0x0f0f0f0fu;
  }
  if constexpr (has_fifth_bit(F)) {
    const uint32_t high = lane_dword(body + 256, lane);
    for (int j = 0; j < 8; ++j) quads[j] |= ((high >> j) & 0x01010101u) << 4;
  }
  if constexpr (F == Format::Q6_K)
    for (int j = 0; j < 8; ++j) quads[j] |= ((lane_dword(body + 256 + j / 4 * 64, lane) >> (j % 4 * 2)) & 0x03030303u) << 4;
  std::memcpy(q, quads, 32);
  if constexpr (is_e2m1(F))
    for (int i = 0; i < 32; ++i) q[i] = (F == Format::MXFP4 ? kE2m1Plus16 : kE2m1Plus32)[q[i]];
}

constexpr float zero_point(Format f) {
  switch (f) {
    case Format::Q4_0: return 8.0f;
    case Format::Q5_0:
    case Format::MXFP4: return 16.0f;
    case Format::Q6_K:
    case Format::NVFP4: return 32.0f;
    default: return 128.0f;
  }
}

TIERCEL_INLINE float pick(F16v v, int64_t lane) {
  float all[16];
  store(all, v);
  return all[lane];
}

TIERCEL_INLINE F16v scaled(F16v v, float scale) { return scale == 1.0f ? v : mul(v, set1(scale)); }

template <Format F>
void quantized_row(const PackedMatrix& w, int64_t row, float scale, float* y) {
  const int64_t lane = row % 16;
  Weights<F> from(w.data + row / 16 * w.tile_bytes);
  uint8_t q[32];
  for (int64_t g = 0; g < w.k / kGroup; ++g, from.next()) {
    gather_weights<F>(from.body, lane, q);
    const float d = pick(from.scale(), lane);
    for (int half = 0; half < 2; ++half) {
      F16v v = to_float(load_u8(q + half * 16));
      if constexpr (kind_of(F) == Kind::Min) {
        v = add(mul(set1(d), v), set1(pick(from.minimum(), lane)));
      } else {
        float ds = d;
        if constexpr (kind_of(F) == Kind::Pair) ds = pick(from.scale_of(half), lane);
        if constexpr (F == Format::Q6_K) ds = d * pick(to_float(from.sub_scale(half)), lane);
        v = mul(set1(ds), sub(v, set1(zero_point(F))));
      }
      store(y + g * kGroup + half * 16, scaled(v, scale));
    }
  }
}

// Weight k of output row `lane` in a tile of F32, F16 or BF16.
template <Format F>
TIERCEL_INLINE const uint8_t* float_at(const uint8_t* tile, int64_t k, int64_t lane) {
  if constexpr (F == Format::BF16) return tile + (k / 2 * 16 + lane) * 4 + k % 2 * 2;
  return tile + (k * 16 + lane) * (F == Format::F32 ? 4 : 2);
}

template <Format F>
void float_row(const PackedMatrix& w, int64_t row, float scale, float* y) {
  const uint8_t* tile = w.data + row / 16 * w.tile_bytes;
  const int64_t lane = row % 16;
  for (int64_t k0 = 0; k0 < w.k; k0 += 16) {
    const int n = static_cast<int>(w.k - k0 < 16 ? w.k - k0 : 16);
    F16v v;
    if constexpr (F == Format::F16) {
      uint16_t halves[16] = {};
      for (int i = 0; i < n; ++i) std::memcpy(&halves[i], float_at<F>(tile, k0 + i, lane), 2);
      v = load_f16(halves);
    } else {
      constexpr size_t size = F == Format::F32 ? 4 : 2;
      uint8_t floats[64] = {}; // a bf16 is the upper half of a float
      for (int i = 0; i < n; ++i) std::memcpy(floats + 4 * i + 4 - size, float_at<F>(tile, k0 + i, lane), size);
      float all[16];
      std::memcpy(all, floats, 64);
      v = load(all);
    }
    store_n(y + k0, scaled(v, scale), n);
  }
}

void embed_row(const PackedMatrix& w, int64_t row, float scale, float* y) {
  switch (w.format) {
    case Format::F32: return float_row<Format::F32>(w, row, scale, y);
    case Format::F16: return float_row<Format::F16>(w, row, scale, y);
    case Format::BF16: return float_row<Format::BF16>(w, row, scale, y);
    case Format::Q4_0: return quantized_row<Format::Q4_0>(w, row, scale, y);
    case Format::Q4_1: return quantized_row<Format::Q4_1>(w, row, scale, y);
    case Format::Q5_0: return quantized_row<Format::Q5_0>(w, row, scale, y);
    case Format::Q5_1: return quantized_row<Format::Q5_1>(w, row, scale, y);
    case Format::Q8_0: return quantized_row<Format::Q8_0>(w, row, scale, y);
    case Format::Q4_K: return quantized_row<Format::Q4_K>(w, row, scale, y);
    case Format::Q5_K: return quantized_row<Format::Q5_K>(w, row, scale, y);
    case Format::Q6_K: return quantized_row<Format::Q6_K>(w, row, scale, y);
    case Format::MXFP4: return quantized_row<Format::MXFP4>(w, row, scale, y);
    case Format::NVFP4: return quantized_row<Format::NVFP4>(w, row, scale, y);
  }
}

void masked_row(const float* row, int64_t k, float scale, float* y) {
  for (int64_t j = 0; j < k; j += 16) {
    const int n = static_cast<int>(k - j < 16 ? k - j : 16);
    store_n(y + j, scaled(load_n(row + j, n), scale), n);
  }
}

} // namespace

void embed(const EmbedArgs& args, const ThreadCtx& ctx) {
  const int64_t begin = args.m * ctx.thread / ctx.n_threads, end = args.m * (ctx.thread + 1) / ctx.n_threads;
  for (int64_t i = begin; i < end; ++i) {
    float* y = args.y + i * args.ldy;
    if (args.zero_at != nullptr && args.zero_at[i] == 0)
      for (int64_t j = 0; j < args.w->k; ++j) y[j] = 0.0f;
    else if (args.masked != nullptr && args.ids[i] < 0)
      masked_row(args.masked, args.w->k, args.scale, y);
    else
      embed_row(*args.w, args.ids[i] + args.first, args.scale, y);
  }
}

} // namespace tiercel::TIERCEL_LEVEL
