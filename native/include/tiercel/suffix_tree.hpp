// Which tokens followed a context before, and how often: a tree of all suffixes of some texts, cut at a depth. It only grows.
//
// A node is a run of tokens that came at least once; its count is how often. A run that came once has no nodes below it: it points into its
// text, and is taken apart by a level when it comes again. So a token costs as many visits as the longest run that ends with it and came
// before, at most max_depth, and new text costs hardly any memory.
//
// Thread rule: one thread at a time. Source: SuffixDecoding (Oliaro et al. 2024); the definition it is tested against is in
// tests/unit/spec/test_suffix.py.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tiercel {

// What may follow a context. probabilities[i]: the product, up to token i, of how often it came next where anything came next.
struct Continuation {
  std::vector<int32_t> tokens;
  std::vector<double> probabilities;
  int32_t n_matched = 0; // tokens at the context's end that were found
  double score = 0.0;    // sum of the probabilities
};

class SuffixTree {
 public:
  // Runs are at most max_depth long. Once max_bytes are used, no text grows any more.
  SuffixTree(int32_t max_depth, int64_t max_bytes);

  // Begins a text; returns its number. One that is open goes on growing until it is closed, and may be continued whenever.
  int32_t begin();
  // Appends tokens; false: the tree is full, and from some token on they were left out.
  bool extend(int32_t text, std::span<const int32_t> tokens);

  // The best continuation of `context` over all lengths of match, n_max tokens or match * factor at most: the one of the highest score, of
  // equal ones that of the longest match. It goes on while its probability is min_probability or more. After runs of max_depth it goes on
  // as the latest did.
  Continuation propose(std::span<const int32_t> context, int32_t n_max, double factor, double min_probability) const;

  // How often a run of at most max_depth tokens came.
  int64_t count(std::span<const int32_t> run) const;

  int64_t bytes() const;
  int64_t n_nodes() const { return static_cast<int64_t>(nodes_.size()); }
  int32_t n_texts() const { return static_cast<int32_t>(texts_.size()); }
  int32_t max_depth() const { return max_depth_; }

 private:
  struct Node {
    int32_t token = -1, count = 0;
    int32_t n_followed = 0;       // of the times that it came, those with a token behind: the counts of its children
    int32_t best = -1;            // the child of the highest count, of equal ones the first to reach it
    int32_t text = -1, next = -1; // a run that came once, or of full length: where its latest occurrence goes on
    bool is_leaf() const { return text >= 0; }
  };
  struct Text {
    std::vector<int32_t> tokens;
    std::vector<int32_t> at; // [max_depth]: the node of its last d tokens, or -1: that run came once
  };
  // A run that was found: at a node, or inside a run that came once, whose text goes on at `next`.
  struct Place {
    int32_t node = -1, next = -1;
  };

  int32_t child(int32_t node, int32_t token) const;
  int32_t add_child(int32_t node, int32_t token, int32_t text, int32_t next);
  void count_up(int32_t parent, int32_t node);
  Place find(std::span<const int32_t> run) const;
  void follow(Place place, int32_t n_max, double min_probability, Continuation& out) const;
  void grow();

  int32_t max_depth_;
  int64_t max_bytes_;
  int64_t n_tokens_ = 0;
  std::vector<Node> nodes_;
  std::vector<Text> texts_;
  std::vector<uint64_t> keys_;  // open addressing, a power of two: node << 32 | token, ~0: free
  std::vector<int32_t> values_; // the child
};

} // namespace tiercel
