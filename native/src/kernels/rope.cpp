// Rotary tables, and the step's keys and values on their way into the page pool.
//
// Orders that are contract:
//   table     angle = float(pos) * inv_freq, rounded to f32; cos and sin of that by the C library in double, times
//   magnitude, to f32. norms     as rows.hpp, over one head's D columns. rotation  x1' = fma(x1, cos, -(x2 * sin)); x2'
//   = fma(x2, cos, x1 * sin).
// F16 pages hold round-to-nearest-even halves. I8 pages: scale = max|x| / 127 rounded to half, byte = rint(x / scale) within
// +-127, of 64 columns of one token's key, or of its whole value, in one head; 0 where the scale is 0. The k columns of qkv are worked
// on in place; after the call they hold the normed and rotated keys.
#include "attention_layout.hpp"
#include "rows.hpp"
#include "table.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

TIERCEL_INLINE void rotate(float* x, const float* cos_sin, int64_t d2) {
  for (int64_t i = 0; i < d2; i += 16) {
    const int n = lanes_left(i, d2);
    const F16v x1 = load_n(x + i, n), x2 = load_n(x + d2 + i, n);
    const F16v c = load_n(cos_sin + i, n), s = load_n(cos_sin + d2 + i, n);
    store_n(x + i, fma(x1, c, neg(mul(x2, s))), n);
    store_n(x + d2 + i, fma(x2, c, mul(x1, s)), n);
  }
}

// Where one token lives: its run's K^T and its lane there.
struct TokenSlot {
  uint8_t* run;
  int lane;
};

TIERCEL_INLINE TokenSlot token_slot(const RopeKvArgs& a, const StepView& view, int64_t t) {
  const int64_t pos = view.row_pos[t], in_page = pos % a.kv.page_tokens;
  const int32_t* pages = view.page_table + view.seq_slot[view.row_seq[t]] * view.page_table_stride;
  return {a.kv.base + pages[pos / a.kv.page_tokens] * a.kv.page_stride_bytes + in_page / 16 * run_bytes(a.kv.type, a.head_dim),
          static_cast<int>(in_page % 16)};
}

void write_f16(uint16_t* run, int lane, const float* k, const float* v, int64_t head_dim) {
  uint16_t* row = run + 16 * head_dim + lane * head_dim;
  for (int64_t d = 0; d < head_dim; d += 16) {
    const int n = lanes_left(d, head_dim);
    uint16_t column[16];
    store_f16(column, load_n(k + d, n));
    for (int i = 0; i < n; ++i) run[(d + i) * 16 + lane] = column[i];
    if (n == 16) {
      store_f16(row + d, load(v + d));
    } else {
      store_f16(column, load_n(v + d, n));
      std::memcpy(row + d, column, static_cast<size_t>(n) * 2);
    }
  }
}

void write_f32(float* run, int lane, const float* k, const float* v, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; ++d) run[d * 16 + lane] = k[d];
  std::memcpy(run + 16 * head_dim + lane * head_dim, v, static_cast<size_t>(head_dim) * 4);
}

constexpr uint16_t kNanHalf = 0x7e00;

// The half that times a byte gives x [n] again; NaN if x is not finite or too large.
uint16_t scale_of(const float* x, int64_t n) {
  F16v top = zero(), poison = zero();
  for (int64_t d = 0; d < n; d += 16) {
    const F16v part = load_n(x + d, lanes_left(d, n));
    top = max(abs(part), top);
    poison = fma(part, zero(), poison);
  }
  uint16_t halves[16];
  store_f16(halves, set1(reduce_max(top) / 127.0f));
  const bool is_finite = reduce_add(poison) == 0.0f && halves[0] < 0x7c00;
  return is_finite ? halves[0] : kNanHalf;
}

TIERCEL_INLINE void round_to_bytes(const float* x, int n, uint16_t scale_half, int8_t* to) {
  const bool is_zero = scale_half == 0 || scale_half == kNanHalf;
  const uint16_t halves[16] = {scale_half};
  float scales[16], rounded[16];
  store(scales, load_f16(halves));
  const F16v scale = set1(scales[0]);
  store(rounded, is_zero ? zero() : round_even(min(max(div(load_n(x, n), scale), set1(-127.0f)), set1(127.0f))));
  for (int i = 0; i < n; ++i) to[i] = static_cast<int8_t>(rounded[i]);
}

