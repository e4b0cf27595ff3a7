// Slots, and the thread that replays steps over them one after the other.
//
// Thread rule: admit, set_pages, submit, wait and collect come from one caller thread. Steps run on the runner's own thread (the
// team's thread 0). A slot's rows are written by the caller only while no submitted step names it, but for page table entries, which are
// appended past those that submitted steps read, and the token after the last, which only the sampler writes. set_masks too comes from the
// caller thread: a step with masks computes its logits without them and waits for them before it samples.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "tiercel/drafting.hpp"
#include "tiercel/program.hpp"
#include "tiercel/sampler.hpp"
#include "tiercel/state_copies.hpp"

namespace tiercel {

struct StepLimits {
  int64_t n_slots;
  int64_t max_len;         // tokens of one slot
  int64_t max_tokens;      // rows of one step
  int64_t max_rows;        // rows with logits of one step
  int64_t pages_per_slot;  // page table row length
  int64_t n_token_ids;     // ids are 0 .. n_token_ids
  bool is_pooling = false; // the program's rows are the result: they are given out, and nothing is sampled
  int64_t n_snapshots = 0; // places for states of slots
  // Of drafts that are sampled. By rejection: those with odds of their own (Draws::Apart); by blocks also foretold ones, which are certain.
  Verification verification = Verification::Matching;
};

// What a submitted step asks for; spans are copied.
struct StepRequest {
  int64_t step_id;
  std::span<const int32_t> seq_slot, seq_start, seq_tokens;
  std::span<const uint8_t> seq_samples, seq_scores;
  int32_t n_top;                            // -1: no log-probabilities
  std::span<const uint8_t> seq_masked = {}; // its sampled rows wait for a mask each; empty: none does
  std::span<const float> given = {};        // [tokens of the step, the program's given width]
  // Drafts; empty: none. A sequence whose draft_from is not -1 begins at its slot's last token, wherever that is when the step runs, at
  // most at seq_start. draft_tokens, n_drafts of each sequence one after the other, foretell its tokens from position draft_from on. If
  // those already there are as foretold, the ones after them are computed too, up to seq_tokens rows in all, and each row is sampled. The
  // rows that count end with the first whose token is not the one foretold; seq_tokens rows, tokens and masks are planned for.
  // A sequence whose draft_from is kOwnDrafts begins there too; its drafts are those that an earlier step left in the slot (Drafting), if
  // they begin at its end; how many of them are computed is chosen for all such sequences of the step together, by the policy set last.
  std::span<const int32_t> draft_from = {}, n_drafts = {}, draft_tokens = {};
  // Of each sequence, a place for a copy of its recurrent state as it stands at position save_at, inside what the step turns out to take it
  // over; -1: none, as for all if empty. Where it does not come by, nothing is copied.
  std::span<const int32_t> save_to = {}, save_at = {};
  int32_t n_draft = 0; // drafts to make of each sequence once it has sampled
};
inline constexpr int32_t kOwnDrafts = -2;

struct StepOutcome {
  int64_t step_id = 0;
  std::vector<int32_t> row_seq, row_pos, row_token, row_rank;
  std::vector<float> row_logprob;
  std::vector<int32_t> top_ids; // [R, n_top]
  std::vector<float> top_logprobs;
  int32_t n_top = -1;
  std::vector<float> rows;          // [R, width] of a pooling program
  std::vector<int32_t> seq_drafted; // drafts that each sequence computed; empty: the step was asked for none
  int64_t compute_ns = 0;           // without draft_ns
  std::vector<int32_t> seq_drafts;  // [S, n_draft] what was drafted; -1: nothing
  std::vector<float> seq_confidence;
  int32_t n_draft = 0;
  int64_t draft_ns = 0;
};

class StepRunner {
 public:
  static constexpr int32_t kDepth = 8; // steps that may be submitted and not collected

