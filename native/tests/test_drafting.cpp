// Drafting inside the step, with programs of three ops: logits[v] = <embedding of the token, row v of the head>.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>

#include "check.hpp"
#include "tiercel/packed.hpp"
#include "tiercel/step_runner.hpp"

namespace tiercel {
namespace {

constexpr int64_t kVocab = 40, kWidth = 32, kSlots = 3, kMaxLen = 40, kMaxTokens = 16, kMaxRows = 16, kBlockRows = 4;
constexpr int32_t kDrafts = 3;
constexpr size_t kModules = 3;
constexpr int64_t kMaxPass = kMaxTokens + kSlots * (kModules - 1); // with the rows that are computed again

std::vector<float> random_matrix(int64_t n, uint32_t seed) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> m(static_cast<size_t>(n * kWidth));
  for (float& x : m) x = uniform(rng);
  return m;
}

// The token after a token is the same for the target and for a chain: what that drafts comes.
struct Model {
  std::vector<float> table = random_matrix(kVocab, 1), head = random_matrix(kVocab, 2);
  PackedStore packed_table{Format::F32, kVocab, kWidth, false}, packed_head{Format::F32, kVocab, kWidth, false};
  PackedStore packed_broken{Format::F32, kVocab, kWidth, false}; // the head with a NaN
  bool is_broken = false;

  Model() {
    packed_table.pack(reinterpret_cast<const uint8_t*>(table.data()), kWidth * 4, nullptr, 1);
    packed_head.pack(reinterpret_cast<const uint8_t*>(head.data()), kWidth * 4, nullptr, 1);
    std::vector<float> broken = head;
    broken[5] = std::numeric_limits<float>::quiet_NaN();
    packed_broken.pack(reinterpret_cast<const uint8_t*>(broken.data()), kWidth * 4, nullptr, 1);
  }

  static constexpr BufferRef kX{0, kWidth * 4}, kRows{kMaxPass * kWidth * 4, kWidth * 4},
      kLogits{(kMaxPass + kMaxRows) * kWidth * 4, kVocab * 4}, kGiven{kLogits.offset + kMaxRows * kVocab * 4, kWidth * 4};

  std::unique_ptr<Program> program(int32_t n_threads, bool is_chain, const PackedStore& last) const {
    auto p = std::make_unique<Program>(kernel_level(n_kernel_levels() - 1), n_threads);
    if (is_chain) p->add({Rows::Tokens, op::Given{kWidth, kGiven}}); // and it gives out what it is given
    p->add({Rows::Tokens, op::Embed{packed_table.view(), 1.0f, kX, false, {}}});
    p->add({Rows::Logits, op::SelectRows{kX, kWidth, kRows}});
    p->add({Rows::Logits, op::Linear{kRows, false, kWidth, {last.view()}, {{}}, {{nullptr, nullptr, 0}}, kLogits, std::nullopt}});
    p->seal(kGiven.offset + kMaxPass * kWidth * 4, KvPool{}, kLogits, kVocab, kMaxPass, kMaxRows, kSlots, kMaxLen);
    return p;
  }

  // programs: where to say what the modules' are.
  std::unique_ptr<StepRunner> runner(DraftKind kind, int32_t n_threads = 2, size_t n_modules = 1,
                                     std::vector<const Program*>* programs = nullptr,
                                     Verification verification = Verification::Matching) const {
    const bool is_chain = kind == DraftKind::Chain;
    DraftSetup setup{kind, kDrafts};
    if (!is_chain) setup.n_block_rows = kBlockRows, setup.first_logits_row = 1, setup.mask_token = 7;
    setup.target_hidden = kX;
    setup.gives_hidden = true;
    if (verification != Verification::Matching) setup.draws = Draws::Apart;
    std::vector<DraftModule> modules;
    while (modules.size() < n_modules) {
      modules.push_back({program(n_threads, is_chain, is_broken ? packed_broken : packed_head), is_chain ? kGiven : kX});
      if (programs) programs->push_back(modules.back().program.get());
    }
    DraftHead::Spec spec;
    spec.vocab = spec.target_vocab = kVocab;
    const auto head = std::make_shared<DraftHead>(modules[0].program->kernels(), std::move(spec));
    auto drafting = std::make_unique<Drafting>(std::move(modules), head, setup, kSlots, kMaxLen, kMaxPass, kVocab);
    return std::make_unique<StepRunner>(program(n_threads, false, packed_head),
                                        StepLimits{kSlots, kMaxLen, kMaxTokens, kMaxRows, 4, kVocab, false, 0, verification},
                                        std::vector<int32_t>{}, std::move(drafting));
  }

