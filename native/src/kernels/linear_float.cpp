// Products of f32 activations with F32, F16 and BF16 weights.
//
// Contract, for every output y[m, n], at every level, for any M, number of threads and choice of kernel below:
//
//   acc = 0
//   for k ascending:  acc = fma(x[m, k], w[n, k], acc)        w converted to f32, which is exact
//   y = (acc + bias) + residual
//
// Two kernels:
//   stream  up to kStreamRows rows x kStreamCols tiles, converting as it goes.
//   panel   for more rows: blocks of 96 rows x 512 columns of K x 4 tiles. A block of weights is converted into the thread's scratch once;
//           accumulators rest in scratch between blocks of K, which leaves the chain as it is.
#include "../layout.hpp"
#include "linear.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kStreamRows = 8;
constexpr int kPanelBlockRows = 6;
constexpr int kPanelCols = 4;  // tiles
constexpr int kStreamCols = 2; // one chain of fmas is slower than memory
#elif defined(__AVX2__)
constexpr int kStreamRows = 3; // 16 registers
constexpr int kPanelBlockRows = 6;
constexpr int kPanelCols = 1;
constexpr int kStreamCols = 2;
#else
// One row and tile at a time: bigger shapes only take long to compile.
constexpr int kStreamRows = 1;
constexpr int kPanelBlockRows = 1;
constexpr int kPanelCols = 1;
constexpr int kStreamCols = 1;
#endif
constexpr int64_t kPanelRows = kStreamRows + 1;
static_assert(kPanelCols * 16 <= kFloatBlockCols && kFloatBlockRows % kPanelBlockRows == 0);

template <Format F>
struct Element {
  static constexpr int64_t kBytes = F == Format::F32 ? 4 : 2;
  static TIERCEL_INLINE F16v load16(const uint8_t* p) {
    if constexpr (F == Format::F32)
      return load(reinterpret_cast<const float*>(p));
    else if constexpr (F == Format::F16)
      return load_f16(reinterpret_cast<const uint16_t*>(p));
    else
      return load_bf16(reinterpret_cast<const uint16_t*>(p));
  }
};

// One column of K: acc[r][v] = fma(x[r][k], w[v][k], acc[r][v]).
template <Format F, int R, int V>
TIERCEL_INLINE void step(F16v (&acc)[R][V], const uint8_t* w, int64_t tile_stride, const float* x, int64_t ldx) {
  F16v column[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) column[v] = Element<F>::load16(w + v * tile_stride);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const F16v a = set1(x[r * ldx]);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = fma(a, column[v], acc[r][v]);
  }
}

// Continues the chains in acc [R][V] over k columns of K.
template <Format F, int R, int V, bool Prefetch>
__attribute__((noinline)) void run_chains(const uint8_t* w, int64_t tile_stride, const float* x, int64_t ldx, int64_t k, F16v* io) {
  constexpr int64_t row = 16 * Element<F>::kBytes;
  constexpr int64_t ahead = 2048;
  F16v acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = io[r * V + v];
  int64_t i = 0;
  for (; i + 4 <= k; i += 4, w += 4 * row, x += 4) {
    if constexpr (Prefetch)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v)
#pragma GCC unroll 4
        for (int64_t b = 0; b < 4 * row; b += 64) __builtin_prefetch(w + v * tile_stride + ahead + b, 0, 3);
    step<F, R, V>(acc, w, tile_stride, x, ldx);
    step<F, R, V>(acc, w + row, tile_stride, x + 1, ldx);
    step<F, R, V>(acc, w + 2 * row, tile_stride, x + 2, ldx);
    step<F, R, V>(acc, w + 3 * row, tile_stride, x + 3, ldx);
  }
  for (; i < k; ++i, w += row, ++x) step<F, R, V>(acc, w, tile_stride, x, ldx);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) io[r * V + v] = acc[r][v];
}

using Chains = void (*)(const uint8_t*, int64_t, const float*, int64_t, int64_t, F16v*);

// Rows is the largest r that may be asked for.
template <Format F, int V, bool Prefetch, int Rows>
Chains chains_kernel(int64_t r) {
  if constexpr (Rows >= 3) {
    if (r == 2) return run_chains<F, 2, V, Prefetch>;
    if (r == 3) return run_chains<F, 3, V, Prefetch>;
  }
  if constexpr (Rows >= 6) {
    if (r == 4) return run_chains<F, 4, V, Prefetch>;
    if (r == 5) return run_chains<F, 5, V, Prefetch>;
    if (r == 6) return run_chains<F, 6, V, Prefetch>;
  }
  if constexpr (Rows >= 8) {
    if (r == 7) return run_chains<F, 7, V, Prefetch>;
    if (r == 8) return run_chains<F, 8, V, Prefetch>;
  }
  return run_chains<F, 1, V, Prefetch>;
}

