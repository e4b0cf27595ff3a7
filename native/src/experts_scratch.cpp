// How much scratch a mixture's experts want; kernels/experts.cpp lays it out.
#include <algorithm>

#include "tiercel/kernels.hpp"

namespace tiercel {
namespace {

// Enough rows at once that an expert's weights meet many of them: 640 rows of 8 experts at width 2048. Touched only as far as used.
constexpr int64_t kMostBytes = 128 << 20;

int64_t align64(int64_t n) { return (n + 63) / 64 * 64; }

// x, gate and up, what the activation gives, and the expert's output, each as floats at most.
int64_t pair_bytes(int64_t k, int64_t f, int64_t width) { return align64(4 * k) + 8 * f + align64(4 * f) + 4 * width; }

} // namespace

int64_t experts_rows_at_once(int64_t max_m, int32_t top_k, int64_t k, int64_t f, int64_t width) {
  return std::min(max_m, std::max<int64_t>(16, kMostBytes / (top_k * pair_bytes(k, f, width))));
}

int64_t experts_shared_bytes(int64_t rows_at_once, int32_t n_experts, int32_t top_k, int64_t k, int64_t f, int64_t width,
                             int32_t n_threads) {
  const int64_t pairs = rows_at_once * top_k;
  const int64_t lists = align64((n_experts + 1) * 4) + 2 * align64(pairs * 4);
  return n_threads * lists + pairs * pair_bytes(k, f, width) + 128; // two of the parts end on a line
}

} // namespace tiercel
