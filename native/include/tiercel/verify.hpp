// Accepting drafts that were drawn from a distribution of their own, by rejection: the definitions of src/tiercel/spec/verify.py.
//
// What is emitted has the target's distribution p, whatever the drafts' own, q. It depends on what was drafted, so it is not the text
// without drafts: that is what Matching gives, and why it is the rule unless somebody asks. All noise is keyed by the sequence's seed
// (drafts', acceptance's and the residual's by its prompt as well), and streams are independent. A block of drafts is keyed by the position
// of its first and by the draft's place, never by the draft's own position: later blocks draft the same positions again, and acceptance by
// blocks has looked at all of a block's noise.
//
// Sources: Leviathan et al. 2023, arXiv:2211.17192 (Standard); Sun et al. 2024, arXiv:2403.10444 (Block).
#pragma once

#include <cstdint>
#include <span>

namespace tiercel {

// Matching: a draft is accepted if it is the token that plain decoding draws. Standard: each with probability min(1, p / q). Block: the
// longest run whose joint acceptance succeeds.
enum class Verification : uint8_t { Matching, Standard, Block };

// What noise is for: spec.verify.Stream.
enum class Stream : uint32_t { Target = 0, Draft = 1, Accept = 2, Residual = 3 };

// What a draft was drawn from: ids, each once, and their chances, which make 1. Other ids have none.
struct DraftOdds {
  std::span<const int32_t> ids;
  std::span<const double> q;
};

// A draft, what it was drawn from, and the target's chances of the same ids; no p: the target's row has no distribution.
struct TestedDraft {
  int32_t token;
  DraftOdds odds;
  std::span<const double> p;
};

// How many drafts are accepted, and the joint acceptance of so many, by which the target is weighed in what replaces the next one
// (max(joint * p - q, 0)); 1 where that is not asked for.
struct Accepted {
  int32_t n;
  double joint;
};

// `position`: of the first draft, in its sequence. A draft whose row has no distribution ends the block. REQUIRES: how is not Matching.
Accepted accept_drafts(Verification how, std::span<const TestedDraft> drafts, uint64_t seed, uint32_t position);

} // namespace tiercel
