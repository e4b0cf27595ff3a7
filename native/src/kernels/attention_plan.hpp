// Which part of a step's attention each thread does. Every thread works this out alone from the same arguments, without
// talking.
//
// A step is a list of chains, in the order sequence, kv head, block of queries; a chain is one block's walk over its
// splits, ascending. Chains are laid end to end on a line, their length an estimate of cost; the line is cut into
// n_threads equal parts. A split belongs to the thread whose part its middle lies in, so a thread's splits are
// consecutive, and only the first chain of a thread can have been begun by another. Chains too big for shared scratch
// are never cut: they belong whole to the thread of their middle.
#pragma once

#include "attention_layout.hpp"
#include "simd.hpp"
#include "tiercel/kernels.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

TIERCEL_INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
TIERCEL_INLINE int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }

// Consecutive queries of one sequence that are worked on together.
struct Block {
  int32_t seq;
  int64_t row; // first query's row of the step
  int64_t n_queries;
  int64_t pos;        // first query's position; of a sequence whose rows see their block, its last row's
  int64_t begin, end; // positions that any of its queries sees
  int64_t n_rows;     // queries x heads of a group
  int64_t weight;     // cost of one visible position
  bool is_divisible;

  int64_t split_begin() const { return begin / kSplitTokens; }
  int64_t split_end() const { return (end + kSplitTokens - 1) / kSplitTokens; }
  int64_t cost() const { return (end - begin) * weight; }
};

struct Plan {
  const AttentionArgs& args;
  const StepView& view;
  int32_t n_threads;
  int64_t group; // query heads of a kv head
  int64_t queries_per_block;
  int64_t part_floats; // shared scratch of one thread
  int64_t total;       // cost of the step
  bool has_divisible;  // some chain may be cut

  Plan(const AttentionArgs& a, const StepView& v, int32_t n) : args(a), view(v), n_threads(n), group(a.n_heads / a.n_kv_heads) {
    part_floats = a.shared_scratch != nullptr ? a.shared_scratch_bytes / static_cast<int64_t>(sizeof(float)) / n / 16 * 16 : 0;
    // At least 8 blocks a thread where there are rows enough, for balance; blocks under 24 rows would spend their time
    // expanding.
    const int64_t balanced = int64_t{v.n_tokens} * a.n_kv_heads / (8 * n);
    queries_per_block = at_most(at_least(balanced, (24 + group - 1) / group), at_least(kBlockRows / group, 1));
    total = 0;
    has_divisible = false;
    for (int32_t s = 0; s < v.n_seqs; ++s) total += sequence_cost(s, &has_divisible);
  }

  int64_t n_blocks(int32_t seq) const { return (view.seq_rows[seq + 1] - view.seq_rows[seq] + queries_per_block - 1) / queries_per_block; }

  int64_t first_visible(int64_t pos) const { return args.window > 0 ? at_least(pos - args.window + 1, 0) : 0; }

  // Where a query of a block looks from.
  int64_t position(const Block& k, int64_t query) const { return args.sees_block ? k.pos : k.pos + query; }

  Block block(int32_t seq, int64_t b) const {
    Block k;
    k.seq = seq;
    k.row = view.seq_rows[seq] + b * queries_per_block;
    k.n_queries = at_most(queries_per_block, view.seq_rows[seq + 1] - k.row);
    k.pos = args.sees_block ? view.seq_start[seq] + view.seq_rows[seq + 1] - view.seq_rows[seq] - 1
                            : view.seq_start[seq] + b * queries_per_block;
    k.begin = first_visible(k.pos);
    k.end = position(k, k.n_queries - 1) + 1;
    k.n_rows = k.n_queries * group;
    k.weight = 4 + k.n_rows; // reading a position's page costs about as much as four rows' arithmetic
    const int64_t n_splits = k.split_end() - k.split_begin();
    const int64_t room = part_floats - record_floats(block_rows(group), args.head_dim);
    k.is_divisible = n_splits > 1 && n_splits * record_floats(k.n_rows, args.head_dim) <= room;
    return k;
  }

  // All kv heads of a sequence.
  int64_t sequence_cost(int32_t seq, bool* any_divisible) const {
    int64_t cost = 0;
    for (int64_t b = 0; b < n_blocks(seq); ++b) {
      const Block k = block(seq, b);
      cost += k.cost();
      *any_divisible = *any_divisible || k.is_divisible;
    }
    return cost * args.n_kv_heads;
  }

  // Whether the point doubled / 2 of the line is in the thread's part. Products, not a quotient: this is asked for
  // every chain.
  bool owns(int32_t thread, int64_t doubled) const {
    return doubled * n_threads >= 2 * total * thread && doubled * n_threads < 2 * total * (thread + 1);
  }

  // Whether the thread does split c of the chain that starts at `start`.
  bool owns_split(int32_t thread, const Block& k, int64_t start, int64_t c) const {
    if (!k.is_divisible) return owns(thread, 2 * start + k.cost());
    const int64_t from = at_least(c * kSplitTokens, k.begin), to = at_most((c + 1) * kSplitTokens, k.end);
    return owns(thread, 2 * start + (from + to - 2 * k.begin) * k.weight);
  }

  // False when nothing between the points `start` and `start + cost` can be the thread's.
  bool may_own(int32_t thread, int64_t start, int64_t cost) const {
    return cost > 0 && 2 * start * n_threads < 2 * total * (thread + 1) && 2 * (start + cost) * n_threads > 2 * total * thread;
  }
};

} // namespace
} // namespace tiercel::TIERCEL_LEVEL
