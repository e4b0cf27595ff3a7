#include "tiercel/draft_head.hpp"

#include <cmath>
#include <limits>

namespace tiercel {

void DraftHead::pick(const Rows& rows, int64_t k, Scratch&, int32_t* tokens, float* confidence) const {
  for (int64_t i = 0; i < k; ++i) {
    const float* logits = rows.logits + i * rows.ld_logits;
    const int64_t best = argmax_(logits, vocab_);
    tokens[i] = static_cast<int32_t>(best);
    confidence[i] = std::numeric_limits<float>::quiet_NaN();
    if (best < 0) continue;
    double sum = 0.0;
    for (int64_t v = 0; v < vocab_; ++v) sum += std::exp(double{logits[v]} - double{logits[best]});
    confidence[i] = static_cast<float>(1.0 / sum);
  }
}

} // namespace tiercel
