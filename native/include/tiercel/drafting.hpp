// What a step does once it has sampled: it drafts what may come next, with a program of its own over the target's pages.
//
// Drafts belong to a slot and begin at a position: the end of its tokens when they were made. They are taken only where the slot ends
// there, so whatever happened to the slot meanwhile makes them void. All that is drafted of a sequence follows from its tokens and from the
// places that its pages have; never from what runs beside it. Nothing is written to a place that the slot had no page for.
//
// What module s of a chain leaves at a place is made of the s + 1 tokens after it too. So a prefix that is found in shared pages may, at
// its very last places, hold what another continuation left in the drafter's layers: few keys of many, and of drafts only.
//
// A chain of n modules begins with n passes over the same rows, each of a program of its own: pass s has the token s + 1 places after each
// row, and what pass s - 1 gave out of it; at the last rows these tokens are drafts, or nothing. So the n - 1 last rows of a slot are made
// of guesses: what the target gave out of them is kept, and they are computed again in front of the next step's. With this each draft is
// the one that all tokens so far, computed at once, would bring. A page stays as it is once n tokens behind its end are known.
//
// Thread rule: forget and set_policy come from the step runner's caller thread, forget only while no submitted step names the slot;
// everything else from the runner's own thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tiercel/draft_head.hpp"
#include "tiercel/program.hpp"

namespace tiercel {

// Block: one pass over [last token, mask, mask ..] of each sequence, whose context the target's program left in the pages.
// Chain: a pass of each module over the step's own rows, the first with the token after each and what the target's program gave out of it;
// then passes of one row a sequence of the last module, with the draft before it and what that module itself gave out.
enum class DraftKind : uint8_t { Block, Chain };

// How drafts of a sequence that samples are picked: with the noise that it samples with, apart from it (for verification by rejection),
// or the likeliest.
enum class Draws : uint8_t { Coupled, Apart, Likeliest };

struct DraftSetup {
  DraftKind kind;
  int32_t n_draft_max;          // of one sequence
  int32_t n_block_rows = 0;     // Block: more than first_logits_row
  int32_t first_logits_row = 0; // Block: of a block; logits of the rows from it on are of draft 0, 1, ..
  int32_t mask_token = 0;       // Block: of all rows but the first
  BufferRef target_hidden{};    // Chain: rows of the target's arena, as wide as the draft program's given rows
  bool gives_hidden = false;    // whether modules' `hidden` is there: a chain of more than one draft needs it
  Draws draws = Draws::Coupled;
};

// A program that drafts. A block has one; a chain as many as it has first drafts that are each of a module of its own, in order.
struct DraftModule {
  std::unique_ptr<Program> program; // sealed, over the pages that the steps' target uses; all of one width
  BufferRef hidden{};               // rows of its arena
};

// What steps take and how often drafts come, for the choice of how many to compute. Immutable once made.
struct DraftPolicy {
  std::vector<double> step_seconds; // of 1, 2, .. rows; empty: compute all that is planned
  std::vector<double> chances;      // a factor on each position's confidence; the last holds for those behind it; empty: 1

  // Beyond the table it goes on by the table's mean slope.
  double seconds(int64_t n_rows) const;
};

// One draft that may be computed.
struct DraftOffer {
  double survival; // chance that it and all before it come
  int32_t draft, seq;
};

// Chooses how many of each sequence's drafts to compute in a step that has n_rows rows without any: as many as make the most tokens a
// second, a prompt's among them, likeliest first, ties by position, then by sequence. counts: in, how many there are; out, how many to
// compute. confidence[s]: of sequence s's drafts, none of them NaN. offers: scratch. stops_early: at the first draft that makes the step no
// better, without a look at later ones, as verification by rejection needs it (spec.budget.share says why).
void choose_drafts(const DraftPolicy& policy, std::span<const float* const> confidence, int64_t n_rows, std::span<int32_t> counts,
                   std::vector<DraftOffer>& offers, bool stops_early = false);

// One sequence of a step that has sampled.
struct DraftSequence {
  int32_t slot;
  int32_t first_row;     // its first row of the step
  int32_t start, n_rows; // where its rows stand; those from n_tokens - 1 on were of drafts that did not come
  int64_t n_tokens;      // of the slot by now
  int64_t n_room;        // places that the slot may write to
  bool is_sampled;       // the last row was sampled
  bool is_drafted;       // it is to be drafted
  const int32_t* tokens; // of the slot
  const SamplerParams* params;
};

class Drafting {
 public:
  // max_tokens: of a pass; a step's, and for each slot one less than there are modules. n_token_ids: of the target.
  Drafting(std::vector<DraftModule> modules, std::shared_ptr<const DraftHead> head, DraftSetup setup, int64_t n_slots, int64_t max_len,
           int64_t max_tokens, int64_t n_token_ids);

  const DraftSetup& setup() const { return setup_; }

