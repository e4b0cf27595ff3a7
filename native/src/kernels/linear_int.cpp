// Products of int8 activations with quantised weights.
//
// Contract, for every output y[m, n], at every level, for any M, number of threads and choice of kernel below:
//
//   acc = 0
//   for each 32-group g of K, ascending:
//     dot = sum over the group of (q_w - zero) * q_x                      an integer, exact
//     acc = fma(float(dot), scale_w * scale_x, acc)                       the product rounded once, then the fma
//     with minimums:  acc = fma(min_w, scaled_sum_x, acc)                 scaled_sum_x = round(scale_x * float(sum q_x))
//   y = (acc + bias) + residual
//
// For NVFP4 the two halves of a group are two such steps, the first half first. Its codes and MXFP4's are twice the value of an E2M1
// number, so that they are integers, and the scales half of the file's: both exact. For the others
// where for Q6_K dot = sub_0 * dot_0 + sub_1 * dot_1 over the two halves of the group, still an integer (below 2^24, so float(dot) is
// exact), and scale_w is d; for Q4_K and Q5_K scale_w = d * sc and min_w = -(dmin * m), both exact. One f32 accumulator an output: nothing
// is summed in another order anywhere, so equal inputs give equal bits.
//
// The weight is dpbusd's unsigned operand and the activation the signed one, which arrives as a broadcast from memory and so needs no
// arithmetic slot. The zero point is undone by starting the sum at -zero * sum(q_x), which the activation row carries.
//
// Two kernels:
//   stream  up to kStreamRows rows x 1 tile: weights are unpacked in registers and used at once.
//   panel   from kPanelRows rows: 2 tiles are unpacked into the thread's scratch once, as bytes and f32 scales, and used for all rows.
#include "formats.hpp"
#include "linear.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

#if defined(__AVX512VNNI__)
constexpr int kStreamRows = 8;
constexpr int kPanelBlockRows = 6; // 12 sums and 12 accumulators in registers
constexpr int kPanelCols = 2;      // tiles
constexpr int64_t kPanelRows = 48; // below, streaming 8 rows at a time is 0 to 6 % faster (Zen 4, M = 24..48)
#elif defined(__AVX2__)
constexpr int kStreamRows = 4; // 16 registers
constexpr int kPanelBlockRows = 4;
constexpr int kPanelCols = 1;
constexpr int64_t kPanelRows = 24;
#else
// The plain level is for processors without vectors of ours: one row at a time, because bigger shapes only take long to compile.
constexpr int kStreamRows = 1;
constexpr int kPanelBlockRows = 1;
constexpr int kPanelCols = 1;
constexpr int64_t kPanelRows = int64_t{1} << 40; // never
#endif
static_assert(kPanelCols <= kPanelTiles);

// Only AVX2 cares how large a weight can be; elsewhere formats of one kind share code.
constexpr int dot_max(int max) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
  return max;
#else
  return max > 0 ? 255 : 0;
#endif
}

struct ActRows {
  const uint8_t* data;
  int64_t stride;
  TIERCEL_INLINE const ActGroup& at(int64_t row, int64_t g) const { return reinterpret_cast<const ActGroup*>(data + row * stride)[g]; }
};

TIERCEL_INLINE int32_t start_at(const ActGroup& a, int64_t offset) {
  int32_t v;
  std::memcpy(&v, reinterpret_cast<const uint8_t*>(&a) + offset, 4);
  return v;
}

// The integer sums of one group for one row and tile.
template <Kind K, int Max>
struct GroupDot {
  Dot<Max> dot;
  TIERCEL_INLINE void begin(const ActGroup& a, int64_t start) { dot.begin(K == Kind::Plain ? start_at(a, start) : 0); }
  template <int Step, int J>
  TIERCEL_INLINE void step(Bytes w, const ActGroup& a) {
    dot.template step<Step>(w, load_quad(a.q + 4 * J));
  }
  TIERCEL_INLINE F16v end(Int16v, Int16v) const { return to_float(dot.end()); }
};

template <int Max>
struct GroupDot<Kind::Halves, Max> {
  Dot<Max> half[2];
  TIERCEL_INLINE void begin(const ActGroup& a, int64_t) {
    half[0].begin(a.start32[0]);
    half[1].begin(a.start32[1]);
  }
  template <int Step, int J>
  TIERCEL_INLINE void step(Bytes w, const ActGroup& a) {
    half[J / 4].template step<J % 4>(w, load_quad(a.q + 4 * J));
  }
  TIERCEL_INLINE F16v end(Int16v sub0, Int16v sub1) const { return to_float(add(mul(sub0, half[0].end()), mul(sub1, half[1].end()))); }
};