  // drafting: over the same pages as the program; or nullptr.
  StepRunner(std::unique_ptr<Program> program, StepLimits limits, std::vector<int32_t> cpus, std::unique_ptr<Drafting> drafting = nullptr);
  ~StepRunner();
  StepRunner(const StepRunner&) = delete;
  StepRunner& operator=(const StepRunner&) = delete;

  // REQUIRES: the slot is free; ids are inside the vocabulary; tokens fit max_len.
  // n_first: tokens before a pair's second text.
  void admit(int32_t slot, std::span<const int32_t> tokens, int64_t n_prompt, SamplerParams params, int64_t n_first = INT64_MAX);
  void set_pages(int32_t slot, int64_t first, std::span<const int32_t> pages);

  // Copy a slot's recurrent state to a place for snapshots, or back: after all steps submitted so far, before any later one.
  // REQUIRES: both are in range. The slot may be released and admitted again meanwhile.
  void save_state(int32_t slot, int32_t snapshot) { ask_copy(slot, snapshot, true); }
  void load_state(int32_t slot, int32_t snapshot) { ask_copy(slot, snapshot, false); }

  // A place's bytes, once no copy to it (or from it, for `is_write`) is left to be made. REQUIRES: the steps before such copies can end
  // without the caller. Nobody else touches the place until a copy that names it is asked for.
  std::span<uint8_t> snapshot(int32_t snapshot, bool is_write);

  // Returns nullptr when the step was queued, else why it does not fit the limits (and nothing changed).
  const char* submit(const StepRequest& request);
  // Gives a submitted step its masks, uint32 [masked sequences, mask_words(V)] in their order. Once a step that has some, or it never ends.
  // Returns nullptr, or why they were not taken.
  const char* set_masks(int64_t step_id, std::span<const uint32_t> masks);
  // Whether the n oldest submitted steps have ended. REQUIRES: n <= n_submitted().
  bool has_ended(int64_t n);
  // Waits until they have, or until one has when somebody hurried the caller meanwhile or since the wait before; gives how many have.
  int64_t wait(int64_t n);
  // Ends a wait for several steps with the first of them. From any thread.
  void hurry();
  // Waits for the oldest submitted step. REQUIRES: one is submitted.
  StepOutcome collect();

  int64_t n_submitted() const { return n_submitted_; }
  Program& program() { return *program_; }
  Drafting* drafting() { return drafting_.get(); }
  const StepLimits& limits() const { return limits_; }
  std::span<int32_t> tokens_of(int32_t slot) { return {token_row(slot), static_cast<size_t>(limits_.max_len)}; }
  // The logits of row r of the step that ran last. REQUIRES: no step is running.
  std::span<const float> last_logits(int64_t r) const { return {program_->logits_row(r), static_cast<size_t>(program_->vocab())}; }

 private:
  struct Slot {
    SamplerParams params;
    int64_t n_prompt = 0, n_first = INT64_MAX;
    int64_t n_tokens = 0; // admitted or sampled; written by the runner's thread while a submitted step names the slot
    int64_t n_pages = 0;  // set since it was admitted; the caller's
  };
  // One submitted step: its arrays are sized once, for the limits.
  struct Work {
    int64_t step_id = 0;
    std::vector<int32_t> seq_slot, seq_start, seq_rows, seq_tokens;
    std::vector<uint8_t> seq_samples, seq_scores;
    std::vector<int32_t> row_token, row_pos, row_seq, row_segment, logits_rows, logits_seq_start, logits_seq_rows;
    std::vector<uint8_t> row_is_sample; // of logits rows
    std::vector<int32_t> seq_mask;      // which mask a sequence has; -1: none
    std::vector<uint32_t> masks;        // [n_masks, mask_words(V)]
    std::vector<float> given;           // [tokens, given width]
    int32_t n_masks = 0;
    std::atomic<bool> has_masks{true}; // masks are there, or none is waited for
    int32_t n_rows = 0;
    std::vector<int32_t> draft_from, n_drafts, draft_tokens, save_to, save_at; // as in StepRequest
    std::vector<int32_t> seq_trial, trial_first, trial_count;                  // of a step in which any is on trial
    std::vector<int32_t> seq_kept;                                             // rows that turned out right, of a step with drafts
    std::vector<int64_t> seq_room;                                             // places that the slot had when the step was submitted
    std::vector<int32_t> seq_last;                                             // the last sampled token that counts
    std::vector<int32_t> seq_tested;                                           // drafts that are verified by rejection
    std::vector<int32_t> seq_end;   // of those sequences, the logits row that ends what was accepted
    std::vector<uint8_t> row_has_p; // of logits rows whose draft is tested: there is a distribution
    bool has_tests = false;
    std::shared_ptr<const DraftPolicy> policy;

