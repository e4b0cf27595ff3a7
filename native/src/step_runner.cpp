#include "tiercel/step_runner.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>

namespace tiercel {

StepRunner::StepRunner(std::unique_ptr<Program> program, StepLimits limits, std::vector<int32_t> cpus, std::unique_ptr<Drafting> drafting)
    : program_(std::move(program)),
      drafting_(std::move(drafting)),
      limits_(limits),
      tokens_(std::make_unique<Region>(limits.n_slots * limits.max_len * 4)),
      page_table_(std::make_unique<Region>(limits.n_slots * limits.pages_per_slot * 4)),
      slots_(static_cast<size_t>(limits.n_slots)),
      team_(program_->n_threads(), std::move(cpus)),
      copies_(program_->states(), program_->state_slot_bytes(), limits.n_snapshots) {
  const SamplerKernels kernels{program_->kernels()->argmax, program_->kernels()->exp_sum};
  for (int32_t t = 0; t < program_->n_threads(); ++t) sampler_scratch_.emplace_back(program_->vocab(), kernels);
  if (limits_.verification != Verification::Matching) {
    n_choices_ = std::max<int64_t>(drafting_ ? drafting_->n_choices() : 0, 1);
    row_p_.resize(static_cast<size_t>(limits_.max_rows * n_choices_));
    tested_.resize(sampler_scratch_.size());
    for (auto& of_thread : tested_) of_thread.reserve(static_cast<size_t>(limits_.max_rows));
  }
  const auto n_seqs = static_cast<size_t>(limits.n_slots), n_tokens = static_cast<size_t>(limits.max_tokens);
  for (Work& w : works_) {
    for (auto* v :
         {&w.seq_slot, &w.seq_start, &w.seq_tokens, &w.seq_trial, &w.trial_first, &w.trial_count, &w.seq_kept, &w.seq_tested, &w.seq_end})
      v->reserve(n_seqs);
    for (auto* v : {&w.seq_rows, &w.logits_seq_rows}) v->reserve(n_seqs + 1);
    w.logits_seq_start.reserve(n_seqs);
    for (auto* v : {&w.row_token, &w.row_pos, &w.row_seq, &w.row_segment}) v->reserve(n_tokens);
    w.logits_rows.reserve(static_cast<size_t>(limits.max_rows));
    w.row_is_sample.reserve(static_cast<size_t>(limits.max_rows));
    w.row_has_p.reserve(static_cast<size_t>(limits.max_rows));
  }
  if (drafting_) {
    for (auto* v : {&own_seqs_, &own_counts_}) v->reserve(n_seqs);
    draft_seqs_.reserve(n_seqs);
    own_confidence_.reserve(n_seqs);
    offers_.reserve(n_seqs * static_cast<size_t>(drafting_->setup().n_draft_max));
  }
  thread_ = std::thread([this] { serve(); });
}

StepRunner::~StepRunner() {
  {
    std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  queued_.notify_all();
  // A step that still waits for masks ends with what it has: nobody will read it.
  for (Work& w : works_) release_masks(w);
  thread_.join();
}

namespace {

// A seed for drafts' noise that differs where prompts do: one person's requests may have one seed, and what is drafted of one decides how
// many drafts of another are computed. The same request has the same again.
uint64_t seed_beside(uint64_t seed, std::span<const int32_t> prompt) {
  uint64_t h = seed;
  for (const int32_t token : prompt) { // SplitMix64 over what came before and the token
    h += 0x9E3779B97F4A7C15u + static_cast<uint64_t>(token);
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
    h ^= h >> 31;
  }
  return h;
}

} // namespace

void StepRunner::admit(int32_t slot, std::span<const int32_t> tokens, int64_t n_prompt, SamplerParams params, int64_t n_first) {
  std::memcpy(token_row(slot), tokens.data(), tokens.size_bytes());
  Slot& s = slots_[static_cast<size_t>(slot)];
  s.params = std::move(params);
  if (limits_.verification != Verification::Matching)
    s.params.apart_seed = seed_beside(s.params.seed, tokens.first(static_cast<size_t>(std::min<int64_t>(n_prompt, std::ssize(tokens)))));
  s.n_prompt = n_prompt;
  s.n_first = n_first;
  s.n_tokens = static_cast<int64_t>(tokens.size());
  s.n_pages = 0;
  if (drafting_) drafting_->forget(slot);
}

void StepRunner::set_pages(int32_t slot, int64_t first, std::span<const int32_t> pages) {
  auto* row = reinterpret_cast<int32_t*>(page_table_->data()) + slot * limits_.pages_per_slot;
  std::memcpy(row + first, pages.data(), pages.size_bytes());
  slots_[static_cast<size_t>(slot)].n_pages = first + static_cast<int64_t>(pages.size());
}

void StepRunner::ask_copy(int32_t slot, int32_t snapshot, bool is_save) {
  {
    std::lock_guard lock(mutex_);
    copies_.ask({slot, snapshot, is_save, n_queued_total_});
  }
  queued_.notify_all();
}

std::span<uint8_t> StepRunner::snapshot(int32_t snapshot, bool is_write) {
  std::unique_lock lock(mutex_);
  copied_.wait(lock, [&] { return !copies_.is_open(snapshot, is_write); });
  return {copies_.place(snapshot), static_cast<size_t>(copies_.state_bytes())};
}

const char* StepRunner::submit(const StepRequest& request) {
  if (n_submitted_ == kDepth) return "as many steps as may be are submitted already";
  int64_t n_tokens = 0, n_rows = 0, n_foretold = 0, n_trial = 0;
  const bool has_drafts = !request.draft_from.empty();
  if (request.n_draft < 0 || request.n_draft > (drafting_ ? drafting_->setup().n_draft_max : 0))
    return "more drafts than are made, or fewer than none";
  for (size_t s = 0; s < request.seq_slot.size(); ++s) {
    const int64_t count = request.seq_tokens[s], end = request.seq_start[s] + count;
    if (request.seq_slot[s] < 0 || request.seq_slot[s] >= limits_.n_slots) return "a slot is out of range";
    if (count < 1 || request.seq_start[s] < 0) return "a sequence computes no token or starts before 0";
    const bool needs_next =
        !limits_.is_pooling && (request.seq_samples[s] || request.seq_scores[s]); // the token after the last row is read or written
    if (end + (needs_next ? 1 : 0) > limits_.max_len) return "a sequence exceeds the slot's length";
    const bool is_drafting = has_drafts && request.draft_from[s] != -1;
    if (is_drafting && request.draft_from[s] < 0 && (!drafting_ || request.draft_from[s] != kOwnDrafts || request.n_drafts[s] != 0))
      return "own drafts where none are made, or such as are foretold";
    if (is_drafting && (limits_.is_pooling || !request.seq_samples[s] || request.seq_scores[s]))
      return "a sequence with drafts is not sampled";
    if (has_drafts && request.n_drafts[s] < 0) return "fewer drafts than none";
    n_foretold += has_drafts ? request.n_drafts[s] : 0;
    n_trial += is_drafting && count > 1 ? count : 0;
    if (!request.save_to.empty() && (request.save_to[s] < -1 || request.save_to[s] >= limits_.n_snapshots))
      return "no such place for a state";
    n_tokens += count;
    n_rows += request.seq_scores[s] || is_drafting ? count : (request.seq_samples[s] ? 1 : 0);
  }
  if (n_foretold != static_cast<int64_t>(request.draft_tokens.size())) return "as many drafts as are announced are needed";
  if (static_cast<int64_t>(request.seq_slot.size()) > limits_.n_slots) return "more sequences than slots";
  if (n_tokens > limits_.max_tokens) return "more tokens than a step may hold";
  if (program_->state_slot_bytes() > 0 && n_trial > program_->max_trial_rows())
    return "more rows with drafts than states can be taken back for";
  if (n_rows > limits_.max_rows) return "more rows with logits than a step may hold";
  if (static_cast<int64_t>(request.given.size()) != n_tokens * program_->given_width()) return "not one given row for each token";

  Work& w = works_[static_cast<size_t>(n_queued_total_ % kDepth)];
  w.step_id = request.step_id;
  w.seq_slot.assign(request.seq_slot.begin(), request.seq_slot.end());
  w.seq_start.assign(request.seq_start.begin(), request.seq_start.end());
  w.seq_tokens.assign(request.seq_tokens.begin(), request.seq_tokens.end());
  w.seq_samples.assign(request.seq_samples.begin(), request.seq_samples.end());
  w.seq_scores.assign(request.seq_scores.begin(), request.seq_scores.end());
  w.given.assign(request.given.begin(), request.given.end());
  w.n_rows = static_cast<int32_t>(n_rows);
  w.draft_from.assign(request.draft_from.begin(), request.draft_from.end());
  w.n_drafts.assign(request.n_drafts.begin(), request.n_drafts.end());
  w.draft_tokens.assign(request.draft_tokens.begin(), request.draft_tokens.end());
  w.save_to.assign(request.save_to.begin(), request.save_to.end());
  w.save_at.assign(request.save_at.begin(), request.save_at.end());
  w.n_masks = 0;
  w.seq_mask.assign(request.seq_slot.size(), -1);
  for (size_t s = 0; s < request.seq_masked.size(); ++s) {
    if (!request.seq_masked[s] || !request.seq_samples[s]) continue;
    w.seq_mask[s] = w.n_masks;
    w.n_masks += w.is_drafting(s) ? request.seq_tokens[s] : 1;
  }
  w.masks.resize(static_cast<size_t>(w.n_masks * mask_words(program_->vocab()))); // written whole by set_masks
  w.has_masks.store(w.n_masks == 0);
  // Sized here, so that the step itself allocates nothing.
  StepOutcome& out = w.outcome;
  out.step_id = request.step_id;
  out.n_top = request.n_top;
  const auto rows = static_cast<size_t>(n_rows), n_top = static_cast<size_t>(std::max(request.n_top, 0));
  for (auto* v : {&out.row_seq, &out.row_pos, &out.row_token}) v->assign(rows, 0);
  out.row_logprob.assign(request.n_top >= 0 ? rows : 0, 0.0f);
  out.row_rank.assign(request.n_top >= 0 ? rows : 0, 0);
  out.top_ids.assign(rows * n_top, 0);
  out.top_logprobs.assign(rows * n_top, 0.0f);
  out.seq_drafted.assign(has_drafts ? request.seq_slot.size() : 0, 0);
  out.n_draft = request.n_draft;
  const size_t n_made = request.seq_slot.size() * static_cast<size_t>(request.n_draft);
  out.seq_drafts.assign(n_made, -1);
  out.seq_confidence.assign(n_made, 0.0f);
  out.draft_ns = 0;
  w.seq_room.clear();
  w.seq_last.assign(request.seq_slot.size(), 0);
  if (drafting_) {
    for (const int32_t slot : w.seq_slot) w.seq_room.push_back(slots_[static_cast<size_t>(slot)].n_pages * program_->page_tokens());
    w.policy = drafting_->policy();
  }
  out.rows.assign(limits_.is_pooling ? rows * static_cast<size_t>(program_->vocab()) : 0, 0.0f);
  {
    std::lock_guard lock(mutex_);
    ++n_queued_total_;
  }
  ++n_submitted_;
  queued_.notify_all();
  return nullptr;
}

void StepRunner::release_masks(Work& work) {
  work.has_masks.store(true, std::memory_order_release);
  work.has_masks.notify_all();
}

const char* StepRunner::set_masks(int64_t step_id, std::span<const uint32_t> masks) {
  for (int64_t k = n_queued_total_ - n_submitted_; k < n_queued_total_; ++k) {
    Work& w = works_[static_cast<size_t>(k % kDepth)];
    if (w.step_id != step_id || w.has_masks.load()) continue;
    if (masks.size() != w.masks.size()) return "not one whole mask for each masked sequence";
    std::copy(masks.begin(), masks.end(), w.masks.begin());
    release_masks(w);
    return nullptr;
  }
  return "no submitted step of this id waits for masks";
}

bool StepRunner::has_ended(int64_t n) {
  std::lock_guard lock(mutex_);
  return n_done_total_ >= n_collected_total_ + n;
}

int64_t StepRunner::wait(int64_t n) {
  std::unique_lock lock(mutex_);
  n_awaited_total_ = n_collected_total_ + (is_hurried_ ? 1 : n);
  done_.wait(lock, [&] { return n_done_total_ >= n_awaited_total_; });
  if (n > 1) is_hurried_ = false;
  return std::min(n, n_done_total_ - n_collected_total_);
}

void StepRunner::hurry() {
  {
    std::lock_guard lock(mutex_);
    is_hurried_ = true;
    n_awaited_total_ = std::min(n_awaited_total_, n_collected_total_ + 1);
  }
  done_.notify_all();
}

StepOutcome StepRunner::collect() {
  wait(1);
  std::lock_guard lock(mutex_);
  Work& w = works_[static_cast<size_t>(n_collected_total_ % kDepth)];
  ++n_collected_total_;
  --n_submitted_;
  return std::move(w.outcome);
}

void StepRunner::serve() {
  team_.adopt_caller();
  for (;;) {
    Work* work = nullptr;
    std::optional<StateCopy> copy;
    {
      std::unique_lock lock(mutex_);
      queued_.wait(lock, [&] { return is_closing_ || n_queued_total_ > n_done_total_ || copies_.is_due(n_done_total_); });
      if (is_closing_) return;
      if (copies_.is_due(n_done_total_)) copy = copies_.take_due();
      work = &works_[static_cast<size_t>(n_done_total_ % kDepth)];
    }
    if (copy) {
      copies_.run(*copy, team_);
      {
        std::lock_guard lock(mutex_);
        copies_.ended();
      }
      copied_.notify_all();
      continue;
    }
    run(*work);
    bool is_awaited = false;
    {
      std::lock_guard lock(mutex_);
      is_awaited = ++n_done_total_ >= n_awaited_total_;
    }
    if (is_awaited) done_.notify_all();
  }
}

// Decides where sequences with drafts begin and how many they compute, now that all steps before have ended.
void StepRunner::place_drafts(Work& w) {
  const int32_t* foretold = w.draft_tokens.data();
  for (size_t s = 0; s < w.draft_from.size(); foretold += w.n_drafts[s++]) {
    if (w.draft_from[s] < 0) continue;
    const int64_t from = w.draft_from[s], n_known = slots_[static_cast<size_t>(w.seq_slot[s])].n_tokens;
    const int64_t n_past = n_known - from; // of what was foretold, how much is there by now
    const bool is_on = n_past >= 0 && n_past <= w.n_drafts[s] && std::equal(foretold, foretold + n_past, token_row(w.seq_slot[s]) + from);
    place(w, s, is_on ? std::span(foretold + n_past, foretold + w.n_drafts[s]) : std::span<const int32_t>());
  }
  if (drafting_) place_own_drafts(w);
}

// Has a sequence begin at its last token, and compute as many of these drafts as are planned and have room.
void StepRunner::place(Work& w, size_t s, std::span<const int32_t> drafts) {
  const int64_t n_known = slots_[static_cast<size_t>(w.seq_slot[s])].n_tokens;
  const int64_t n = std::clamp<int64_t>(std::min<int64_t>(w.seq_tokens[s] - 1, static_cast<int64_t>(drafts.size())), 0,
                                        std::max<int64_t>(limits_.max_len - 1 - n_known, 0));
  // Where the next token goes: the sampler's history of each row then is what is drafted before it.
  std::copy_n(drafts.data(), n, token_row(w.seq_slot[s]) + n_known);
  w.seq_start[s] = static_cast<int32_t>(n_known - 1);
  w.seq_tokens[s] = static_cast<int32_t>(1 + n);
  w.outcome.seq_drafted[s] = static_cast<int32_t>(n);
}

void StepRunner::place_own_drafts(Work& w) {
  own_seqs_.clear(), own_counts_.clear(), own_confidence_.clear();
  int64_t n_rows = 0;
  for (size_t s = 0; s < w.seq_slot.size(); ++s) {
    n_rows += w.has_own(s) ? 1 : w.seq_tokens[s];
    if (!w.has_own(s)) continue;
    const int64_t n_known = slots_[static_cast<size_t>(w.seq_slot[s])].n_tokens;
    const auto confidence = drafting_->confidence_of(w.seq_slot[s], n_known);
    const int64_t n_room = std::max<int64_t>(std::min(w.seq_room[s], limits_.max_len - 1) - n_known, 0);
    own_seqs_.push_back(static_cast<int32_t>(s));
    own_confidence_.push_back(confidence.data());
    own_counts_.push_back(static_cast<int32_t>(std::min({static_cast<int64_t>(confidence.size()), int64_t{w.seq_tokens[s]} - 1, n_room})));
  }
  if (own_seqs_.empty()) return;
  choose_drafts(*w.policy, own_confidence_, n_rows, own_counts_, offers_, limits_.verification != Verification::Matching);
  for (size_t i = 0; i < own_seqs_.size(); ++i) {
    const auto s = static_cast<size_t>(own_seqs_[i]);
    const auto drafts = drafting_->drafts_of(w.seq_slot[s], slots_[static_cast<size_t>(w.seq_slot[s])].n_tokens);
    place(w, s, drafts.first(static_cast<size_t>(own_counts_[i])));
  }
}

// Sets apart rows for what the drafts of models with recurrent state are made of.
void StepRunner::place_trials(Work& w) {
  w.seq_trial.clear();
  if (program_->max_trial_rows() == 0 || w.draft_from.empty()) return;
  int32_t n = 0;
  for (size_t s = 0; s < w.draft_from.size(); ++s) {
    const bool is_tried = w.outcome.seq_drafted[s] > 0;
    w.seq_trial.push_back(is_tried ? n : -1);
    if (is_tried) n += w.seq_tokens[s];
  }
  if (n == 0) w.seq_trial.clear();
}

// Says which drafts are verified by rejection. Certain ones match as often as they would be accepted one by one.
void StepRunner::place_tests(Work& w) {
  w.seq_tested.assign(w.seq_slot.size(), 0);
  w.seq_end.assign(w.seq_slot.size(), -1);
  w.has_tests = false;
  if (limits_.verification == Verification::Matching) return;
  for (size_t s = 0; s < w.draft_from.size(); ++s) {
    const int32_t n = w.outcome.seq_drafted[s];
    if (n == 0 || slots_[static_cast<size_t>(w.seq_slot[s])].params.temperature == 0.0) continue;
    if (limits_.verification == Verification::Standard && (!w.has_own(s) || drafting_->odds_of(w.seq_slot[s], 0).ids.empty())) continue;
    w.seq_tested[s] = n;
    w.has_tests = true;
  }
}

void StepRunner::gather(Work& w) {
  place_drafts(w);
  place_tests(w);
  place_trials(w);
  for (auto* v : {&w.seq_rows, &w.logits_seq_rows}) v->assign(1, 0);
  w.logits_seq_start.clear();
  for (auto* v : {&w.row_token, &w.row_pos, &w.row_seq, &w.row_segment, &w.logits_rows}) v->clear();
  w.row_is_sample.clear();
  StepOutcome& out = w.outcome;
  for (size_t s = 0; s < w.seq_slot.size(); ++s) {
    const int32_t* ids = token_row(w.seq_slot[s]);
    const bool is_drafting = w.is_drafting(s);
    for (int32_t i = 0; i < w.seq_tokens[s]; ++i) {
      const int32_t pos = w.seq_start[s] + i;
      const bool is_last = i + 1 == w.seq_tokens[s];
      const bool is_sample = is_drafting || (is_last && w.seq_samples[s]);
      if (is_sample || w.seq_scores[s]) {
        const size_t r = w.logits_rows.size();
        w.logits_rows.push_back(static_cast<int32_t>(w.row_token.size()));
        w.row_is_sample.push_back(is_sample);
        out.row_seq[r] = static_cast<int32_t>(s);
        out.row_pos[r] = pos;
      }
      w.row_token.push_back(ids[pos]);
      w.row_pos.push_back(pos);
      w.row_seq.push_back(static_cast<int32_t>(s));
      w.row_segment.push_back(pos >= slots_[static_cast<size_t>(w.seq_slot[s])].n_first);
    }
    w.seq_rows.push_back(static_cast<int32_t>(w.row_token.size()));
    const auto n_logits = static_cast<int32_t>(w.logits_rows.size()) - w.logits_seq_rows.back();
    w.logits_seq_start.push_back(w.seq_start[s] + w.seq_tokens[s] - n_logits);
    w.logits_seq_rows.push_back(static_cast<int32_t>(w.logits_rows.size()));
  }
  w.n_rows = static_cast<int32_t>(w.logits_rows.size());
  w.row_has_p.assign(w.logits_rows.size(), 0);
}

void StepRunner::run(Work& work) {
  const auto start = std::chrono::steady_clock::now();
  gather(work);
  struct Job {
    StepRunner* self;
    Work* work;
    StepView view;
  } job{this, &work, {}};
  job.view = {static_cast<int32_t>(work.row_token.size()),
              static_cast<int32_t>(work.seq_slot.size()),
              work.n_rows,
              work.seq_slot.data(),
              work.seq_start.data(),
              work.seq_rows.data(),
              work.row_token.data(),
              work.row_pos.data(),
              work.row_seq.data(),
              work.logits_rows.data(),
              work.logits_seq_start.data(),
              work.logits_seq_rows.data(),
              reinterpret_cast<const int32_t*>(page_table_->data()),
              limits_.pages_per_slot,
              work.row_segment.data(),
              work.given.data(),
              work.seq_trial.empty() ? nullptr : work.seq_trial.data()};
  team_.run(
      [](void* arg, int32_t thread) {
        auto* j = static_cast<Job*>(arg);
        j->self->program_->replay(j->view, thread, j->self->team_);
        j->self->sample(*j->work, thread);
      },
      &job);
  if (!limits_.is_pooling) keep_tokens(work);
  keep_states(work, job.view);
  const auto end = std::chrono::steady_clock::now();
  work.outcome.compute_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(end - start).count();
  if (!drafting_) return;
  draft(work);
  work.outcome.draft_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - end).count();
}

// Has the drafter take in what the step computed, and draft of what was sampled.
void StepRunner::draft(Work& w) {
  StepOutcome& out = w.outcome;
  draft_seqs_.clear();
  for (size_t s = 0; s < w.seq_slot.size(); ++s) {
    const Slot& slot = slots_[static_cast<size_t>(w.seq_slot[s])];
    const bool is_sampled = w.seq_samples[s] != 0;
    draft_seqs_.push_back({w.seq_slot[s], w.seq_rows[s], w.seq_start[s], w.seq_tokens[s], slot.n_tokens, w.seq_room[s], is_sampled,
                           is_sampled && w.seq_last[s] >= 0 && out.n_draft > 0, token_row(w.seq_slot[s]), &slot.params});
  }
  drafting_->run(draft_seqs_, out.n_draft, *program_, reinterpret_cast<const int32_t*>(page_table_->data()), limits_.pages_per_slot, team_);
  for (size_t s = 0; s < draft_seqs_.size(); ++s) {
    if (!draft_seqs_[s].is_drafted) continue;
    const auto ids = drafting_->drafts_of(w.seq_slot[s], draft_seqs_[s].n_tokens);
    const auto confidence = drafting_->confidence_of(w.seq_slot[s], draft_seqs_[s].n_tokens);
    std::copy(ids.begin(), ids.end(), out.seq_drafts.begin() + static_cast<ptrdiff_t>(s) * out.n_draft);
    std::copy(confidence.begin(), confidence.end(), out.seq_confidence.begin() + static_cast<ptrdiff_t>(s) * out.n_draft);
  }
}

// Writes the sampled tokens, and drops the rows behind a draft that was not the token. The next step may already be queued and reads
// them: it is done before this one counts as done.
void StepRunner::keep_tokens(Work& w) {
  StepOutcome& out = w.outcome;
  const auto n_top = static_cast<size_t>(std::max(out.n_top, 0));
  size_t n_kept = 0;
  w.seq_kept.clear();
  for (size_t s = 0; s < w.seq_slot.size(); ++s) {
    Slot& slot = slots_[static_cast<size_t>(w.seq_slot[s])];
    int32_t* ids = token_row(w.seq_slot[s]);
    bool is_on = true;
    const size_t n_kept_before = n_kept;
    for (auto r = static_cast<size_t>(w.logits_seq_rows[s]); is_on && r < static_cast<size_t>(w.logits_seq_rows[s + 1]); ++r, ++n_kept) {
      if (n_kept != r) {
        for (auto* v : {&out.row_seq, &out.row_pos, &out.row_token}) (*v)[n_kept] = (*v)[r];
        if (out.n_top >= 0) out.row_logprob[n_kept] = out.row_logprob[r], out.row_rank[n_kept] = out.row_rank[r];
        std::copy_n(out.top_ids.data() + r * n_top, n_top, out.top_ids.data() + n_kept * n_top);
        std::copy_n(out.top_logprobs.data() + r * n_top, n_top, out.top_logprobs.data() + n_kept * n_top);
      }
      if (!w.row_is_sample[r]) continue;
      const int64_t at = int64_t{out.row_pos[n_kept]} + 1;
      const int32_t token = out.row_token[n_kept];
      is_on = token >= 0 && token == ids[at] && static_cast<int32_t>(r) != w.seq_end[s];
      // A failed row (-1) still needs a valid id: the sequence's next row may be in flight and is thrown away.
      ids[at] = std::max(token, 0);
      slot.n_tokens = at + 1;
      w.seq_last[s] = token;
    }
    w.seq_kept.push_back(static_cast<int32_t>(n_kept - n_kept_before));
  }
  for (auto* v : {&out.row_seq, &out.row_pos, &out.row_token}) v->resize(n_kept);
  out.row_logprob.resize(out.n_top >= 0 ? n_kept : 0);
  out.row_rank.resize(out.n_top >= 0 ? n_kept : 0);
  out.top_ids.resize(n_kept * n_top);
  out.top_logprobs.resize(n_kept * n_top);
}

// Takes recurrent states over the rows that are right, and copies those that are to be saved on the way.
void StepRunner::keep_states(Work& w, const StepView& view) {
  if (w.seq_trial.empty() && w.save_to.empty()) return;
  const auto is_tried = [&](size_t s) { return !w.seq_trial.empty() && w.seq_trial[s] >= 0; };
  const auto n_to_save = [&](size_t s) { return w.save_to.empty() || w.save_to[s] < 0 ? 0 : w.save_at[s] - w.seq_start[s]; };
  bool has_more = false;
  w.trial_first.assign(w.seq_slot.size(), 0);
  w.trial_count.assign(w.seq_kept.begin(), w.seq_kept.end());
  for (size_t s = 0; s < w.seq_slot.size(); ++s) {
    const int32_t n = n_to_save(s);
    if (!is_tried(s) || n < 1 || n >= w.seq_kept[s]) continue;
    w.trial_count[s] = n;
    has_more = true;
  }
  advance_states(w, view);
  for (size_t s = 0; s < w.seq_slot.size(); ++s)
    if (const int32_t n = n_to_save(s); n >= 1 && (is_tried(s) ? n <= w.seq_kept[s] : n == w.seq_tokens[s]))
      copies_.run({w.seq_slot[s], w.save_to[s], true, 0}, team_);
  if (!has_more) return;
  for (size_t s = 0; s < w.seq_slot.size(); ++s) {
    w.trial_first[s] = w.trial_count[s];
    w.trial_count[s] = w.seq_kept[s] - w.trial_count[s];
  }
  advance_states(w, view);
}

void StepRunner::advance_states(Work& w, const StepView& view) {
  if (w.seq_trial.empty()) return;
  struct Job {
    StepRunner* self;
    const StepView* view;
    TrialRows rows;
  } job{this, &view, {w.trial_first.data(), w.trial_count.data()}};
  team_.run(
      [](void* arg, int32_t thread) {
        auto* j = static_cast<Job*>(arg);
        j->self->program_->advance(*j->view, j->rows, thread, j->self->team_);
      },
      &job);
}

void StepRunner::sample(Work& w, int32_t thread) {
  StepOutcome& out = w.outcome;
  if (limits_.is_pooling) {
    const auto width = static_cast<size_t>(program_->vocab());
    for (int64_t r = thread; r < w.n_rows; r += program_->n_threads())
      std::memcpy(out.rows.data() + static_cast<size_t>(r) * width, program_->logits_row(r), width * sizeof(float));
    return;
  }
  SamplerScratch& scratch = sampler_scratch_[static_cast<size_t>(thread)];
  // Masks mostly are there long before; sleeping lets the thread that makes them have this core.
  w.has_masks.wait(false, std::memory_order_acquire);
  for (int64_t r = thread; r < w.n_rows; r += program_->n_threads()) {
    const auto i = static_cast<size_t>(r);
    const auto s = static_cast<size_t>(out.row_seq[i]);
    const TopOut top = top_of(out, i);
    if (!w.row_is_sample[i])
      put(out, i, score_row(logits_of(i), token_row(w.seq_slot[s])[out.row_pos[i] + 1], scratch, top));
    else if (static_cast<int32_t>(r) - w.logits_seq_rows[s] < w.seq_tested[s])
      test_row(w, i, scratch);
    else
      put(out, i, sample_row(params_of(w, s), sample_row_of(w, i), scratch, out.n_top >= 0 ? &top : nullptr));
  }
  if (!w.has_tests) return;
  team_.barrier()->wait(team_.barrier(), thread);
  int32_t n_tested = 0;
  for (size_t s = 0; s < w.seq_tested.size(); ++s)
    if (w.seq_tested[s] > 0 && n_tested++ % program_->n_threads() == thread) settle(w, s, scratch, thread);
}

TopOut StepRunner::top_of(StepOutcome& out, size_t r) {
  const auto n_top = static_cast<size_t>(std::max(out.n_top, 0));
  return {static_cast<int32_t>(n_top), out.top_ids.data() + r * n_top, out.top_logprobs.data() + r * n_top};
}

void StepRunner::put(StepOutcome& out, size_t r, const SampleOut& result) {
  out.row_token[r] = result.token;
  if (out.n_top < 0) return;
  out.row_logprob[r] = result.logprob;
  out.row_rank[r] = result.rank;
}

SampleRow StepRunner::sample_row_of(const Work& w, size_t r) const {
  const auto s = static_cast<size_t>(w.outcome.row_seq[r]);
  int32_t m = w.seq_mask[s];
  if (m >= 0 && w.is_drafting(s)) m += static_cast<int32_t>(r) - w.logits_seq_rows[s];
  const auto n_words = static_cast<size_t>(mask_words(program_->vocab()));
  const auto mask =
      m < 0 ? std::span<const uint32_t>() : std::span<const uint32_t>(w.masks).subspan(static_cast<size_t>(m) * n_words, n_words);
  const Slot& slot = slots_[static_cast<size_t>(w.seq_slot[s])];
  return {logits_of(r), {token_row(w.seq_slot[s]), static_cast<size_t>(w.outcome.row_pos[r] + 1)}, slot.n_prompt, mask};
}

// What draft i of a sequence was drawn from, `token` being the draft itself: if nothing is known, it was certain.
DraftOdds StepRunner::odds_of(const Work& w, size_t s, int32_t i, const int32_t& token) const {
  static constexpr double kCertain = 1.0;
  const DraftOdds odds = w.has_own(s) ? drafting_->odds_of(w.seq_slot[s], i) : DraftOdds{};
  return odds.ids.empty() ? DraftOdds{{&token, 1}, {&kCertain, 1}} : odds;
}

// Finds the target's chances of what the draft behind this row was drawn from.
void StepRunner::test_row(Work& w, size_t r, SamplerScratch& scratch) {
  const auto s = static_cast<size_t>(w.outcome.row_seq[r]);
  const int32_t i = static_cast<int32_t>(r) - w.logits_seq_rows[s];
  const DraftOdds odds = odds_of(w, s, i, token_row(w.seq_slot[s])[w.outcome.row_pos[r] + 1]);
  w.row_has_p[r] = chances_of(params_of(w, s), sample_row_of(w, r), scratch, odds.ids, chances_of_row(r, odds.ids.size()));
}

// Accepts a sequence's drafts, all of whose rows were tested, and chooses what comes behind them.
void StepRunner::settle(Work& w, size_t s, SamplerScratch& scratch, int32_t thread) {
  StepOutcome& out = w.outcome;
  const SamplerParams& params = params_of(w, s);
  const auto first = static_cast<size_t>(w.logits_seq_rows[s]);
  const int32_t *drafts = token_row(w.seq_slot[s]) + out.row_pos[first] + 1, n_drafts = w.seq_tested[s];
  std::vector<TestedDraft>& tested = tested_[static_cast<size_t>(thread)];
  tested.clear();
  for (int32_t i = 0; i < n_drafts; ++i) {
    const size_t r = first + static_cast<size_t>(i);
    const DraftOdds odds = odds_of(w, s, i, drafts[i]);
    tested.push_back({drafts[i], odds, chances_of_row(r, w.row_has_p[r] ? odds.ids.size() : 0)});
  }
  const auto [n, joint] = accept_drafts(limits_.verification, tested, params.apart_seed, static_cast<uint32_t>(out.row_pos[first] + 1));
  for (int32_t i = 0; i < n; ++i) {
    const size_t r = first + static_cast<size_t>(i);
    out.row_token[r] = drafts[i];
    if (out.n_top >= 0) put(out, r, score_row(logits_of(r), drafts[i], scratch, top_of(out, r), params.told_ids));
  }
  const size_t last = first + static_cast<size_t>(n);
  w.seq_end[s] = static_cast<int32_t>(last);
  if (n == n_drafts) return; // the row behind the last draft was sampled
  const TopOut top = top_of(out, last);
  const TopOut* told = out.n_top >= 0 ? &top : nullptr;
  const SampleRow row = sample_row_of(w, last);
  put(out, last,
      w.row_has_p[last] ? sample_residual(params, row, scratch, tested[static_cast<size_t>(n)].odds, joint, told)
                        : sample_row(params, row, scratch, told));
}

} // namespace tiercel