// Two sums, each with a float scale of its own.
template <int Max>
struct GroupDot<Kind::Pair, Max> : GroupDot<Kind::Halves, Max> {
  TIERCEL_INLINE F16v end_of(int h) const { return to_float(this->half[h].end()); }
};

// Weights to fetch while others are in use: per_group bytes (a multiple of 64) in each group, so that memory is never idle.
struct Ahead {
  const uint8_t* next;
  int64_t left, per_group;
  const uint8_t* end = nullptr; // where next jumps to then, if then is not null
  const uint8_t* then = nullptr;

  // n_bytes at next, spread over n_steps groups.
  static TIERCEL_INLINE Ahead spread(const uint8_t* next, int64_t n_bytes, int64_t n_steps) {
    return {next, n_bytes, (n_bytes + n_steps * 64 - 1) / (n_steps * 64) * 64, nullptr, nullptr};
  }
  TIERCEL_INLINE void fetch() {
    if (left <= 0) return;
    if (then && next >= end) {
      next = then + (next - end);
      then = nullptr;
    }
    for (int64_t b = 0; b < per_group; b += 64) prefetch(next + b);
    next += per_group;
    left -= per_group;
  }
};

// --- stream ---------------------------------------------------------------------------------------------------------------------------

template <Format F, int R>
struct StreamStep {
  GroupDot<kind_of(F), dot_max(max_weight(F))>* dot;
  const ActRows& rows;
  int64_t g;
  template <int Step, int J>
  TIERCEL_INLINE void operator()(Bytes w) const {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) dot[r].template step<Step, J>(w, rows.at(r, g));
  }
};

template <Format F, int R>
__attribute__((noinline)) void stream_tile(const uint8_t* tile, const ActRows rows, int64_t n_groups, Ahead& io_ahead, F16v* out) {
  constexpr Kind kind = kind_of(F);
  F16v acc[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) acc[r] = zero();
  Weights<F> w(tile);
  Ahead ahead = io_ahead;
  for (int64_t g = 0; g < n_groups; ++g, w.next()) {
    ahead.fetch();
    GroupDot<kind, dot_max(max_weight(F))> dot[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) dot[r].begin(rows.at(r, g), start_offset(F));
    w.each_quad(StreamStep<F, R>{dot, rows, g});
    if constexpr (kind == Kind::Pair) {
      const F16v scale0 = w.scale_of(0), scale1 = w.scale_of(1);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F16v x_scale = set1(rows.at(r, g).scale);
        acc[r] = fma(dot[r].end_of(0), mul(scale0, x_scale), acc[r]);
        acc[r] = fma(dot[r].end_of(1), mul(scale1, x_scale), acc[r]);
      }
      continue;
    }
    const F16v scale = w.scale();
    Int16v sub0{}, sub1{};
    if constexpr (kind == Kind::Halves) sub0 = w.sub_scale(0), sub1 = w.sub_scale(1);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r] = fma(dot[r].end(sub0, sub1), mul(scale, set1(rows.at(r, g).scale)), acc[r]);
    if constexpr (kind == Kind::Min) {
      const F16v minimum = w.minimum();
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r] = fma(minimum, set1(rows.at(r, g).scaled_sum), acc[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) out[r] = acc[r];
  io_ahead = ahead;
}

using StreamTile = void (*)(const uint8_t*, ActRows, int64_t, Ahead&, F16v*);

template <Format F>
StreamTile stream_kernel(int r) {
  if constexpr (kStreamRows >= 4) {
    if (r == 2) return stream_tile<F, 2>;
    if (r == 3) return stream_tile<F, 3>;
    if (r == 4) return stream_tile<F, 4>;
  }
  if constexpr (kStreamRows >= 8) {
    if (r == 5) return stream_tile<F, 5>;
    if (r == 6) return stream_tile<F, 6>;
    if (r == 7) return stream_tile<F, 7>;
    if (r == 8) return stream_tile<F, 8>;
  }
  return stream_tile<F, 1>;
}

template <Format F>
void stream(const LinearArgs& args, const LinearShare& share) {
  const PackedMatrix& w = *share.part->w;
  const int64_t m = share.row_end - share.row_begin, n_groups = w.k / kGroup;
  const int64_t n_blocks = (m + kStreamRows - 1) / kStreamRows;
  // Bytes from a tile's use to what is fetched meanwhile. One row leaves the core waiting for memory, more rows give it work in between;
  // with several blocks of rows, the next tile is fetched during all of them.
  const int64_t distance = m == 1 ? 4096 : n_blocks == 1 ? 2048 : w.tile_bytes;
  const uint8_t* share_end = w.data + share.tile_end * w.tile_bytes;
  F16v acc[kStreamRows];
  for (int64_t tile = share.tile_begin; tile < share.tile_end; ++tile) {
    const uint8_t* data = w.data + tile * w.tile_bytes;
    Ahead ahead = Ahead::spread(data + distance, w.tile_bytes, n_blocks * n_groups);
    ahead.end = share_end;
    ahead.then = share.ahead;
    // Blocks of nearly equal size: 9 rows are 5 + 4, not 8 + 1, whose last pass would cost as much as 3 rows.
    int64_t blocks = n_blocks;
    for (int64_t row = share.row_begin; row < share.row_end; --blocks) {
      const int64_t rows = (share.row_end - row + blocks - 1) / blocks;
      const ActRows x = {args.xq->data + row * args.xq->stride_bytes, args.xq->stride_bytes};
      stream_kernel<F>(static_cast<int>(rows))(data, x, n_groups, ahead, acc);
      for (int64_t r = 0; r < rows; ++r) emit(args, *share.part, row + r, tile, acc[r]);
      row += rows;
    }
  }
}

