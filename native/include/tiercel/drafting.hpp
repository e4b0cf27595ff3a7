// What a step does once it has sampled: it drafts what may come next, with a program of its own over the target's pages.
//
// Drafts belong to a slot and begin at a position: the end of its tokens when they were made. They are taken only where the slot ends
// there, so whatever happened to the slot meanwhile makes them void. All that is drafted of a sequence follows from its tokens and from the
// places that its pages have; never from what runs beside it. Nothing is written to a place that the slot had no page for.
//
// What a chain leaves at a place is made of the token after it too. So a prefix that is found in shared pages may, at its very last place,
// hold what another continuation left in the drafter's layers: one key of many, and of drafts only.
//
// Thread rule: forget and set_policy come from the step runner's caller thread, forget only while no submitted step names the slot;
// everything else from the runner's own thread.
#pragma once

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
// Chain: a first pass over the step's own rows, each with the token after it and what the target's program gave out of it; then passes of
// one row a sequence, with the draft before it and what the draft program itself gave out.
enum class DraftKind : uint8_t { Block, Chain };

struct DraftSetup {
  DraftKind kind;
  int32_t n_draft_max;          // of one sequence
  int32_t n_block_rows = 0;     // Block: more than first_logits_row
  int32_t first_logits_row = 0; // Block: of a block; logits of the rows from it on are of draft 0, 1, ..
  int32_t mask_token = 0;       // Block: of all rows but the first
  BufferRef target_hidden{};    // Chain: rows of the target's arena, as wide as the draft program's given rows
  BufferRef hidden{};           // rows of the draft program's arena
  bool gives_hidden = false;    // whether `hidden` is there: a chain of more than one draft needs it
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
// compute. confidence[s]: of sequence s's drafts, none of them NaN. offers: scratch.
void choose_drafts(const DraftPolicy& policy, std::span<const float* const> confidence, int64_t n_rows, std::span<int32_t> counts,
                   std::vector<DraftOffer>& offers);

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
  // The program is sealed, over the pages that the steps' target uses. n_token_ids: of the target.
  Drafting(std::unique_ptr<Program> program, std::shared_ptr<const DraftHead> head, DraftSetup setup, int64_t n_slots, int64_t max_len,
           int64_t max_tokens, int64_t n_token_ids);

  const DraftSetup& setup() const { return setup_; }
  Program& program() { return *program_; }

  void forget(int32_t slot) { slots_[static_cast<size_t>(slot)].from = -1; }
  void set_policy(DraftPolicy policy) { policy_ = std::make_shared<const DraftPolicy>(std::move(policy)); }
  std::shared_ptr<const DraftPolicy> policy() const { return policy_; }

  // The slot's drafts if they begin at n_known, else none.
  std::span<const int32_t> drafts_of(int32_t slot, int64_t n_known) const;
  std::span<const float> confidence_of(int32_t slot, int64_t n_known) const;

  // Drafts n_draft tokens of each sequence that is to be drafted, and leaves them in the slots.
  void run(std::span<const DraftSequence> seqs, int32_t n_draft, const Program& target, const int32_t* page_table,
           int64_t page_table_stride, Team& team);

  // Drafts that were no token, or came with a confidence that was no number; they and those behind them were dropped.
  int64_t n_bad() const { return n_bad_.load(std::memory_order_relaxed); }

 private:
  struct SlotDrafts {
    int64_t from = -1;
    int32_t n = 0;
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
  int32_t n_wanted(const DraftSequence& seq, int32_t n_draft) const;
  void clear();
  void add_row(int32_t token, int64_t pos);
  void end_sequence(int32_t slot, int64_t start, int32_t n_logits);
  void begin_block(std::span<const DraftSequence> seqs, int32_t n_draft);
  void begin_chain(std::span<const DraftSequence> seqs, int32_t n_draft);
  void copy_given(const Program& target, int32_t thread, int32_t n_threads);
  void pick(int32_t thread, int32_t n_threads);
  bool go_on();
  void look();

  std::unique_ptr<Program> program_;
  std::shared_ptr<const DraftHead> head_;
  DraftSetup setup_;
  int64_t max_len_, n_token_ids_;
  std::vector<SlotDrafts> slots_;
  std::vector<int32_t> ids_;                // [slots, n_draft_max]
  std::vector<float> chances_;              // [slots, n_draft_max]
  std::vector<DraftHead::Scratch> scratch_; // [threads]
  std::shared_ptr<const DraftPolicy> policy_;
  std::atomic<int64_t> n_bad_{0};

  // The pass at work; sized once.
  std::vector<int32_t> seq_slot_, seq_start_, seq_rows_, row_token_, row_pos_, row_seq_, logits_rows_, logits_seq_start_, logits_seq_rows_;
  std::vector<int32_t> row_from_; // Chain, first pass: which of the step's rows
  std::vector<Pick> picks_;
  std::unique_ptr<Region> given_; // Chain: [max_tokens, given width]
  StepView view_{};
};

} // namespace tiercel
