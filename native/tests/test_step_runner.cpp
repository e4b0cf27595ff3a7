// The team, the program and the step runner together, on a two-op model: logits[v] = <embedding of the token, row v of the head>.
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include "check.hpp"
#include "tiercel/packed.hpp"
#include "tiercel/step_runner.hpp"

namespace tiercel {
namespace {

constexpr int64_t kVocab = 40, kWidth = 32, kSlots = 3, kMaxLen = 24, kMaxTokens = 16, kMaxRows = 8;

std::vector<float> random_matrix(int64_t n, int64_t k, uint32_t seed) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> m(static_cast<size_t>(n * k));
  for (float& x : m) x = uniform(rng);
  return m;
}

struct Model {
  std::vector<float> table = random_matrix(kVocab, kWidth, 1), head = random_matrix(kVocab, kWidth, 2);
  PackedStore packed_table{Format::F32, kVocab, kWidth, false}, packed_head{Format::F32, kVocab, kWidth, false};

  Model() {
    const auto bytes = [](const std::vector<float>& m) { return reinterpret_cast<const uint8_t*>(m.data()); };
    packed_table.pack(bytes(table), kWidth * 4, nullptr, 1);
    packed_head.pack(bytes(head), kWidth * 4, nullptr, 1);
  }

  std::unique_ptr<StepRunner> runner(int32_t n_threads) const {
    auto program = std::make_unique<Program>(kernel_level(n_kernel_levels() - 1), n_threads);
    const BufferRef x{0, kWidth * 4}, rows{kMaxTokens * kWidth * 4, kWidth * 4};
    const BufferRef logits{rows.offset + kMaxRows * kWidth * 4, kVocab * 4};
    program->add({Rows::Tokens, op::Embed{packed_table.view(), 1.0f, x}});
    program->add({Rows::Logits, op::SelectRows{x, kWidth, rows}});
    op::Linear linear{rows, false, kWidth, {packed_head.view()}, {{}}, {{nullptr, nullptr, 0}}, logits, std::nullopt};
    program->add({Rows::Logits, std::move(linear)});
    program->seal(logits.offset + kMaxRows * kVocab * 4, KvPool{}, logits, kVocab, kMaxTokens, kMaxRows, kSlots, kMaxLen);
    return std::make_unique<StepRunner>(std::move(program), StepLimits{kSlots, kMaxLen, kMaxTokens, kMaxRows, 2}, std::vector<int32_t>{});
  }

  // The token that greedy sampling takes after `token`.
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
};

struct Columns {
  std::vector<int32_t> slot, start, tokens;
  std::vector<uint8_t> samples, scores;
  StepRequest request(int64_t id, int32_t n_top = -1) const { return {id, slot, start, tokens, samples, scores, n_top}; }
};

void admit(StepRunner& runner, int32_t slot, std::vector<int32_t> ids) {
  runner.admit(slot, ids, static_cast<int64_t>(ids.size()), SamplerParams{});
}

} // namespace

TEST(a_team_runs_every_thread_once_a_run_and_its_barrier_separates_phases) {
  for (const int32_t n : {1, 2, 3, 5}) {
    Team team(n, {});
    struct Job {
      Team* team;
      std::vector<int> seen;
      std::atomic<int> n_early{0};
    } job{&team, std::vector<int>(static_cast<size_t>(n)), {}};
    for (int round = 1; round <= 50; ++round) {
      team.run(
          [](void* arg, int32_t thread) {
            auto* j = static_cast<Job*>(arg);
            ++j->seen[static_cast<size_t>(thread)];
            j->team->barrier()->wait(j->team->barrier(), thread);
            for (const int s : j->seen) j->n_early += s != j->seen[static_cast<size_t>(thread)];
            j->team->barrier()->wait(j->team->barrier(), thread);
          },
          &job);
      for (const int s : job.seen) CHECK(s == round);
    }
    CHECK(job.n_early == 0);
  }
}

TEST(a_sampled_token_feeds_the_next_step_without_the_caller) {
  const Model model;
  for (const int32_t n_threads : {1, 2}) {
    const auto runner = model.runner(n_threads);
    admit(*runner, 1, {5, 6, 7});
    const Columns prefill{{1}, {0}, {3}, {1}, {0}}, decode{{1}, {3}, {1}, {1}, {0}};
    // Both are submitted before either is collected.
    CHECK(runner->submit(prefill.request(10)) == nullptr);
    CHECK(runner->submit(decode.request(11)) == nullptr);
    const StepOutcome first = runner->collect(), second = runner->collect();
    CHECK(first.step_id == 10 && second.step_id == 11);
    CHECK(first.row_token == std::vector<int32_t>{model.next(7)});
    CHECK(first.row_pos == std::vector<int32_t>{2});
    CHECK(second.row_token == std::vector<int32_t>{model.next(model.next(7))});
    CHECK(runner->tokens_of(1)[3] == first.row_token[0]);
    CHECK(runner->tokens_of(1)[4] == second.row_token[0]);
  }
}

