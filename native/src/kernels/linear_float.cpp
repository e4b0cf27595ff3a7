// Products of f32 activations with F32, F16 and BF16 weights.
//
// Contract, for every output y[m, n], at every level, for any M, number of threads and choice of kernel below:
//
//   acc = 0
//   for k ascending:  acc = fma(x[m, k], w[n, k], acc)        w converted to f32, which is exact
//   y = (acc + bias) + residual
//
// One kernel: R rows x V tiles, all of K at a time, accumulators in registers. Rows of x are taken in blocks that stay in L2 while all
// tiles pass, and a block in nearly equal pieces of at most kRows. While the rows of a group of tiles are computed, the next group is
// fetched. Weights are converted as they are used, at any M: a shift or a mask for up to 24 fmas costs less than a scratch copy's traffic.
#include "../layout.hpp"
#include "linear.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kRows = 12; // 12 x 2 accumulators and 4 more of 32 registers
constexpr int kPairRows = 12;
constexpr int kQuadRows = 6; // 6 x 4 accumulators, 4 columns and a number of x
#elif defined(__AVX2__)
constexpr int kRows = 6; // 16 registers, two a vector
constexpr int kPairRows = 3;
constexpr int kQuadRows = 1;
#else
// One row and tile at a time: bigger shapes only take long to compile.
constexpr int kRows = 1;
constexpr int kPairRows = 0;
constexpr int kQuadRows = 0;
#endif
// Up to kPairRows rows take two tiles at a time, up to kQuadRows four: one chain of fmas a tile is slower than memory.
constexpr int tiles_of(int64_t rows) { return rows <= kQuadRows ? 4 : rows <= kPairRows ? 2 : 1; }

constexpr int64_t kBlockRows = 96; // 48 and 192 within 2 % at M = 512

// How far ahead of its use a weight is fetched, in bytes of its tile. Zen 4, two threads, weights from memory: 512 to 4096 tried; 16-bit
// weights gain 15 % by the longer way once three rows make a line last longer.
template <Format F, int R>
constexpr int64_t kNearBytes = F != Format::F32 && R >= 3 ? 2048 : 1024;

template <Format F>
struct Element {
  static constexpr int64_t kPairBytes = F == Format::F32 ? 128 : 64; // two columns of K
  static TIERCEL_INLINE F16v even(const uint8_t* p) {
    if constexpr (F == Format::F32)
      return load(reinterpret_cast<const float*>(p));
    else if constexpr (F == Format::F16)
      return load_f16(reinterpret_cast<const uint16_t*>(p));
    else
      return load_bf16_low(p);
  }
  static TIERCEL_INLINE F16v odd(const uint8_t* p) {
    if constexpr (F == Format::BF16)
      return load_bf16_high(p);
    else
      return even(p + kPairBytes / 2);
  }
};

// What to fetch, into L2, while a kernel runs. Near: its own weights, kNearBytes before they are used, and where they end those of the next
// tiles. Otherwise n_lines lines for every four columns of K, from `from` on.
struct Ahead {
  bool is_near;
  int64_t n_lines;
  const uint8_t* from;
};

// Where a kernel is: V tiles and R rows, a pointer for every three rows. `hide` makes the compiler address relative to these few instead
// of keeping an address in a register (or spilled) for each row, tile and column.
template <int R, int V>
struct Place {
  const uint8_t* w[V];
  const float* x[(R + 2) / 3];
  int64_t ldx;

  TIERCEL_INLINE void hide() {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) __asm__("" : "+r"(w[v]));
#pragma GCC unroll 4
    for (int q = 0; q < (R + 2) / 3; ++q) __asm__("" : "+r"(x[q]));
    __asm__("" : "+r"(ldx));
  }
  TIERCEL_INLINE void advance(int64_t w_bytes, int64_t x_columns) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) w[v] += w_bytes;
#pragma GCC unroll 4
    for (int q = 0; q < (R + 2) / 3; ++q) x[q] += x_columns;
  }
};

// Column `i` of K from the place on: acc[r][v] = fma(x[r][i], w[v][i], acc[r][v]).
template <Format F, int R, int V>
TIERCEL_INLINE void step(F16v (&acc)[R][V], const Place<R, V>& at, int i) {
  F16v column[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    const uint8_t* pair = at.w[v] + i / 2 * Element<F>::kPairBytes;
    column[v] = i % 2 ? Element<F>::odd(pair) : Element<F>::even(pair);
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    const F16v a = set1(at.x[r / 3][r % 3 * at.ldx + i]);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = fma(a, column[v], acc[r][v]);
  }
}

