#include "tiercel/drafting.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tiercel {

double DraftPolicy::seconds(int64_t n_rows) const {
  const auto n = static_cast<int64_t>(step_seconds.size());
  if (n_rows <= n) return step_seconds[static_cast<size_t>(std::max<int64_t>(n_rows, 1) - 1)];
  const double slope = n > 1 ? (step_seconds.back() - step_seconds.front()) / static_cast<double>(n - 1) : 0.0;
  return step_seconds.back() + std::max(slope, 0.0) * static_cast<double>(n_rows - n);
}

void choose_drafts(const DraftPolicy& policy, std::span<const float* const> confidence, int64_t n_rows, std::span<int32_t> counts,
                   std::vector<DraftOffer>& offers, bool stops_early) {
  if (policy.step_seconds.empty()) return;
  offers.clear();
  for (size_t s = 0; s < counts.size(); ++s) {
    double survival = 1.0;
    for (int32_t i = 0; i < counts[s]; ++i) {
      const std::vector<double>& chances = policy.chances;
      const double factor = chances.empty() ? 1.0 : chances[std::min(static_cast<size_t>(i), chances.size() - 1)];
      survival *= std::min(std::max(double{confidence[s][i]} * factor, 0.0), 1.0);
      offers.push_back({survival, i, static_cast<int32_t>(s)});
    }
  }
  // A total order, so that equal chances are no accident of the sort; and no draft comes before those that it stands on.
  std::sort(offers.begin(), offers.end(), [](const DraftOffer& a, const DraftOffer& b) {
    if (a.survival != b.survival) return a.survival > b.survival;
    return a.draft != b.draft ? a.draft < b.draft : a.seq < b.seq;
  });
  double expected = static_cast<double>(n_rows), best = expected / policy.seconds(n_rows);
  size_t n_best = 0;
  for (size_t n = 1; n <= offers.size(); ++n) {
    expected += offers[n - 1].survival;
    const double rate = expected / policy.seconds(n_rows + static_cast<int64_t>(n));
    if (rate > best)
      best = rate, n_best = n;
    else if (stops_early)
      break;
  }
  std::fill(counts.begin(), counts.end(), 0);
  for (size_t n = 0; n < n_best; ++n) ++counts[static_cast<size_t>(offers[n].seq)];
}

Drafting::Drafting(std::vector<DraftModule> modules, std::shared_ptr<const DraftHead> head, DraftSetup setup, int64_t n_slots,
                   int64_t max_len, int64_t max_tokens, int64_t n_token_ids)
    : modules_(std::move(modules)),
      head_(std::move(head)),
      setup_(setup),
      max_len_(max_len),
      n_token_ids_(n_token_ids),
      row_bytes_(modules_[0].program->given_width() * 4),
      slots_(static_cast<size_t>(n_slots)),
      ids_(static_cast<size_t>(n_slots * setup.n_draft_max)),
      chances_(static_cast<size_t>(n_slots * setup.n_draft_max)),
      n_odds_(n_choices() > 0 ? chances_.size() : 0),
      odds_ids_(n_odds_.size() * static_cast<size_t>(n_choices())),
      odds_(odds_ids_.size()),
      policy_(std::make_shared<const DraftPolicy>()),
      given_(std::make_unique<Region>(max_tokens * row_bytes_)),
      kept_(std::make_unique<Region>(n_slots * (n_modules() - 1) * row_bytes_)) {
  for (int32_t t = 0; t < modules_[0].program->n_threads(); ++t) scratch_.emplace_back(*head_);
  const auto n_seqs = static_cast<size_t>(n_slots + 1), n_tokens = static_cast<size_t>(max_tokens);
  for (auto* v : {&seq_slot_, &seq_start_, &seq_rows_, &logits_seq_start_, &logits_seq_rows_}) v->reserve(n_seqs);
  for (auto* v : {&row_token_, &row_pos_, &row_seq_, &logits_rows_}) v->reserve(n_tokens);
  row_from_.reserve(n_tokens);
  picks_.reserve(n_seqs);
}

std::span<const int32_t> Drafting::drafts_of(int32_t slot, int64_t n_known) const {
  const SlotDrafts& s = slots_[static_cast<size_t>(slot)];
  return {ids_.data() + int64_t{slot} * setup_.n_draft_max, s.from == n_known ? static_cast<size_t>(s.n) : 0};
}

