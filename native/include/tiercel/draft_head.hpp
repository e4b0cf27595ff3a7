// Picks drafts from the logits of a draft pass, one after the other: each may depend on the one before.
//
// Three heads, for drafter models of three kinds:
//   Plain     the row's likeliest token.
//   Markov    a bias by the token before is added first: W2 v, where v is W1's row of it (Vanilla), that row times a gate (Gated), or a
//             recurrent cell's output (Rnn). DSpark; Cheng et al. 2026 (arXiv:2607.05147).
//   Selector  the same, where v is the predecessor's row times a projection of the hidden row. DFlash2; z-lab 2026.
// With topk n, the bias is computed for the n best logits of each row and the others are out. At a temperature, what is picked is the
// largest of logit / temperature + noise, the noise being the sampler's own for that seed, position and token: a draft made from the
// model's own distribution is what the model draws (Gumbel coupling; Daliri et al. 2024, arXiv:2408.07978). Otherwise the largest. The
// lower id wins ties.
//
// For verification by rejection drafts are drawn *apart*: with noise of their own, from the softmax of logit / temperature over the
// n_choices likeliest ids, and that distribution is kept. Whether such a draft is computed must not depend on what it is, so in place of
// its own share its confidence is the root of the distribution's mean share, unless a confidence head gives it, which reads the token
// before.
//
// Immutable once built; any thread may pick, with a scratch of its own. Nothing is allocated in picking. The products' order of sums is
// that of KernelTable::row_products, so picks are the same at every level.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "tiercel/kernels.hpp"
#include "tiercel/sampler.hpp"

namespace tiercel {

class DraftHead {
 public:
  static constexpr int64_t kChoicesMax = 64; // of a head without topk

  enum class Kind : uint8_t { Plain, Markov, Selector };
  enum class Markov : uint8_t { Vanilla, Gated, Rnn };

  // Rows one behind the other. n 0: there is none.
  struct Matrix {
    int64_t n = 0, k = 0;
    std::vector<float> data;
  };

  // V ids of the target, D that are drafted, E columns of a hidden row, r the rank.
  struct Spec {
    Kind kind = Kind::Plain;
    Markov markov = Markov::Vanilla;
    int64_t vocab = 0;        // D: columns of logits
    int64_t target_vocab = 0; // V
    int64_t topk = 0;         // 0: the bias is computed for all
    Matrix before;            // [V, r]: W1, or the predecessors' codebook
    Matrix after;             // [D, r]: W2, or the successors'
    // Gated [r, E + r] of (hidden, W1's row); Rnn [3 r, r + r + E] of (state, W1's row, hidden): the cell's gate, candidate and output;
    // Selector [r, E].
    Matrix mix;
    std::vector<float> mix_bias; // [rows of mix] or empty
    Matrix confidence;           // Markov only, or none: [1, E] of hidden, or [1, E + r] of (hidden, W1's row)
    bool confidence_reads_markov = false;
    float confidence_bias = 0.0f;
    std::vector<int32_t> d2t; // [D] target id minus drafted id, or empty: D ids are the target's first

    // What does not fit, with the names that the Python side gives; empty: nothing.
    std::string broken() const;
  };

  class Scratch;

  // Where it is kept what drafts were drawn from: draft i has n[i] ids and their chances, from i * n_choices() on; n 0: it was not drawn.
  struct Kept {
    int32_t *n = nullptr, *ids = nullptr;
    double* q = nullptr;
  };

  // What one sequence's drafts are picked from; row i of either belongs to draft i.
  struct Rows {
    const float* logits;
    int64_t ld_logits;
    const float* hidden; // what the draft program gives out of each row; may be null if reads_hidden() is false
    int64_t ld_hidden;
    int32_t anchor;              // the token before the first draft
    const SamplerParams* params; // of which temperature and seed count; null: the largest is picked
    int64_t position;            // of the first draft
    // Not null: draw apart. first: the place of the first draft in its block, whose own first has position - first.
    const Kept* kept = nullptr;
    int32_t first = 0;
  };

  // REQUIRES: spec.broken() is empty.
  DraftHead(const KernelTable* kernels, Spec spec);

  // Picks k drafts. tokens: target ids; confidence[i]: estimated chance that draft i comes if those before it did, by the confidence head,
  // or the pick's share in the softmax it was picked from, at temperature 1. From a row on whose logits are no distribution (a NaN, +inf,
  // or all -inf), and for an anchor that is no token, tokens are -1 and confidences NaN.
  void pick(const Rows& rows, int64_t k, Scratch& scratch, int32_t* tokens, float* confidence) const;

  int64_t vocab() const { return spec_.vocab; }
  int64_t target_vocab() const { return spec_.target_vocab; }
  bool reads_hidden() const { return hidden_ > 0; }
  int64_t n_choices() const { return spec_.topk > 0 ? spec_.topk : std::min(spec_.vocab, kChoicesMax); } // of a draft that is drawn apart
  int64_t hidden_width() const { return hidden_; } // columns of a hidden row that are read

 private:
  struct Pick {
    int32_t token; // -1: none
    float probability;
  };
  // How a token is drawn: temperature 0 takes the largest. kept: of this draft, if it is drawn apart; else its n is null.
  struct Draw {
    float temperature;
    uint64_t seed;
    uint32_t position, lane;
    Kept kept;
  };

  int32_t target_id(int64_t id) const { return static_cast<int32_t>(id) + (spec_.d2t.empty() ? 0 : spec_.d2t[static_cast<size_t>(id)]); }
  const float* before_row(int32_t token) const { return spec_.before.data.data() + int64_t{token} * rank_; }
  void mix(Scratch& s) const;
  void make_edge(int32_t before, const float* hidden, Scratch& s) const;
  float confidence_of(int32_t before, const float* hidden, Scratch& s) const;
  Pick pick_next(int32_t before, const float* logits, const float* hidden, const Draw& draw, Scratch& s) const;
  Pick pick_of_all(const float* logits, const Draw& draw, Scratch& s) const;
  Pick pick_of_best(const float* logits, const Draw& draw, Scratch& s) const;
  Pick pick_apart(int64_t n, const Draw& draw, Scratch& s) const;

  const KernelTable* kernels_;
  Spec spec_;
  int64_t rank_ = 0, hidden_ = 0;
};

// Memory of one thread's picking, for one head.
class DraftHead::Scratch {
 public:
  explicit Scratch(const DraftHead& head);

 private:
  friend class DraftHead;
  std::vector<float> row_;            // [D] logits with their biases
  std::vector<float> z_, block_max_;  // over target ids, as the sampler's; -inf where nothing is drafted
  std::vector<int32_t> candidates_;   // [n_choices], best first
  std::vector<float> scores_, rows_;  // [n_choices], and rows of `after` [topk, r]
  std::vector<float> input_, output_; // of mix, and of the confidence head
  std::vector<float> edge_, state_;   // [r]
};

} // namespace tiercel
