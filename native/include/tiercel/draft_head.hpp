// Picks drafts from the logits of a draft pass, one after the other.
#pragma once

#include <cstdint>

#include "tiercel/sampler.hpp"

namespace tiercel {

class DraftHead {
 public:
  // Memory of one thread's picking.
  class Scratch {
   public:
    explicit Scratch(const DraftHead&) {}
  };
  // What one sequence's drafts are picked from; row i of either belongs to draft i.
  struct Rows {
    const float* logits;
    int64_t ld_logits;
    const float* hidden; // what the draft program gives out of each row, or nullptr
    int64_t ld_hidden;
    int32_t anchor; // the token before the first draft
    const SamplerParams* params;
    int64_t position; // of the first draft
  };

  explicit DraftHead(int64_t vocab, Argmax argmax) : vocab_(vocab), argmax_(argmax) {}

  // Picks k drafts. tokens: target ids; confidence[i]: estimated chance that draft i comes if those before it did.
  void pick(const Rows& rows, int64_t k, Scratch& scratch, int32_t* tokens, float* confidence) const;
  int64_t vocab() const { return vocab_; }

 private:
  int64_t vocab_;
  Argmax argmax_;
};

} // namespace tiercel