  int32_t next(int32_t token) const {
    int32_t best = 0;
    double best_sum = -1e30;
    for (int32_t v = 0; v < kVocab; ++v) {
      double sum = 0;
      for (int64_t i = 0; i < kWidth; ++i) sum += double{table[size_t(token * kWidth + i)]} * head[size_t(v * kWidth + i)];
      if (sum > best_sum) best = v, best_sum = sum;
    }
    return best;
  }
  std::vector<int32_t> after(int32_t token, int64_t n) const {
    std::vector<int32_t> ids;
    while (n-- > 0) ids.push_back(token = next(token));
    return ids;
  }
};

// A step of one sequence, sampled.
struct Ask {
  std::vector<int32_t> slot, start, tokens, from{-1}, none{0};
  std::vector<uint8_t> samples{1}, scores{0};
  int32_t n_draft;

  Ask(int32_t s, int32_t first, int32_t n, bool has_own, int32_t drafts) : slot{s}, start{first}, tokens{n}, n_draft(drafts) {
    if (has_own) from[0] = kOwnDrafts;
  }
  StepRequest request(int64_t id) const {
    StepRequest r{id, slot, start, tokens, samples, scores, -1};
    r.draft_from = from, r.n_drafts = none, r.n_draft = n_draft;
    return r;
  }
};

void admit(StepRunner& runner, int32_t slot, std::vector<int32_t> ids, int32_t n_pages, const SamplerParams& params = {}) {
  runner.admit(slot, ids, static_cast<int64_t>(ids.size()), params);
  std::vector<int32_t> pages(static_cast<size_t>(n_pages), 0);
  runner.set_pages(slot, 0, pages);
}

} // namespace

TEST(drafts_that_a_step_makes_are_computed_by_the_next_one_though_it_was_submitted_before) {
  const Model model;
  const std::vector<int32_t> want = model.after(6, 12);
  for (const int32_t n_threads : {1, 2}) {
    const auto runner = model.runner(DraftKind::Chain, n_threads);
    admit(*runner, 1, {5, 6}, 3);
    CHECK(runner->submit(Ask(1, 0, 2, false, kDrafts).request(0)) == nullptr);
    CHECK(runner->submit(Ask(1, 2, 4, true, kDrafts).request(1)) == nullptr);
    CHECK(runner->submit(Ask(1, 6, 3, true, 0).request(2)) == nullptr);
    CHECK(runner->submit(Ask(1, 9, 4, true, 0).request(3)) == nullptr); // there are none: one row
    std::vector<int32_t> got;
    const std::vector<int32_t> drafted = {0, 3, 2, 0};
    for (size_t i = 0; i < 4; ++i) {
      const StepOutcome out = runner->collect();
      CHECK(out.seq_drafted == std::vector<int32_t>{drafted[i]});
      got.insert(got.end(), out.row_token.begin(), out.row_token.end());
      if (i < 2) {
        CHECK((out.seq_drafts == std::vector<int32_t>(want.begin() + ptrdiff_t(got.size()), want.begin() + ptrdiff_t(got.size()) + 3)));
        for (const float c : out.seq_confidence) CHECK(c > 0.0f && c <= 1.0f);
      } else {
        CHECK(out.seq_drafts.empty() && out.n_draft == 0);
      }
    }
    CHECK(got.size() == 9 && std::equal(got.begin(), got.end(), want.begin()));
    CHECK(runner->drafting()->n_bad() == 0);
  }
}