TEST(a_wait_for_several_steps_ends_with_the_last_of_them) {
  const Model model;
  const auto runner = model.runner(2);
  admit(*runner, 0, {1, 2, 3});
  const Columns step{{0}, {0}, {3}, {1}, {0}};
  for (int32_t i = 0; i < 5; ++i) CHECK(runner->submit(step.request(i)) == nullptr);
  CHECK(runner->wait(4) == 4);
  CHECK(runner->has_ended(4) && runner->n_submitted() == 5);
  for (int32_t i = 0; i < 5; ++i) CHECK(runner->collect().step_id == i);
}

TEST(a_hurried_wait_ends_with_the_first_step) {
  const Model model;
  const auto runner = model.runner(2);
  admit(*runner, 0, {1, 2, 3});
  const Columns step{{0}, {0}, {3}, {1}, {0}};
  for (int32_t round = 0; round < 50; ++round) {
    for (int32_t i = 0; i < 4; ++i) CHECK(runner->submit(step.request(i)) == nullptr);
    std::thread other([&] { runner->hurry(); }); // before, during or after
    const int64_t n = runner->wait(4);
    CHECK(n >= 1 && n <= 4 && runner->has_ended(n));
    other.join();
    for (int32_t i = 0; i < 4; ++i) CHECK(runner->collect().step_id == i);
  }
}

TEST(rows_come_back_in_plan_order_with_scores_of_the_tokens_that_follow) {
  const Model model;
  const auto runner = model.runner(2);
  admit(*runner, 0, {1, 2, 3, 4});
  admit(*runner, 2, {9, 8});
  const Columns step{{2, 0}, {0, 0}, {2, 4}, {1, 1}, {0, 1}};
  CHECK(runner->submit(step.request(1, 3)) == nullptr);
  const StepOutcome out = runner->collect();
  CHECK((out.row_seq == std::vector<int32_t>{0, 1, 1, 1, 1}));
  CHECK((out.row_pos == std::vector<int32_t>{1, 0, 1, 2, 3}));
  CHECK((out.row_token == std::vector<int32_t>{model.next(8), 2, 3, 4, model.next(4)}));
  CHECK(out.top_ids.size() == 5 * 3);
  CHECK(out.top_ids[0] == model.next(8) && out.row_rank[0] == 1);
  for (size_t r = 0; r < 5; ++r) CHECK(out.row_logprob[r] <= out.top_logprobs[r * 3]);
}

TEST(a_step_that_does_not_fit_is_refused_and_changes_nothing) {
  const Model model;
  const auto runner = model.runner(1);
  admit(*runner, 0, {1, 2, 3});
  const Columns cases[] = {
      {{3}, {0}, {1}, {1}, {0}},              // no such slot
      {{-1}, {0}, {1}, {1}, {0}},             // nor this
      {{0}, {0}, {0}, {1}, {0}},              // no token
      {{0}, {-1}, {1}, {1}, {0}},             // before the start
      {{0}, {kMaxLen - 1}, {1}, {1}, {0}},    // no room for the sampled token
      {{0}, {kMaxLen}, {1}, {0}, {0}},        // past the end
      {{0}, {0}, {kMaxTokens + 1}, {0}, {0}}, // too many tokens
      {{0}, {0}, {kMaxRows + 1}, {0}, {1}},   // too many rows
      {{0, 1, 2, 0}, {0, 0, 0, 0}, {1, 1, 1, 1}, {0, 0, 0, 0}, {0, 0, 0, 0}},
  };
  for (const Columns& c : cases) CHECK(runner->submit(c.request(1)) != nullptr);
  CHECK(runner->n_submitted() == 0);
  const Columns good{{0}, {0}, {3}, {1}, {0}};
  for (int32_t i = 0; i < StepRunner::kDepth; ++i) CHECK(runner->submit(good.request(2 + i)) == nullptr);
  CHECK(runner->submit(good.request(99)) != nullptr); // as many as may be are under way
  CHECK(runner->collect().step_id == 2);
  CHECK(runner->collect().row_token == std::vector<int32_t>{model.next(3)});
}

TEST(a_step_of_no_tokens_is_legal_and_a_runner_may_be_destroyed_with_steps_queued) {
  const Model model;
  const auto runner = model.runner(2);
  CHECK(runner->submit(Columns{}.request(1)) == nullptr);
  CHECK(runner->collect().row_token.empty());
  admit(*runner, 0, {1, 2, 3});
  const Columns good{{0}, {0}, {3}, {1}, {0}};
  CHECK(runner->submit(good.request(2)) == nullptr);
  CHECK(runner->submit(good.request(3)) == nullptr);
}

TEST(a_nan_in_the_logits_is_told_and_leaves_a_valid_id_behind) {
  Model model;
  model.head[3] = std::nanf("");
  model.packed_head.pack(reinterpret_cast<const uint8_t*>(model.head.data()), kWidth * 4, nullptr, 1);
  const auto runner = model.runner(1);
  admit(*runner, 0, {1});
  CHECK(runner->submit(Columns{{0}, {0}, {1}, {1}, {0}}.request(1)) == nullptr);
  CHECK(runner->collect().row_token == std::vector<int32_t>{kBadLogits});
  CHECK(runner->tokens_of(0)[1] == 0);
}