// --- panel ----------------------------------------------------------------------------------------------------------------------------

// Scratch, for each group and then each tile of the panel: 8 quads of 64 bytes, f32 scales, and for Min the f32 minimums, for Pair
// the second half's scales or for Halves the two i32 sub-scales.
constexpr int64_t panel_group_bytes(Kind kind) { return 512 + 64 * (kind == Kind::Plain ? 1 : kind == Kind::Halves ? 3 : 2); }

struct StoreQuad {
  uint8_t* to;
  template <int Step, int J>
  TIERCEL_INLINE void operator()(Bytes w) const {
    store_bytes(to + J * 64, w);
  }
};

template <Format F>
__attribute__((noinline)) void unpack_panel(const uint8_t* tile, int64_t n_groups, int64_t stride, uint8_t* to) {
  Weights<F> w(tile);
  for (int64_t g = 0; g < n_groups; ++g, w.next(), to += stride) {
    w.each_quad(StoreQuad{to});
    store(reinterpret_cast<float*>(to + 512), w.scale());
    if constexpr (kind_of(F) == Kind::Min) store(reinterpret_cast<float*>(to + 576), w.minimum());
    if constexpr (kind_of(F) == Kind::Pair) store(reinterpret_cast<float*>(to + 576), w.scale_of(1));
    if constexpr (kind_of(F) == Kind::Halves) {
      store_int(reinterpret_cast<int32_t*>(to + 576), w.sub_scale(0));
      store_int(reinterpret_cast<int32_t*>(to + 640), w.sub_scale(1));
    }
  }
}

template <Kind K, int Max, int R, int V, int J>
TIERCEL_INLINE void panel_step(GroupDot<K, Max> (&dot)[R][V], const uint8_t* panel, const ActRows& rows, int64_t g) {
  Bytes w[V];
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) w[v] = load_bytes(panel + v * panel_group_bytes(K) + J * 64);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) dot[r][v].template step<J, J>(w[v], rows.at(r, g));
}

template <Kind K, int Max, int R, int V>
__attribute__((noinline)) void panel_block(const uint8_t* panel, const ActRows rows, int64_t n_groups, int64_t start, Ahead& io_ahead,
                                           F16v* out) {
  constexpr int64_t bytes = panel_group_bytes(K);
  F16v acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) acc[r][v] = zero();
  Ahead ahead = io_ahead;
  for (int64_t g = 0; g < n_groups; ++g, panel += V * bytes) {
    ahead.fetch();
    GroupDot<K, Max> dot[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) dot[r][v].begin(rows.at(r, g), start);
    panel_step<K, Max, R, V, 0>(dot, panel, rows, g);
    panel_step<K, Max, R, V, 1>(dot, panel, rows, g);
    panel_step<K, Max, R, V, 2>(dot, panel, rows, g);
    panel_step<K, Max, R, V, 3>(dot, panel, rows, g);
    panel_step<K, Max, R, V, 4>(dot, panel, rows, g);
    panel_step<K, Max, R, V, 5>(dot, panel, rows, g);
    panel_step<K, Max, R, V, 6>(dot, panel, rows, g);
    panel_step<K, Max, R, V, 7>(dot, panel, rows, g);
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const uint8_t* scales = panel + v * bytes + 512;
      const F16v scale = load(reinterpret_cast<const float*>(scales));
      Int16v sub0{}, sub1{};
      if constexpr (K == Kind::Halves) {
        sub0 = load_int(reinterpret_cast<const int32_t*>(scales + 64));
        sub1 = load_int(reinterpret_cast<const int32_t*>(scales + 128));
      }
      if constexpr (K == Kind::Pair) {
        const F16v scale1 = load(reinterpret_cast<const float*>(scales + 64));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const F16v x_scale = set1(rows.at(r, g).scale);
          acc[r][v] = fma(dot[r][v].end_of(0), mul(scale, x_scale), acc[r][v]);
          acc[r][v] = fma(dot[r][v].end_of(1), mul(scale1, x_scale), acc[r][v]);
        }
        continue;
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r][v] = fma(dot[r][v].end(sub0, sub1), mul(scale, set1(rows.at(r, g).scale)), acc[r][v]);
      if constexpr (K == Kind::Min) {
        const F16v minimum = load(reinterpret_cast<const float*>(scales + 64));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r][v] = fma(minimum, set1(rows.at(r, g).scaled_sum), acc[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) out[r * V + v] = acc[r][v];
  io_ahead = ahead;
}