// Row i of pass s has the token s + 1 places after its own, known or drafted, and what the target gave out of its own; in front of a step's
// rows stand those before it of which pass 2 knew a draft only. Nothing else is computed again.
TEST(each_module_has_the_steps_rows_and_the_last_before_them_with_tokens_one_place_further_on) {
  const Model model;
  for (const int32_t n_threads : {1, 2}) {
    std::vector<const Program*> programs;
    const auto runner = model.runner(DraftKind::Chain, n_threads, kModules, &programs);
    const std::vector<int32_t> prompt = {5, 6, 9, 12, 3};
    std::vector<int32_t> tokens = prompt, other = {8, 4};
    admit(*runner, 2, prompt, 3);
    admit(*runner, 0, other, 3);
    const auto row_is = [&](const Program& p, BufferRef rows, int64_t r, int32_t token) {
      return std::memcmp(p.arena() + rows.offset + r * rows.stride_bytes, model.table.data() + token * kWidth, kWidth * 4) == 0;
    };
    const auto add_drafts = [](std::vector<int32_t> ids, const StepOutcome& out, size_t s) {
      for (int32_t k = 0; k < out.n_draft; ++k)
        ids.push_back(out.seq_drafts[s * static_cast<size_t>(out.n_draft) + static_cast<size_t>(k)]);
      return ids;
    };
    const auto check_rows = [&](const std::vector<int32_t>& ids, int64_t first_row, int64_t from, int64_t end) {
      for (size_t s = 0; s < kModules; ++s)
        for (int64_t pos = from; pos < end; ++pos) {
          const auto at = static_cast<size_t>(pos);
          CHECK(row_is(*programs[s], Model::kGiven, first_row + pos - from, ids[at]));
          CHECK(row_is(*programs[s], Model::kX, first_row + pos - from, at + s + 1 < ids.size() ? ids[at + s + 1] : 0));
        }
    };
    // A chunk of a prompt: its tokens are known; those of the last two rows, of which pass 2 lacks one, are kept.
    Ask chunk(2, 0, 4, false, kDrafts);
    chunk.samples[0] = 0;
    CHECK(runner->submit(chunk.request(0)) == nullptr);
    runner->collect();
    check_rows(tokens, 0, 0, 4);
    // Its end, beside another prompt.
    Ask both(2, 4, 1, false, kDrafts);
    for (auto [v, x] : {std::pair(&both.slot, 0), std::pair(&both.start, 0), std::pair(&both.tokens, 2), std::pair(&both.from, -1),
                        std::pair(&both.none, 0)})
      v->push_back(x);
    both.samples.push_back(1), both.scores.push_back(0);
    CHECK(runner->submit(both.request(1)) == nullptr);
    StepOutcome out = runner->collect();
    tokens.push_back(out.row_token[0]), other.push_back(out.row_token[1]);
    CHECK(add_drafts(tokens, out, 0).size() == 9);
    check_rows(add_drafts(tokens, out, 0), 0, 2, 5);
    check_rows(add_drafts(other, out, 1), 3, 0, 2);
    // All drafts come; then one foretold token of three; then none is asked for.
    int32_t id = 2;
    for (const int64_t n_right : {3, 1, 0}) {
      const auto n = static_cast<int32_t>(tokens.size());
      const std::vector<int32_t> want = model.after(tokens.back(), n_right + 1);
      std::vector<int32_t> foretold(want.begin(), want.end() - 1);
      while (foretold.size() < 3) foretold.push_back((want.back() + 1) % kVocab);
      Ask ask(2, n - 1, 4, true, n_right == 0 ? 0 : kDrafts);
      ask.from[0] = n, ask.none[0] = 3;
      StepRequest request = ask.request(id++);
      request.draft_tokens = foretold;
      CHECK(runner->submit(request) == nullptr);
      out = runner->collect();
      CHECK(out.row_token == want);
      tokens.insert(tokens.end(), want.begin(), want.end());
      check_rows(add_drafts(tokens, out, 0), 0, n - 3, n + n_right);
    }
    // Whoever has the slot next has nothing before its own.
    admit(*runner, 2, other, 3);
    CHECK(runner->submit(Ask(2, 2, 1, false, kDrafts).request(id)) == nullptr);
    out = runner->collect();
    other.push_back(out.row_token[0]);
    check_rows(add_drafts(other, out, 0), 0, 2, 3);
  }
}

