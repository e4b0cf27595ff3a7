#include "tiercel/verify.hpp"

#include <algorithm>

#include "sampler_noise.hpp"

namespace tiercel {

namespace {

double uniform_of(uint64_t seed, uint32_t position, int64_t draft) {
  return sampler_noise::uniform(sampler_noise::word_of({seed, position, Stream::Accept}, draft));
}

struct Chances {
  double p, q;
};

Chances chances_of(const TestedDraft& draft) {
  const auto at = static_cast<size_t>(std::find(draft.odds.ids.begin(), draft.odds.ids.end(), draft.token) - draft.odds.ids.begin());
  return {draft.p[at], draft.odds.q[at]};
}

// Chance that a run before this draft is accepted and no longer one that shares the draft: what is left of the target there.
double chance_to_end_at(const TestedDraft& draft, double joint) {
  double covered = 0.0, left = 0.0;
  for (size_t i = 0; i < draft.p.size(); ++i) {
    covered += draft.p[i];
    left += std::max(joint * draft.p[i] - draft.odds.q[i], 0.0);
  }
  left += joint * std::max(1.0 - covered, 0.0);
  const double whole = left + 1.0 - joint;
  return whole > 0.0 ? left / whole : 1.0;
}

} // namespace

Accepted accept_drafts(Verification how, std::span<const TestedDraft> drafts, uint64_t seed, uint32_t position) {
  const auto ends = std::find_if(drafts.begin(), drafts.end(), [](const TestedDraft& draft) { return draft.p.empty(); });
  drafts = drafts.first(static_cast<size_t>(ends - drafts.begin()));
  const auto n_drafts = static_cast<int32_t>(drafts.size());
  Accepted found{0, 1.0};
  double joint = 1.0;
  for (int32_t i = 0; i < n_drafts; ++i) {
    const auto [p, q] = chances_of(drafts[static_cast<size_t>(i)]);
    const double u = uniform_of(seed, position, i);
    if (how == Verification::Standard) {
      if (!(u * q < p)) break;
      found.n = i + 1;
      continue;
    }
    joint = std::min(joint * p / q, 1.0);
    const double chance = i + 1 == n_drafts ? joint : chance_to_end_at(drafts[static_cast<size_t>(i + 1)], joint);
    if (u < chance) found = {i + 1, joint}; // the longest that succeeds, whatever shorter ones did
  }
  return found;
}

} // namespace tiercel