std::span<const float> Drafting::confidence_of(int32_t slot, int64_t n_known) const {
  const SlotDrafts& s = slots_[static_cast<size_t>(slot)];
  return {chances_.data() + int64_t{slot} * setup_.n_draft_max, s.from == n_known ? static_cast<size_t>(s.n) : 0};
}

DraftOdds Drafting::odds_of(int32_t slot, int64_t i) const {
  if (n_odds_.empty()) return {};
  const auto at = static_cast<size_t>(int64_t{slot} * setup_.n_draft_max + i), n = static_cast<size_t>(n_odds_[at]);
  const size_t from = at * static_cast<size_t>(n_choices());
  return {{odds_ids_.data() + from, n}, {odds_.data() + from, n}};
}

// A draft needs a place of its own in the slot's pages, and one after it for the token that its row gives.
int32_t Drafting::n_wanted(const DraftSequence& seq) const {
  if (!seq.is_drafted) return 0;
  const int64_t n_room = std::min(seq.n_room, max_len_ - 1) - seq.n_tokens;
  return static_cast<int32_t>(std::clamp<int64_t>(n_room, 0, n_draft_));
}

// Known, or a draft of this step; where it is neither, the first id for all.
int32_t Drafting::token_at(const DraftSequence& seq, int64_t pos) {
  if (pos < seq.n_tokens) return seq.tokens[pos];
  const int64_t i = pos - seq.n_tokens;
  return seq.is_sampled && i < slots_[static_cast<size_t>(seq.slot)].n ? ids_of(seq.slot)[i] : 0;
}

void Drafting::clear() {
  for (auto* v : {&seq_slot_, &seq_start_, &row_token_, &row_pos_, &row_seq_, &logits_rows_, &logits_seq_start_}) v->clear();
  row_from_.clear();
  for (auto* v : {&seq_rows_, &logits_seq_rows_}) v->assign(1, 0);
}

void Drafting::add_row(int32_t token, int64_t pos) {
  row_token_.push_back(token);
  row_pos_.push_back(static_cast<int32_t>(pos));
  row_seq_.push_back(static_cast<int32_t>(seq_slot_.size()));
}

// Ends a sequence whose rows were just added, the first at position `start`; the last n_logits of them get logits.
void Drafting::end_sequence(int32_t slot, int64_t start, int32_t n_logits) {
  const auto n_rows = static_cast<int32_t>(row_token_.size());
  seq_slot_.push_back(slot);
  seq_start_.push_back(static_cast<int32_t>(start));
  for (int32_t r = n_rows - n_logits; r < n_rows; ++r) logits_rows_.push_back(r);
  logits_seq_start_.push_back(row_pos_.back() + 1 - n_logits);
  seq_rows_.push_back(n_rows);
  logits_seq_rows_.push_back(static_cast<int32_t>(logits_rows_.size()));
}

// A block ends where the slot's places do, though the drafter is used to longer ones.
void Drafting::begin_block() {
  for (const DraftSequence& seq : seqs_) {
    const int64_t start = seq.n_tokens - 1, n_places = std::min(seq.n_room, max_len_) - start;
    const auto n_rows = static_cast<int32_t>(std::clamp<int64_t>(n_places, 0, setup_.n_block_rows));
    const int32_t n_logits = n_rows - setup_.first_logits_row, n = std::min(n_wanted(seq), n_logits);
    if (n <= 0) continue;
    picks_.push_back({seq.slot, seq.tokens[start], 0, n, n, static_cast<int32_t>(row_token_.size()) + setup_.first_logits_row,
                      static_cast<int32_t>(logits_rows_.size()), seq.n_tokens, seq.params});
    for (int32_t i = 0; i < n_rows; ++i) add_row(i == 0 ? seq.tokens[start] : setup_.mask_token, start + i);
    end_sequence(seq.slot, start, n_logits);
  }
}

