// Latent attention's own kernels, around the attention over latent rows (attention.cpp): what a token leaves in the pages, the
// per-head products that carry queries into latent space and values out of it, the queries' rotation, and the output gate.
//
// Orders that are contract:
//   latent_kv     norm as rows.hpp; rotation x1' = fma(x1, cos, -(x2 * sin)), x2' = fma(x2, cos, x1 * sin); F16 rounds to nearest even.
//   head_linear   each output is one fma chain over k, ascending from zero.
//   sigmoid_gate  x * (1 / (1 + exp(-gate))).
//
// REQUIRES: ctx.scratch of latent_kv holds `rope` floats.
#include "attention_layout.hpp"
#include "rows.hpp"
#include "table.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

// y [n] = x [n] rotated; y is not x. Interleaved pairs are written as halves: the same order in keys and queries, so no score changes.
void rotate_to(const float* x, int64_t n, const float* cos_sin, bool is_interleaved, float* y) {
  const int64_t d2 = n / 2;
  for (int64_t i = 0; i < d2; i += 16) {
    const int count = lanes_left(i, d2);
    F16v x1, x2;
    if (is_interleaved) {
      float even[16] = {}, odd[16] = {};
      for (int j = 0; j < count; ++j) {
        even[j] = x[2 * (i + j)];
        odd[j] = x[2 * (i + j) + 1];
      }
      x1 = load(even);
      x2 = load(odd);
    } else {
      x1 = load_n(x + i, count);
      x2 = load_n(x + d2 + i, count);
    }
    const F16v c = load_n(cos_sin + i, count), s = load_n(cos_sin + d2 + i, count);
    store_n(y + i, fma(x1, c, neg(mul(x2, s))), count);
    store_n(y + d2 + i, fma(x2, c, mul(x1, s)), count);
  }
}

void write_row(const float* x, int64_t n, KvType type, uint8_t* to) {
  if (type == KvType::F32) {
    std::memcpy(to, x, static_cast<size_t>(n) * 4);
    return;
  }
  uint16_t* halves = reinterpret_cast<uint16_t*>(to);
  int64_t d = 0;
  for (; d + 16 <= n; d += 16) store_f16(halves + d, load(x + d));
  if (d == n) return;
  uint16_t last[16];
  store_f16(last, load_n(x + d, static_cast<int>(n - d)));
  std::memcpy(halves + d, last, static_cast<size_t>(n - d) * 2);
}

// A product's tile: kRows rows against kVectors vectors of one head's columns.
constexpr int kRows = 4;
#if defined(__AVX512F__)
constexpr int kVectors = 4;
#else
constexpr int kVectors = 1;
#endif
// Rows of weights fetched ahead: a block's columns lie apart, where the processor's own prefetching does not follow them.
constexpr int64_t kRowsAhead = 16;

template <int MR, int NV>
TIERCEL_INLINE void product_tile(const HeadLinearArgs& a, int64_t row, int64_t head, int64_t vector) {
  const int64_t ld_w = (int64_t{a.n} + 15) / 16 * 16;
  const float* w = a.w + head * a.k * ld_w + 16 * vector;
  const float* x = a.x + row * a.ldx + head * a.x_head;
  F16v acc[MR][NV];
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) acc[r][v] = zero();
  for (int64_t k = 0; k < a.k; ++k, w += ld_w) {
    F16v b[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      b[v] = load(w + 16 * v);
      if constexpr (MR == 1) __builtin_prefetch(w + kRowsAhead * ld_w + 16 * v, 0, 3);
    }
#pragma GCC unroll 4
    for (int r = 0; r < MR; ++r) {
      const F16v s = set1(x[r * a.ldx + k]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = fma(s, b[v], acc[r][v]);
    }
  }
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) {
      const int64_t col = 16 * (vector + v);
      store_n(a.y + (row + r) * a.ldy + head * a.y_head + col, acc[r][v], lanes_left(col, a.n));
    }
}

