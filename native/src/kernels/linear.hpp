// Shared by the linear kernels of one level: a thread's share of a product, and what happens to a finished accumulator.
#pragma once

#include "simd_int.hpp"
#include "table.hpp"

namespace tiercel::TIERCEL_LEVEL {

// Rows row_begin..row_end of x against tiles tile_begin..tile_end of one part.
struct LinearShare {
  const LinearPart* part;
  int64_t tile_begin, tile_end;
  int64_t row_begin, row_end;
  const uint8_t* ahead; // what this thread reads after the share, or nullptr
};

// linear_int.cpp, linear_float.cpp
void linear_int(const LinearArgs&, const LinearShare&, const ThreadCtx&);
void linear_float(const LinearArgs&, const LinearShare&, const ThreadCtx&);
// From this many rows a thread's tiles are handed out in whole panels.
int64_t int_panel_rows();
int64_t int_panel_tiles();
int64_t float_panel_rows();
int64_t float_panel_tiles();

namespace {

// y = (acc + bias) + residual for one row of one tile, in this order; columns past the matrix's end are dropped.
TIERCEL_INLINE void emit(const LinearArgs& args, const LinearPart& part, int64_t row, int64_t tile, F16v acc) {
  const int64_t n0 = tile * 16;
  const int64_t left = part.w->n - n0;
  float* y = args.y + row * args.ldy + part.y_col + n0;
  const float* residual = args.residual ? args.residual + row * args.ld_residual + part.y_col + n0 : nullptr;
  if (left >= 16) {
    if (part.bias) acc = add(acc, load(part.bias + n0));
    if (residual) acc = add(acc, load(residual));
    store(y, acc);
  } else {
    const int n = static_cast<int>(left);
    if (part.bias) acc = add(acc, load_n(part.bias + n0, n));
    if (residual) acc = add(acc, load_n(residual, n));
    store_n(y, acc, n);
  }
}

} // namespace
} // namespace tiercel::TIERCEL_LEVEL