// Rows behind the slot's end were of drafts that did not come: what they left is written again before it is read.
void Drafting::begin_module() {
  const auto module = static_cast<int32_t>(module_);
  for (const DraftSequence& seq : seqs_) {
    const SlotDrafts& slot = slots_[static_cast<size_t>(seq.slot)];
    // The token after a prompt's last row is not known where that is not sampled.
    const int64_t n_known = seq.is_sampled ? seq.n_tokens : int64_t{seq.start} + seq.n_rows + 1;
    const int64_t n_rows = std::min<int64_t>(seq.n_rows, n_known - 1 - seq.start), n_before = slot.n_before(seq.start);
    if (n_rows <= 0) continue;
    for (int64_t i = -n_before; i < n_rows; ++i) {
      add_row(token_at(seq, seq.start + i + 1 + module), seq.start + i);
      if (module > 0) continue;
      row_from_.push_back(i < 0 ? kept_row(seq.slot, seq.start + i - slot.kept_from) : target_row(seq.first_row + i));
    }
    const int32_t n = n_wanted(seq);
    const bool is_picked = module < n && slot.n == module;
    if (is_picked)
      picks_.push_back({seq.slot, token_at(seq, seq.n_tokens - 1 + module), module, 1, n, static_cast<int32_t>(row_token_.size()) - 1,
                        static_cast<int32_t>(logits_rows_.size()), seq.n_tokens, seq.params});
    end_sequence(seq.slot, seq.start - n_before, is_picked ? 1 : 0);
  }
}

// This thread's share of the rows that the target, or the module before, gave out.
void Drafting::copy_given(int32_t thread, int32_t n_threads) {
  const auto m = static_cast<int64_t>(row_token_.size());
  for (int64_t r = m * thread / n_threads; r < m * (thread + 1) / n_threads; ++r) {
    const uint8_t* from = module_ == 0 ? row_from_[static_cast<size_t>(r)] : hidden_row(module_ - 1, r);
    std::memcpy(given_->data() + r * row_bytes_, from, static_cast<size_t>(row_bytes_));
  }
}

void Drafting::pick(int32_t thread, int32_t n_threads) {
  const DraftModule& module = modules_[module_];
  const int64_t ld_hidden = module.hidden.stride_bytes / 4;
  for (size_t i = static_cast<size_t>(thread); i < picks_.size(); i += static_cast<size_t>(n_threads)) {
    const Pick& p = picks_[i];
    const float* logits = module.program->logits_row(p.logits_row);
    const size_t first = n_odds_.empty() ? 0 : static_cast<size_t>(int64_t{p.slot} * setup_.n_draft_max + p.first);
    const size_t first_choice = first * static_cast<size_t>(n_choices());
    const DraftHead::Kept kept{n_odds_.data() + first, odds_ids_.data() + first_choice, odds_.data() + first_choice};
    const DraftHead::Rows rows{logits,
                               module.program->logits_row(p.logits_row + 1) - logits,
                               setup_.gives_hidden ? reinterpret_cast<const float*>(hidden_row(module_, p.row)) : nullptr,
                               ld_hidden,
                               p.anchor,
                               setup_.draws == Draws::Likeliest ? nullptr : p.params,
                               p.n_tokens + p.first,
                               n_odds_.empty() ? nullptr : &kept,
                               p.first};
    head_->pick(rows, p.n, scratch_[static_cast<size_t>(thread)], ids_of(p.slot) + p.first, chances_of(p.slot) + p.first);
  }
}

// Returns whether more is wanted of the sequence.
bool Drafting::take(const Pick& p) {
  SlotDrafts& slot = slots_[static_cast<size_t>(p.slot)];
  const int32_t* ids = ids_of(p.slot);
  float* chances = chances_of(p.slot);
  for (int32_t i = p.first; i < p.first + p.n; ++i) {
    if (ids[i] < 0 || ids[i] >= n_token_ids_ || std::isnan(chances[i])) {
      n_bad_.fetch_add(1, std::memory_order_relaxed);
      return false;
    }
    chances[i] = std::clamp(chances[i], 0.0f, 1.0f);
    slot.n = i + 1;
  }
  return slot.n < p.n_wanted;
}

