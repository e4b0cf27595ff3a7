// The linear op: which thread computes which tiles. The products themselves are in linear_int.cpp and linear_float.cpp.
//
// An output's value depends on nothing decided here. The division is static, because claiming tiles from a counter breaks the prefetch
// streams and costs 8 % on small steps.
#include "linear.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t clamp(int64_t x, int64_t lo, int64_t hi) { return x < lo ? lo : x > hi ? hi : x; }

// The threads as a grid: a column of the grid shares tiles, a row of it shares rows of x.
struct Grid {
  int64_t n_cols, n_rows;
};

// Few tiles, many threads and many rows: split the rows too. Otherwise every thread sees all rows, so each weight is read once.
Grid grid_of(int64_t n_units, int64_t m, int64_t panel_rows, int64_t n_threads) {
  if (n_units >= n_threads || m < 2 * panel_rows) return {n_threads, 1};
  const int64_t n_rows = clamp(n_threads / n_units, 1, m / panel_rows);
  return {n_threads / n_rows, n_rows};
}

// Calls fn(share) for each part's share of this thread, in order.
template <class Fn>
void each_share(const LinearArgs& args, const ThreadCtx& ctx, Fn fn) {
  const bool is_int = args.xq != nullptr;
  const int64_t panel_rows = is_int ? int_panel_rows() : float_panel_rows();
  const bool is_panel = args.m >= panel_rows;
  const int64_t unit = !is_panel ? 1 : is_int ? int_panel_tiles() : float_panel_tiles();

  // A unit costs its bytes while weights are streamed, and its columns once arithmetic dominates.
  int64_t n_units = 0, total = 0;
  for (int32_t p = 0; p < args.n_parts; ++p) {
    const PackedMatrix& w = *args.parts[p].w;
    const int64_t units = ceil_div(ceil_div(w.n, 16), unit);
    n_units += units;
    total += units * (is_panel ? 1 : w.tile_bytes);
  }
  const Grid grid = grid_of(n_units, args.m, panel_rows, ctx.n_threads);
  const int64_t col = ctx.thread % grid.n_cols, row = ctx.thread / grid.n_cols;
  if (row >= grid.n_rows) return;
  const int64_t begin = total * col / grid.n_cols, end = total * (col + 1) / grid.n_cols;

  // A unit belongs to the thread in whose range [begin, end) it starts.
  int64_t at = 0;
  for (int32_t p = 0; p < args.n_parts; ++p) {
    const PackedMatrix& w = *args.parts[p].w;
    const int64_t tiles = ceil_div(w.n, 16), units = ceil_div(tiles, unit);
    const int64_t cost = is_panel ? 1 : w.tile_bytes;
    const int64_t first = clamp(ceil_div(begin - at, cost), 0, units), last = clamp(ceil_div(end - at, cost), 0, units);
    at += units * cost;
    if (begin >= at || first >= last) continue;
    fn(LinearShare{&args.parts[p], first * unit, clamp(last * unit, 0, tiles), args.m * row / grid.n_rows, args.m * (row + 1) / grid.n_rows,
                   nullptr});
  }
}

WeightRun run_of(const LinearShare& share) {
  const PackedMatrix& w = *share.part->w;
  return {w.data + share.tile_begin * w.tile_bytes, (share.tile_end - share.tile_begin) * w.tile_bytes};
}

} // namespace

void linear(const LinearArgs& args, const ThreadCtx& ctx) {
  if (args.m == 0) return;
  // Each share is told where the next begins, to fetch that instead of what lies behind its own end.
  LinearShare waiting{};
  const auto run = [&](const uint8_t* ahead) {
    if (!waiting.part) return;
    waiting.ahead = ahead;
    args.xq ? linear_int(args, waiting, ctx) : linear_float(args, waiting, ctx);
  };
  each_share(args, ctx, [&](const LinearShare& share) {
    run(run_of(share).data);
    waiting = share;
  });
  run(ctx.ahead);
}

WeightRun linear_start(const LinearArgs& args, const ThreadCtx& ctx) {
  WeightRun first{nullptr, 0};
  each_share(args, ctx, [&](const LinearShare& share) {
    if (!first.data) first = run_of(share);
  });
  return first;
}

} // namespace tiercel::TIERCEL_LEVEL