TEST(replaying_a_step_over_a_poisoned_arena_gives_the_same_bits) {
  const Model model;
  const auto runner = model.runner(2);
  admit(*runner, 0, {4, 5, 6});
  const Columns step{{0}, {0}, {3}, {0}, {1}};
  std::vector<std::vector<float>> seen;
  for (const int poison : {0x00, 0xff}) {
    std::memset(runner->program().arena(), poison, static_cast<size_t>(kMaxTokens * kWidth * 4));
    CHECK(runner->submit(step.request(1)) == nullptr);
    runner->collect();
    std::vector<float> all;
    for (int64_t r = 0; r < 3; ++r) all.insert(all.end(), runner->last_logits(r).begin(), runner->last_logits(r).end());
    seen.push_back(all);
  }
  CHECK(std::memcmp(seen[0].data(), seen[1].data(), seen[0].size() * 4) == 0);
}

// Logits of the last token of `ids`, computed in one step or token by token, by a model that rounds to int8 before both of its linears. The
// first linear writes where its rounded input came from, so its rounding must not be left to each thread alone.
std::vector<float> rounded_logits(const Model& model, int32_t n_threads, const std::vector<int32_t>& ids, bool one_by_one) {
  std::vector<uint8_t> q8(static_cast<size_t>(kVocab * 34), 0); // a Q8_0 block a row: f16 scale, 32 bytes
  for (int64_t v = 0; v < kVocab; ++v) {
    const uint16_t scale = 0x2000; // 2^-7
    std::memcpy(&q8[size_t(v * 34)], &scale, 2);
    for (int64_t i = 0; i < 32; ++i) q8[size_t(v * 34 + 2 + i)] = static_cast<uint8_t>((v * 37 + i * 11) % 251);
  }
  PackedStore square(Format::Q8_0, kWidth, kWidth, false), head(Format::Q8_0, kVocab, kWidth, false);
  square.pack(q8.data(), 34, nullptr, 1);
  head.pack(q8.data(), 34, nullptr, 1);

  auto program = std::make_unique<Program>(kernel_level(n_kernel_levels() - 1), n_threads);
  const int64_t q_bytes = quant_row_bytes(kWidth), floats = kMaxTokens * kWidth * 4;
  const BufferRef x{0, kWidth * 4}, q{floats, q_bytes}, rows{floats + kMaxTokens * q_bytes, kWidth * 4};
  const BufferRef normed{rows.offset + floats, q_bytes}, logits{normed.offset + kMaxTokens * q_bytes, kVocab * 4};
  const auto linear = [](const BufferRef& from, const PackedStore& w, const BufferRef& to) {
    return op::Linear{from, true, kWidth, {w.view()}, {{}}, {{nullptr, nullptr, 0}}, to, std::nullopt};
  };
  program->add({Rows::Tokens, op::Embed{model.packed_table.view(), 1.0f, x}});
  program->add({Rows::Tokens, op::Quantize{x, kWidth, q}});
  program->add({Rows::Tokens, linear(q, square, x)});
  program->add({Rows::Logits, op::SelectRows{x, kWidth, rows}});
  program->add({Rows::Logits, op::Norm{rows, kWidth, std::vector<float>(kWidth, 1.5f), 1e-5f, std::nullopt, normed, true}});
  program->add({Rows::Logits, linear(normed, head, logits)});
  program->seal(logits.offset + kMaxRows * kVocab * 4, KvPool{}, logits, kVocab, kMaxTokens, kMaxRows, kSlots, kMaxLen);
  StepRunner runner(std::move(program), StepLimits{kSlots, kMaxLen, kMaxTokens, kMaxRows, 2}, {});
  admit(runner, 0, ids);
  const auto n = static_cast<int32_t>(ids.size());
  for (int32_t at = one_by_one ? 0 : n - 1; at < n; ++at) {
    const Columns step{{0}, {one_by_one ? at : 0}, {one_by_one ? 1 : n}, {at + 1 == n}, {0}};
    CHECK(runner.submit(step.request(at)) == nullptr);
    runner.collect();
  }
  const auto row = runner.last_logits(0);
  return {row.begin(), row.end()};
}

TEST(a_row_alone_has_the_bits_of_a_row_among_others_for_any_number_of_threads) {
  const Model model;
  const std::vector<int32_t> ids = {7, 1, 30, 2, 19};
  const std::vector<float> expected = rounded_logits(model, 1, ids, false);
  CHECK(expected[0] != expected[1]);
  for (const int32_t n_threads : {1, 2, 3, 5})
    for (int round = 0; round < 20; ++round)
      for (const bool one_by_one : {false, true}) CHECK(rounded_logits(model, n_threads, ids, one_by_one) == expected);
}

} // namespace tiercel