template <int NV>
TIERCEL_INLINE void product_columns(const HeadLinearArgs& a, int64_t head, int64_t vector) {
  int64_t r = 0;
  for (; r + kRows <= a.m; r += kRows) product_tile<kRows, NV>(a, r, head, vector);
  for (; r < a.m; ++r) product_tile<1, NV>(a, r, head, vector);
}

} // namespace

void latent_kv(const LatentKvArgs& a, const StepView& view, const ThreadCtx& ctx) {
  const int64_t width = int64_t{a.rank} + a.rope;
  const Range rows = share(view.n_tokens, ctx);
  float* rotated = reinterpret_cast<float*>(ctx.scratch);
  for (int64_t t = rows.begin; t < rows.end; ++t) {
    float* row = a.latents + t * a.ld;
    norm_row(row, a.rank, a.norm, a.eps, nullptr, row);
    if (a.cos_sin != nullptr) {
      rotate_to(row + a.rank, a.rope, a.cos_sin + t * a.ld_cos_sin, a.is_interleaved, rotated);
      std::memcpy(row + a.rank, rotated, static_cast<size_t>(a.rope) * 4);
    }
    const int64_t pos = view.row_pos[t], in_page = pos % a.kv.page_tokens;
    const int32_t* pages = view.page_table + view.seq_slot[view.row_seq[t]] * view.page_table_stride;
    uint8_t* page = a.kv.base + pages[pos / a.kv.page_tokens] * a.kv.page_stride_bytes;
    write_row(row, width, a.kv.type, page + in_page * (latent_bytes(a.kv.type, width) / kRunTokens));
  }
}

void head_rotate(const HeadRotateArgs& a, const ThreadCtx& ctx) {
  const Range rows = share(a.m, ctx);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const int64_t table_row = a.table_rows != nullptr ? a.table_rows[r] : r;
    for (int64_t h = 0; h < a.n_heads; ++h) {
      const float* x = a.x + r * a.ldx + h * a.x_head + a.x_col;
      float* y = a.y + r * a.ldy + h * a.y_head + a.y_col;
      if (a.cos_sin != nullptr)
        rotate_to(x, a.n, a.cos_sin + table_row * a.ld_cos_sin, a.is_interleaved, y);
      else
        std::memcpy(y, x, static_cast<size_t>(a.n) * 4);
    }
  }
}

void head_linear(const HeadLinearArgs& a, const ThreadCtx& ctx) {
  const int64_t n_vectors = (int64_t{a.n} + 15) / 16, n_blocks = (n_vectors + kVectors - 1) / kVectors;
  const Range mine = share(a.n_heads * n_blocks, ctx);
  for (int64_t u = mine.begin; u < mine.end; ++u) {
    const int64_t head = u / n_blocks, first = u % n_blocks * kVectors;
    if (first + kVectors <= n_vectors) {
      product_columns<kVectors>(a, head, first);
    } else {
      for (int64_t v = first; v < n_vectors; ++v) product_columns<1>(a, head, v);
    }
  }
}

void sigmoid_gate(const SigmoidGateArgs& a, const ThreadCtx& ctx) {
  const Range rows = share(a.m, ctx);
  const int64_t share_width = a.width / a.gate_width;
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const float *x = a.x + r * a.ldx, *gate = a.gate + r * a.ld_gate;
    float* y = a.y + r * a.ldy;
    for (int64_t i = 0; i < a.gate_width; i += 16) {
      const int n = lanes_left(i, a.gate_width);
      const F16v factor = sigmoid(load_n(gate + i, n));
      if (share_width == 1) {
        store_n(y + i, mul(load_n(x + i, n), factor), n);
        continue;
      }
      float factors[16];
      store(factors, factor);
      for (int j = 0; j < n; ++j)
        for (int64_t d = 0; d < share_width; d += 16) {
          const int64_t at = (i + j) * share_width + d;
          const int count = lanes_left(d, share_width);
          store_n(y + at, mul(load_n(x + at, count), set1(factors[j])), count);
        }
    }
  }
}

} // namespace tiercel::TIERCEL_LEVEL