    bool is_drafting(size_t s) const { return !draft_from.empty() && draft_from[s] != -1; }
    bool has_own(size_t s) const { return !draft_from.empty() && draft_from[s] == kOwnDrafts; }
    StepOutcome outcome;
  };

  int32_t* token_row(int32_t slot) const { return reinterpret_cast<int32_t*>(tokens_->data()) + slot * limits_.max_len; }
  static void release_masks(Work& work);
  void ask_copy(int32_t slot, int32_t snapshot, bool is_save);
  void serve();
  void run(Work& work);
  void gather(Work& work);
  void place_drafts(Work& work);
  void place_own_drafts(Work& work);
  void place(Work& work, size_t s, std::span<const int32_t> drafts);
  void sample(Work& work, int32_t thread);
  void place_tests(Work& work);
  DraftOdds odds_of(const Work& work, size_t s, int32_t i, const int32_t& token) const;
  SampleRow sample_row_of(const Work& work, size_t r) const;
  const SamplerParams& params_of(const Work& work, size_t s) const { return slots_[static_cast<size_t>(work.seq_slot[s])].params; }
  std::span<const float> logits_of(size_t r) const {
    return {program_->logits_row(static_cast<int64_t>(r)), static_cast<size_t>(program_->vocab())};
  }
  std::span<double> chances_of_row(size_t r, size_t n) { return {row_p_.data() + r * static_cast<size_t>(n_choices_), n}; }
  static TopOut top_of(StepOutcome& out, size_t r);
  static void put(StepOutcome& out, size_t r, const SampleOut& result);
  void test_row(Work& work, size_t r, SamplerScratch& scratch);
  void settle(Work& work, size_t s, SamplerScratch& scratch, int32_t thread);
  void keep_tokens(Work& work);
  void place_trials(Work& work);
  void keep_states(Work& work, const StepView& view);
  void advance_states(Work& work, const StepView& view);
  void draft(Work& work);

  std::unique_ptr<Program> program_;
  std::unique_ptr<Drafting> drafting_; // or nullptr
  StepLimits limits_;
  std::unique_ptr<Region> tokens_;     // int32 [slots, max_len]
  std::unique_ptr<Region> page_table_; // int32 [slots, pages_per_slot]
  std::vector<Slot> slots_;
  std::vector<SamplerScratch> sampler_scratch_; // [threads]
  std::vector<DraftSequence> draft_seqs_;       // these: of the step at work
  std::vector<const float*> own_confidence_;
  std::vector<int32_t> own_seqs_, own_counts_;
  std::vector<DraftOffer> offers_;
  int64_t n_choices_ = 0;                        // ids that a draft was drawn from at most
  std::vector<double> row_p_;                    // [max_rows, n_choices]
  std::vector<std::vector<TestedDraft>> tested_; // [threads] of the sequence at work
  Team team_;

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable queued_, done_, copied_; // for the runner's thread, and for the caller
  std::array<Work, kDepth> works_;
  StateCopies copies_;
  int64_t n_submitted_ = 0; // submitted and not collected; written by the caller thread
  int64_t n_queued_total_ = 0, n_done_total_ = 0, n_collected_total_ = 0;
  int64_t n_awaited_total_ = 0; // how many must have ended: the caller is not woken before
  bool is_hurried_ = false;
  bool is_closing_ = false;
  std::thread thread_;
};

} // namespace tiercel