void write_i8(uint8_t* run, int lane, const float* k, const float* v, int64_t head_dim) {
  uint16_t* scales = reinterpret_cast<uint16_t*>(run + 32 * head_dim) + lane;
  const int64_t n_blocks = key_blocks(head_dim);
  uint16_t* value_scale = scales + 16 * n_blocks;
  *value_scale = scale_of(v, head_dim);
  bool is_finite = *value_scale != kNanHalf;
  for (int64_t b = 0; b < n_blocks; ++b) {
    const int64_t d = b * kKeyBlock, n = head_dim - d < kKeyBlock ? head_dim - d : kKeyBlock;
    scales[16 * b] = scale_of(k + d, n);
    is_finite = is_finite && scales[16 * b] != kNanHalf;
  }
  if (!is_finite)
    for (int64_t b = 0; b <= n_blocks; ++b) scales[16 * b] = kNanHalf;
  uint8_t* to_k = run + 2 * lane;
  uint8_t* to_v = run + 16 * head_dim + lane / 2 * 2 * head_dim + lane % 2;
  for (int64_t d = 0; d < head_dim; d += 16) {
    const int n = lanes_left(d, head_dim);
    int8_t bytes[16];
    round_to_bytes(k + d, n, scales[16 * (d / kKeyBlock)], bytes);
    for (int i = 0; i < n; i += 2) std::memcpy(to_k + (d + i) * 16, bytes + i, 2);
    round_to_bytes(v + d, n, *value_scale, bytes);
    for (int i = 0; i < n; ++i) to_v[2 * (d + i)] = static_cast<uint8_t>(bytes[i]);
  }
}

} // namespace

void rope_table(const RopeTableArgs& a, const StepView& view, const ThreadCtx& ctx) {
  const Range rows = share(view.n_tokens, ctx);
  for (int64_t t = rows.begin; t < rows.end; ++t) {
    float* cosines = a.cos_sin + t * a.ld;
    const float pos = static_cast<float>(view.row_pos[t]);
    for (int64_t j = 0; j < a.d2; ++j) {
      const float angle = pos * a.inv_freq[j];
      cosines[j] = static_cast<float>(__builtin_cos(static_cast<double>(angle)) * static_cast<double>(a.magnitude));
      cosines[a.d2 + j] = static_cast<float>(__builtin_sin(static_cast<double>(angle)) * static_cast<double>(a.magnitude));
    }
  }
}

void rope_kv(const RopeKvArgs& a, const StepView& view, const ThreadCtx& ctx) {
  const int64_t D = a.head_dim;
  const Range rows = share(view.n_tokens, ctx);
  for (int64_t t = rows.begin; t < rows.end; ++t) {
    float* row = a.qkv + t * a.ld;
    const float* cos_sin = a.cos_sin != nullptr ? a.cos_sin + t * a.ld_cos_sin : nullptr;
    for (int64_t h = 0; h < a.n_heads + a.n_kv_heads; ++h) {
      float* x = row + h * D;
      const float* w = h < a.n_heads ? a.q_norm : a.k_norm;
      if (w != nullptr) norm_row(x, D, w, a.eps, nullptr, x);
      if (cos_sin != nullptr) rotate(x, cos_sin, a.d2);
    }
    const TokenSlot slot = token_slot(a, view, t);
    for (int64_t h = 0; h < a.n_kv_heads; ++h) {
      const float* k = row + (a.n_heads + h) * D;
      const float* v = k + a.n_kv_heads * D;
      uint8_t* run = slot.run + h * a.kv.head_stride_bytes;
      switch (a.kv.type) {
        case KvType::F16: write_f16(reinterpret_cast<uint16_t*>(run), slot.lane, k, v, D); break;
        case KvType::F32: write_f32(reinterpret_cast<float*>(run), slot.lane, k, v, D); break;
        case KvType::I8: write_i8(run, slot.lane, k, v, D); break;
      }
    }
  }
}

} // namespace tiercel::TIERCEL_LEVEL