using PanelBlock = void (*)(const uint8_t*, ActRows, int64_t, int64_t, Ahead&, F16v*);

template <Kind K, int Max>
PanelBlock panel_kernel(int64_t r) {
  if constexpr (kPanelBlockRows >= 4) {
    if (r == 2) return panel_block<K, Max, 2, kPanelCols>;
    if (r == 3) return panel_block<K, Max, 3, kPanelCols>;
    if (r == 4) return panel_block<K, Max, 4, kPanelCols>;
  }
  if constexpr (kPanelBlockRows >= 6) {
    if (r == 5) return panel_block<K, Max, 5, kPanelCols>;
    if (r == 6) return panel_block<K, Max, 6, kPanelCols>;
  }
  return panel_block<K, Max, 1, kPanelCols>;
}

template <Format F>
void panel(const LinearArgs& args, const LinearShare& share, const ThreadCtx& ctx) {
  constexpr Kind kind = kind_of(F);
  constexpr int max = dot_max(max_weight(F));
  const PackedMatrix& w = *share.part->w;
  const int64_t n_groups = w.k / kGroup;
  F16v acc[kPanelBlockRows * kPanelCols];
  for (int64_t tile = share.tile_begin; tile < share.tile_end; tile += kPanelCols) {
    // A panel past the last tile repeats that tile and drops the second copy.
    for (int64_t v = 0; v < kPanelCols; ++v) {
      const int64_t from = tile + v < share.tile_end ? tile + v : tile;
      unpack_panel<F>(w.data + from * w.tile_bytes, n_groups, kPanelCols * panel_group_bytes(kind),
                      ctx.scratch + v * panel_group_bytes(kind));
    }
    int64_t blocks = (share.row_end - share.row_begin + kPanelBlockRows - 1) / kPanelBlockRows;
    const int64_t n_tiles_next = tile + 2 * kPanelCols <= share.tile_end ? kPanelCols : share.tile_end - tile - kPanelCols;
    Ahead ahead = Ahead::spread(w.data + (tile + kPanelCols) * w.tile_bytes, n_tiles_next * w.tile_bytes, blocks * n_groups);
    for (int64_t row = share.row_begin; row < share.row_end; --blocks) {
      const ActRows x = {args.xq->data + row * args.xq->stride_bytes, args.xq->stride_bytes};
      const int64_t rows = (share.row_end - row + blocks - 1) / blocks;
      panel_kernel<kind, max>(rows)(ctx.scratch, x, n_groups, start_offset(F), ahead, acc);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t v = 0; v < kPanelCols && tile + v < share.tile_end; ++v)
          emit(args, *share.part, row + r, tile + v, acc[r * kPanelCols + v]);
      row += rows;
    }
  }
}

template <Format F>
void run(const LinearArgs& args, const LinearShare& share, const ThreadCtx& ctx) {
  if constexpr (kPanelBlockRows > 1)
    if (share.row_end - share.row_begin >= kPanelRows) return panel<F>(args, share, ctx);
  stream<F>(args, share);
}

} // namespace

int64_t int_panel_rows() { return kPanelRows; }
int64_t int_panel_tiles() { return kPanelCols; }

void linear_int(const LinearArgs& args, const LinearShare& share, const ThreadCtx& ctx) {
  switch (share.part->w->format) {
    case Format::Q4_0: return run<Format::Q4_0>(args, share, ctx);
    case Format::Q4_1: return run<Format::Q4_1>(args, share, ctx);
    case Format::Q5_0: return run<Format::Q5_0>(args, share, ctx);
    case Format::Q5_1: return run<Format::Q5_1>(args, share, ctx);
    case Format::Q8_0: return run<Format::Q8_0>(args, share, ctx);
    case Format::Q4_K: return run<Format::Q4_K>(args, share, ctx);
    case Format::Q5_K: return run<Format::Q5_K>(args, share, ctx);
    case Format::Q6_K: return run<Format::Q6_K>(args, share, ctx);
    case Format::MXFP4: return run<Format::MXFP4>(args, share, ctx);
    case Format::NVFP4: return run<Format::NVFP4>(args, share, ctx);
    default: return; // float formats never arrive here
  }
}

} // namespace tiercel::TIERCEL_LEVEL