TEST(a_block_gives_a_draft_for_each_of_its_masks) {
  const Model model;
  const auto runner = model.runner(DraftKind::Block);
  admit(*runner, 0, {5, 6}, 3);
  CHECK(runner->submit(Ask(0, 0, 2, false, 2).request(0)) == nullptr);
  const int32_t of_mask = model.next(7);
  CHECK((runner->collect().seq_drafts == std::vector<int32_t>{of_mask, of_mask}));
}

TEST(drafts_end_where_the_pages_of_the_slot_did_when_the_step_was_submitted) {
  const Model model;
  for (const DraftKind kind : {DraftKind::Chain, DraftKind::Block}) {
    for (int32_t n = 12; n <= 16; ++n) {
      const auto runner = model.runner(kind);
      admit(*runner, 0, std::vector<int32_t>(static_cast<size_t>(n), 3), 1);
      CHECK(runner->submit(Ask(0, 0, n, false, kDrafts).request(0)) == nullptr);
      runner->set_pages(0, 1, std::vector<int32_t>{0}); // too late for that step
      const StepOutcome out = runner->collect();
      int32_t n_made = 0;
      for (const int32_t id : out.seq_drafts) n_made += id >= 0;
      CHECK(n_made == std::max(0, std::min(kDrafts, 16 - n - 1)));
    }
  }
}

TEST(a_draft_that_is_no_number_is_dropped_and_counted_and_no_token_changes) {
  Model model;
  model.is_broken = true;
  for (const DraftKind kind : {DraftKind::Chain, DraftKind::Block}) {
    const auto runner = model.runner(kind);
    admit(*runner, 0, {5, 6}, 3);
    CHECK(runner->submit(Ask(0, 0, 2, false, kDrafts).request(0)) == nullptr);
    CHECK(runner->submit(Ask(0, 2, 4, true, kDrafts).request(1)) == nullptr);
    const StepOutcome first = runner->collect(), second = runner->collect();
    CHECK((first.row_token == std::vector<int32_t>{model.next(6)}));
    CHECK((first.seq_drafts == std::vector<int32_t>{-1, -1, -1}));
    CHECK((second.row_token == std::vector<int32_t>{model.next(model.next(6))}));
    CHECK(second.seq_drafted == std::vector<int32_t>{0});
    CHECK(runner->drafting()->n_bad() == 2);
  }
}

TEST(a_step_that_asks_for_what_is_not_drafted_is_refused) {
  const Model model;
  const auto runner = model.runner(DraftKind::Chain);
  admit(*runner, 0, {5, 6}, 3);
  for (const int32_t n : {-1, kDrafts + 1}) CHECK(runner->submit(Ask(0, 0, 2, false, n).request(0)) != nullptr);
  Ask foretold(0, 0, 2, true, 0);
  foretold.none[0] = 1;
  const std::vector<int32_t> ids = {4};
  StepRequest request = foretold.request(0);
  request.draft_tokens = ids;
  CHECK(runner->submit(request) != nullptr);
  foretold.none[0] = 0, foretold.from[0] = -3;
  CHECK(runner->submit(foretold.request(0)) != nullptr);
  CHECK(runner->n_submitted() == 0);
}

