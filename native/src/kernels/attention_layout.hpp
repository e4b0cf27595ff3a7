// Sizes that attention's kernels and their scratch formulas agree on. Everything here has internal linkage, so that
// sources compiled for different instruction sets may include it.
#pragma once

#include <cstdint>

#include "tiercel/kernels.hpp"

namespace tiercel {
namespace {

constexpr int64_t kSplitTokens = 256; // a split: absolute, so that partial sums never depend on how a prompt was cut
constexpr int64_t kRunTokens = 16;    // tokens of a run, the unit that pages are made of (kernels.hpp, KvLayer)
constexpr int64_t kRunsPerSplit = kSplitTokens / kRunTokens;
constexpr int64_t kMaxTileRows = 6; // most query rows one tile works on, at any level
constexpr int64_t kBlockRows = 96;  // query rows (queries x heads of a group) that share one expanded split
// Blocks of more rows expand F16 splits to float first. Below, on Zen 4, converting in each tile was 1.6 times faster
// (5 drafted tokens at 2000); above it makes no difference there and 5 % at AVX2. Processors with a slow vcvtph2ps gain
// more.
constexpr int64_t kExpandRows = 24;
// Row stride of a tile's scores. The extra run keeps rows that are read together out of each other's cache sets.
constexpr int64_t kScoreStride = kSplitTokens + kRunTokens;

// Of I8 pages: columns of a key that share a scale, and so how many scales a key has; a value has one.
constexpr int64_t kKeyBlock = 64;
constexpr int64_t key_blocks(int64_t head_dim) { return (head_dim + kKeyBlock - 1) / kKeyBlock; }

constexpr int64_t run_bytes(KvType type, int64_t head_dim) {
  return type == KvType::I8 ? 2 * kRunTokens * (head_dim + key_blocks(head_dim) + 1)
                            : 2 * kRunTokens * head_dim * (type == KvType::F16 ? 2 : 4);
}

// A run of latent rows, which are kept once.
constexpr int64_t latent_bytes(KvType type, int64_t width) { return kRunTokens * width * (type == KvType::F16 ? 2 : 4); }

constexpr int64_t pad16(int64_t n) { return (n + 15) / 16 * 16; }
constexpr int64_t block_rows(int64_t group) { return group > kBlockRows ? group : kBlockRows; }

// Floats of the running or partial result of n rows: max [n], sum [n], outputs [n][pad16(D)].
constexpr int64_t record_floats(int64_t n, int64_t head_dim) { return 2 * pad16(n) + n * pad16(head_dim); }

// Floats between runs of an expanded split. Not a multiple of 4 KiB, or the runs of a tile would share cache sets.
constexpr int64_t expanded_run_floats(int64_t head_dim) { return 2 * kRunTokens * head_dim + 64; }

// A thread's scratch, in floats, in this order: packed queries, running results, one tile's partial, scores; then the
// expanded split, or for int8 pages the queries' units and their rounded rows.
constexpr int64_t query_floats(int64_t group, int64_t head_dim) { return pad16(block_rows(group) * head_dim); }
constexpr int64_t thread_floats(int64_t group, int64_t head_dim) {
  const int64_t expanded = kRunsPerSplit * expanded_run_floats(head_dim);
  const int64_t rounded = pad16(block_rows(group)) + pad16(block_rows(group) * head_dim / 2);
  const int64_t last = expanded > rounded ? expanded : rounded;
  return query_floats(group, head_dim) + record_floats(block_rows(group), head_dim) + record_floats(kMaxTileRows, head_dim) +
         kMaxTileRows * kScoreStride + last;
}

} // namespace
} // namespace tiercel