// Takes what the pass gave; prepares a chain's next. Returns false when nothing is left to be computed.
bool Drafting::go_on() {
  clear();
  size_t n_left = 0;
  for (const Pick& p : picks_)
    if (take(p)) picks_[n_left++] = p;
  picks_.resize(n_left);
  if (module_ + 1 < modules_.size()) { // all of them: what they leave in the pages is read by the next step's
    ++module_;
    picks_.clear();
    begin_module();
    return true;
  }
  has_all_rows_ = false;
  for (size_t i = 0; i < n_left; ++i) {
    Pick& p = picks_[i];
    std::memcpy(given_->data() + static_cast<int64_t>(i) * row_bytes_, hidden_row(module_, p.row), static_cast<size_t>(row_bytes_));
    p.first = slots_[static_cast<size_t>(p.slot)].n;
    p.row = p.logits_row = static_cast<int32_t>(i);
    p.anchor = ids_of(p.slot)[p.first - 1];
    const int64_t pos = p.n_tokens - 1 + p.first - n_modules();
    add_row(p.anchor, pos);
    end_sequence(p.slot, pos, 1);
  }
  return n_left > 0;
}

// Keeps what the target gave out of the last rows: those of which a token that some module reads is not known.
void Drafting::keep_rows(const DraftSequence& seq) {
  SlotDrafts& slot = slots_[static_cast<size_t>(seq.slot)];
  const int64_t end = std::min<int64_t>(int64_t{seq.start} + seq.n_rows, seq.n_tokens - 1);
  if (end <= seq.start) return;
  const int64_t from = std::max(seq.start - slot.n_before(seq.start), seq.n_tokens - n_modules());
  for (int64_t pos = from; pos < end; ++pos)
    std::memmove(kept_row(seq.slot, pos - from),
                 pos < seq.start ? kept_row(seq.slot, pos - slot.kept_from) : target_row(seq.first_row + pos - seq.start),
                 static_cast<size_t>(row_bytes_));
  slot.kept_from = from, slot.n_kept = std::max<int64_t>(end - from, 0);
}

// Points the view at the pass's rows.
void Drafting::look() {
  view_.n_tokens = static_cast<int32_t>(row_token_.size());
  view_.n_seqs = static_cast<int32_t>(seq_slot_.size());
  view_.n_rows = static_cast<int32_t>(logits_rows_.size());
  view_.seq_slot = seq_slot_.data(), view_.seq_start = seq_start_.data(), view_.seq_rows = seq_rows_.data();
  view_.row_token = row_token_.data(), view_.row_pos = row_pos_.data(), view_.row_seq = row_seq_.data();
  view_.logits_rows = logits_rows_.data();
  view_.logits_seq_start = logits_seq_start_.data(), view_.logits_seq_rows = logits_seq_rows_.data();
}

void Drafting::run(std::span<const DraftSequence> seqs, int32_t n_draft, const Program& target, const int32_t* page_table,
                   int64_t page_table_stride, Team& team) {
  clear();
  picks_.clear();
  seqs_ = seqs, n_draft_ = n_draft, module_ = 0, target_ = &target;
  has_all_rows_ = setup_.kind == DraftKind::Chain;
  for (const DraftSequence& seq : seqs) {
    SlotDrafts& slot = slots_[static_cast<size_t>(seq.slot)];
    if (seq.is_sampled) slot.from = seq.n_tokens, slot.n = 0;
  }
  has_all_rows_ ? begin_module() : begin_block();
  if (row_token_.empty()) return;
  view_ = {};
  view_.page_table = page_table;
  view_.page_table_stride = page_table_stride;
  view_.given = reinterpret_cast<const float*>(given_->data());
  look();
  struct Job {
    Drafting* self;
    Team* team;
    bool goes_on;
  } job{this, &team, true};
  team.run(
      [](void* arg, int32_t thread) {
        auto* j = static_cast<Job*>(arg);
        Drafting& self = *j->self;
        Barrier* barrier = j->team->barrier();
        const int32_t n_threads = j->team->n_threads();
        while (j->goes_on) {
          if (self.has_all_rows_) {
            self.copy_given(thread, n_threads);
            barrier->wait(barrier, thread);
          }
          self.modules_[self.module_].program->replay(self.view_, thread, *j->team);
          self.pick(thread, n_threads);
          barrier->wait(barrier, thread);
          if (thread == 0) {
            j->goes_on = self.go_on();
            self.look();
          }
          barrier->wait(barrier, thread);
        }
      },
      &job);
  if (n_modules() > 1)
    for (const DraftSequence& seq : seqs) keep_rows(seq);
}

} // namespace tiercel