// Here the drafter has the target's chances at temperature 1, and others where the temperature is the target's alone: by its bias.
TEST(sampled_drafts_of_the_targets_own_distribution_are_all_accepted_by_rejection_and_of_another_some) {
  const Model model;
  for (const Verification how : {Verification::Standard, Verification::Block}) {
    for (const bool is_alike : {true, false}) {
      int64_t n_emitted = 0;
      for (uint64_t seed = 0; seed < 40; ++seed) {
        const auto runner = model.runner(DraftKind::Chain, 2, 1, nullptr, how);
        SamplerParams params;
        params.temperature = 1.0;
        params.seed = seed;
        if (!is_alike) params.bias = {{3, 1.5}, {4, -2.0}};
        admit(*runner, 1, {5, 6}, 3, params);
        CHECK(runner->submit(Ask(1, 0, 2, false, kDrafts).request(0)) == nullptr);
        CHECK(runner->submit(Ask(1, 2, 4, true, 0).request(1)) == nullptr);
        runner->collect();
        const StepOutcome out = runner->collect();
        CHECK(out.seq_drafted == std::vector<int32_t>{kDrafts});
        n_emitted += static_cast<int64_t>(out.row_token.size());
        for (size_t i = 0; i < out.row_token.size(); ++i) CHECK(out.row_pos[i] == 2 + static_cast<int32_t>(i) && out.row_token[i] >= 0);
      }
      CHECK(is_alike ? n_emitted == 40 * (kDrafts + 1) : n_emitted > 40 && n_emitted < 40 * (kDrafts + 1) - 10);
    }
  }
}

TEST(drafts_of_a_greedy_sequence_are_verified_by_matching_whatever_the_rule) {
  const Model model;
  const std::vector<int32_t> want = model.after(6, 5);
  for (const Verification how : {Verification::Standard, Verification::Block}) {
    const auto runner = model.runner(DraftKind::Chain, 2, 1, nullptr, how);
    admit(*runner, 1, {5, 6}, 3);
    CHECK(runner->submit(Ask(1, 0, 2, false, kDrafts).request(0)) == nullptr);
    CHECK(runner->submit(Ask(1, 2, 4, true, 0).request(1)) == nullptr);
    runner->collect();
    const StepOutcome out = runner->collect();
    CHECK(out.row_token == std::vector<int32_t>(want.begin() + 1, want.end()));
  }
}

TEST(a_runner_that_drafts_may_be_destroyed_with_steps_queued) {
  const Model model;
  const auto runner = model.runner(DraftKind::Chain);
  admit(*runner, 0, {5, 6}, 3);
  for (int32_t i = 0; i < 4; ++i) CHECK(runner->submit(Ask(0, i + 1, 1, i > 0, kDrafts).request(i)) == nullptr);
}

TEST(a_step_of_more_rows_than_the_table_has_takes_longer_by_the_tables_slope) {
  const DraftPolicy policy{{1.0, 1.5, 3.0}, {}};
  CHECK(policy.seconds(1) == 1.0 && policy.seconds(3) == 3.0);
  CHECK(policy.seconds(5) == 5.0);
  CHECK((DraftPolicy{{2.0}, {}}).seconds(9) == 2.0);
  CHECK((DraftPolicy{{2.0, 1.0}, {}}).seconds(9) == 1.0); // never shorter
}

TEST(a_sequence_whose_drafts_are_likelier_computes_more_of_them) {
  const float sure[] = {0.9f, 0.9f, 0.9f}, unsure[] = {0.9f, 0.1f, 0.1f};
  const float* both[] = {unsure, sure};
  std::vector<DraftOffer> offers;
  std::vector<int32_t> counts = {3, 3};
  choose_drafts({{1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.9, 2.9}, {}}, both, 2, counts, offers);
  CHECK((counts == std::vector<int32_t>{1, 3}));
  counts = {3, 3};
  choose_drafts({{1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.9, 2.9}, {1.0, 0.0}}, both, 2, counts, offers);
  CHECK((counts == std::vector<int32_t>{1, 1}));
  // Beside the rows of a prompt, which are worth a token each, a draft must be surer.
  counts = {3, 3};
  choose_drafts({{1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.9, 2.9}, {}}, both, 6, counts, offers);
  CHECK((counts == std::vector<int32_t>{0, 0}));
}

} // namespace tiercel