// out [R][V]: the finished chains of R rows and V tiles.
template <Format F, int R, int V>
__attribute__((noinline)) void run_chains(const uint8_t* w, int64_t tile_stride, const float* x, int64_t ldx, int64_t k, Ahead ahead,
                                          F16v* out) {
  constexpr int64_t quad = 2 * Element<F>::kPairBytes, near = kNearBytes<F, R>; // quad: four columns
  F16v acc[R][V];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = zero();
  Place<R, V> at;
  at.ldx = ldx;
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) at.w[v] = w + v * tile_stride;
#pragma GCC unroll 4
  for (int q = 0; q < (R + 2) / 3; ++q) at.x[q] = x + q * 3 * ldx;
  at.hide();
  const uint8_t* fetch = ahead.from;
  const int64_t n_quads = k / 4, n_near = ahead.is_near ? near / quad : 0;
  int64_t i = 0;
  // Twice: with this group's weights to fetch, then with the next one's.
  for (int64_t fetch_at = near, end = n_quads - n_near;; fetch_at += (V - 1) * tile_stride, end = n_quads) {
    for (; i < end; ++i) {
      at.hide();
      if (ahead.is_near) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v)
#pragma GCC unroll 4
          for (int64_t b = 0; b < quad; b += 64) __builtin_prefetch(at.w[v] + fetch_at + b, 0, 2);
      } else {
        for (int64_t line = 0; line < ahead.n_lines; ++line, fetch += 64) __builtin_prefetch(fetch, 0, 2);
      }
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) step<F, R, V>(acc, at, c);
      at.advance(quad, 4);
    }
    if (end == n_quads) break;
  }
#pragma GCC unroll 3
  for (int c = 0; c < 3; ++c)
    if (c < k % 4) step<F, R, V>(acc, at, c);
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) out[r * V + v] = acc[r][v];
}

using Chains = void (*)(const uint8_t*, int64_t, const float*, int64_t, int64_t, Ahead, F16v*);

// r rows, 1..R.
template <Format F, int V, int R>
Chains chains_kernel(int64_t r) {
  if constexpr (R > 1)
    if (r < R) return chains_kernel<F, V, R - 1>(r);
  return run_chains<F, R, V>;
}

template <Format F>
Chains chains_kernel(int64_t rows, int64_t n_tiles) {
  if constexpr (kQuadRows > 0)
    if (n_tiles == 4) return chains_kernel<F, 4, kQuadRows>(rows);
  if constexpr (kPairRows > 0)
    if (n_tiles == 2) return chains_kernel<F, 2, kPairRows>(rows);
  return chains_kernel<F, 1, kRows>(rows);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One block of rows against n_tiles tiles.
template <Format F>
void block(const LinearArgs& args, const LinearShare& share, int64_t tile, int64_t n_tiles, int64_t row_begin, int64_t row_end) {
  const PackedMatrix& w = *share.part->w;
  const uint8_t* weights = w.data + tile * w.tile_bytes;
  F16v acc[kRows * 4];
  const int64_t m = row_end - row_begin, n_pieces = ceil_div(m, kRows);
  const int64_t n_lines = ceil_div(n_tiles * Element<F>::kPairBytes / 32, n_pieces); // a quad of columns of each tile
  const uint8_t* next = weights + n_tiles * w.tile_bytes;
  const uint8_t* next_end = next + n_tiles * w.tile_bytes;
  for (int64_t p = 0; p < n_pieces; ++p) {
    const int64_t row = row_begin + m * p / n_pieces, rows = row_begin + m * (p + 1) / n_pieces - row;
    const Ahead ahead = {n_pieces == 1, next < next_end ? n_lines : 0, next};
    next += w.k / 4 * n_lines * 64;
    chains_kernel<F>(rows, n_tiles)(weights, w.tile_bytes, args.x + row * args.ldx, args.ldx, w.k, ahead, acc);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t v = 0; v < n_tiles; ++v) emit(args, *share.part, row + r, tile + v, acc[r * n_tiles + v]);
  }
}

template <Format F>
void run(const LinearArgs& args, const LinearShare& share) {
  for (int64_t row = share.row_begin; row < share.row_end; row += kBlockRows) {
    const int64_t row_end = share.row_end - row < kBlockRows ? share.row_end : row + kBlockRows;
    const int64_t widest = tiles_of(ceil_div(row_end - row, ceil_div(row_end - row, kRows)));
    for (int64_t tile = share.tile_begin, n_tiles; tile < share.tile_end; tile += n_tiles) {
      for (n_tiles = widest; n_tiles > share.tile_end - tile;) n_tiles /= 2;
      block<F>(args, share, tile, n_tiles, row, row_end);
    }
  }
}

} // namespace

int64_t float_panel_rows() { return kRows + 1; }
int64_t float_panel_tiles() { return tiles_of(kRows); }

void linear_float(const LinearArgs& args, const LinearShare& share, const ThreadCtx&) {
  switch (share.part->w->format) {
    case Format::F32: return run<Format::F32>(args, share);
    case Format::F16: return run<Format::F16>(args, share);
    case Format::BF16: return run<Format::BF16>(args, share);
    default: return; // quantised formats never arrive here
  }
}

} // namespace tiercel::TIERCEL_LEVEL