  void forget(int32_t slot) { slots_[static_cast<size_t>(slot)] = {}; }
  void set_policy(DraftPolicy policy) { policy_ = std::make_shared<const DraftPolicy>(std::move(policy)); }
  std::shared_ptr<const DraftPolicy> policy() const { return policy_; }

  // The slot's drafts if they begin at n_known, else none.
  std::span<const int32_t> drafts_of(int32_t slot, int64_t n_known) const;
  std::span<const float> confidence_of(int32_t slot, int64_t n_known) const;
  // What draft i of the slot was drawn from, if it was drawn apart; else nothing.
  DraftOdds odds_of(int32_t slot, int64_t i) const;
  // Ids that a draft is drawn from at most; 0: none is drawn apart.
  int64_t n_choices() const { return setup_.draws == Draws::Apart ? head_->n_choices() : 0; }

  // Drafts n_draft tokens of each sequence that is to be drafted, and leaves them in the slots.
  void run(std::span<const DraftSequence> seqs, int32_t n_draft, const Program& target, const int32_t* page_table,
           int64_t page_table_stride, Team& team);

  // Drafts that were no token, or came with a confidence that was no number; they and those behind them were dropped.
  int64_t n_bad() const { return n_bad_.load(std::memory_order_relaxed); }

 private:
  struct SlotDrafts {
    int64_t from = -1;
    int32_t n = 0;
    int64_t kept_from = 0, n_kept = 0; // places whose rows of the target are kept
    // Of them, those before a step that begins at `start`.
    int64_t n_before(int64_t start) const { return start <= kept_from + n_kept ? std::max<int64_t>(start - kept_from, 0) : 0; }
  };
  // A sequence of the pass at work whose drafts are picked.
  struct Pick {
    int32_t slot, anchor;
    int32_t first, n;        // drafts picked in this pass
    int32_t n_wanted;        // in all
    int32_t row, logits_row; // of the pass, of its first draft
    int64_t n_tokens;        // of the slot
    const SamplerParams* params;
  };

  int32_t* ids_of(int32_t slot) { return ids_.data() + static_cast<int64_t>(slot) * setup_.n_draft_max; }
  float* chances_of(int32_t slot) { return chances_.data() + static_cast<int64_t>(slot) * setup_.n_draft_max; }
  int64_t n_modules() const { return static_cast<int64_t>(modules_.size()); }
  uint8_t* kept_row(int64_t slot, int64_t i) { return kept_->data() + (slot * (n_modules() - 1) + i) * row_bytes_; }
  const uint8_t* target_row(int64_t i) const {
    return target_->arena() + setup_.target_hidden.offset + i * setup_.target_hidden.stride_bytes;
  }
  const uint8_t* hidden_row(size_t module, int64_t i) const {
    const DraftModule& m = modules_[module];
    return m.program->arena() + m.hidden.offset + i * m.hidden.stride_bytes;
  }
  int32_t n_wanted(const DraftSequence& seq) const;
  int32_t token_at(const DraftSequence& seq, int64_t pos);
  void clear();
  void add_row(int32_t token, int64_t pos);
  void end_sequence(int32_t slot, int64_t start, int32_t n_logits);
  void begin_block();
  void begin_module();
  void copy_given(int32_t thread, int32_t n_threads);
  void pick(int32_t thread, int32_t n_threads);
  bool take(const Pick& pick);
  bool go_on();
  void look();
  void keep_rows(const DraftSequence& seq);

  std::vector<DraftModule> modules_;
  std::shared_ptr<const DraftHead> head_;
  DraftSetup setup_;
  int64_t max_len_, n_token_ids_;
  int64_t row_bytes_; // Chain: of a given row
  std::vector<SlotDrafts> slots_;
  std::vector<int32_t> ids_;                // [slots, n_draft_max]
  std::vector<float> chances_;              // [slots, n_draft_max]
  std::vector<int32_t> n_odds_, odds_ids_;  // [slots, n_draft_max], [.., n_choices]
  std::vector<double> odds_;                // [.., n_choices]
  std::vector<DraftHead::Scratch> scratch_; // [threads]
  std::shared_ptr<const DraftPolicy> policy_;
  std::atomic<int64_t> n_bad_{0};

  // The step and the pass at work; sized once.
  std::span<const DraftSequence> seqs_;
  int32_t n_draft_ = 0;
  const Program* target_ = nullptr;
  size_t module_ = 0;
  bool has_all_rows_ = false; // Chain: a module's first pass
  std::vector<int32_t> seq_slot_, seq_start_, seq_rows_, row_token_, row_pos_, row_seq_, logits_rows_, logits_seq_start_, logits_seq_rows_;
  std::vector<const uint8_t*> row_from_; // Chain, first pass of the first module: rows of the target
  std::vector<Pick> picks_;
  std::unique_ptr<Region> given_; // Chain: [max_tokens, given width]
  std::unique_ptr<Region> kept_;  // Chain: [slots, modules - 1, given width]
  StepView view_{};
};

} // namespace tiercel