template <Format F>
void stream(const LinearArgs& args, const LinearShare& share) {
  const PackedMatrix& w = *share.part->w;
  const int64_t m = share.row_end - share.row_begin;
  F16v acc[kStreamRows * kStreamCols];
  const float* x = args.x + share.row_begin * args.ldx;
  for (int64_t tile = share.tile_begin; tile < share.tile_end;) {
    const int64_t cols = share.tile_end - tile >= kStreamCols ? kStreamCols : 1;
    for (F16v& a : acc) a = zero();
    const Chains chains =
        cols == kStreamCols ? chains_kernel<F, kStreamCols, true, kStreamRows>(m) : chains_kernel<F, 1, true, kStreamRows>(m);
    chains(w.data + tile * w.tile_bytes, w.tile_bytes, x, args.ldx, w.k, acc);
    for (int64_t r = 0; r < m; ++r)
      for (int64_t v = 0; v < cols; ++v) emit(args, *share.part, share.row_begin + r, tile + v, acc[r * cols + v]);
    tile += cols;
  }
}

// A block of one tile as f32.
template <Format F>
void convert(const uint8_t* from, int64_t k, float* to) {
  for (int64_t i = 0; i < k; ++i) store(to + i * 16, Element<F>::load16(from + i * 16 * Element<F>::kBytes));
}

// Cols tiles x one block of rows, over all of K.
template <Format F, int Cols>
void panel_rows(const LinearArgs& args, const LinearShare& share, int64_t tile, int64_t row_begin, int64_t row_end, uint8_t* scratch) {
  const PackedMatrix& w = *share.part->w;
  float* block = reinterpret_cast<float*>(scratch);
  F16v* acc = reinterpret_cast<F16v*>(scratch + kFloatBlockK * kFloatBlockCols * 4);
  for (int64_t i = 0; i < (row_end - row_begin) * Cols; ++i) acc[i] = zero();
  for (int64_t k0 = 0; k0 < w.k; k0 += kFloatBlockK) {
    const int64_t k = w.k - k0 < kFloatBlockK ? w.k - k0 : kFloatBlockK;
    const uint8_t* weights = w.data + tile * w.tile_bytes + k0 * 16 * Element<F>::kBytes;
    int64_t stride = w.tile_bytes;
    if constexpr (F != Format::F32) {
      for (int64_t v = 0; v < Cols; ++v) convert<F>(weights + v * stride, k, block + v * kFloatBlockK * 16);
      weights = scratch;
      stride = kFloatBlockK * 16 * 4;
    }
    for (int64_t row = row_begin; row < row_end;) {
      const int64_t rows = row_end - row < kPanelBlockRows ? row_end - row : kPanelBlockRows;
      chains_kernel<Format::F32, Cols, false, kPanelBlockRows>(rows)(weights, stride, args.x + row * args.ldx + k0, args.ldx, k,
                                                                     acc + (row - row_begin) * Cols);
      row += rows;
    }
  }
  for (int64_t row = row_begin; row < row_end; ++row)
    for (int64_t v = 0; v < Cols; ++v) emit(args, *share.part, row, tile + v, acc[(row - row_begin) * Cols + v]);
}

template <Format F>
void panel(const LinearArgs& args, const LinearShare& share, uint8_t* scratch) {
  for (int64_t tile = share.tile_begin; tile < share.tile_end;) {
    const int64_t cols = share.tile_end - tile >= kPanelCols ? kPanelCols : 1;
    for (int64_t row = share.row_begin; row < share.row_end; row += kFloatBlockRows) {
      const int64_t end = share.row_end - row < kFloatBlockRows ? share.row_end : row + kFloatBlockRows;
      if (cols == kPanelCols)
        panel_rows<F, kPanelCols>(args, share, tile, row, end, scratch);
      else
        panel_rows<F, 1>(args, share, tile, row, end, scratch);
    }
    tile += cols;
  }
}

template <Format F>
void run(const LinearArgs& args, const LinearShare& share, const ThreadCtx& ctx) {
  if (share.row_end - share.row_begin >= kPanelRows)
    panel<F>(args, share, ctx.scratch);
  else
    stream<F>(args, share);
}

} // namespace

int64_t float_panel_rows() { return kPanelRows; }
int64_t float_panel_tiles() { return kPanelCols; }

void linear_float(const LinearArgs& args, const LinearShare& share, const ThreadCtx& ctx) {
  switch (share.part->w->format) {
    case Format::F32: return run<Format::F32>(args, share, ctx);
    case Format::F16: return run<Format::F16>(args, share, ctx);
    case Format::BF16: return run<Format::BF16>(args, share, ctx);
    default: return; // quantised formats never arrive here
  }
}

} // namespace tiercel::TIERCEL_LEVEL
