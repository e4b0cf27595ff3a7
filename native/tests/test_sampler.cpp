#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "check.hpp"
#include "tiercel/sampler.hpp"

namespace {

using tiercel::SampleOut;
using tiercel::SamplerParams;
using tiercel::SamplerScratch;

constexpr float kInf = std::numeric_limits<float>::infinity();

int64_t plain_argmax(const float* x, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (std::isnan(x[i])) return -1;
    if (x[i] > x[best]) best = i;
  }
  return best;
}

float plain_exp_sum(const float* x, int64_t n, float largest) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += std::exp(double{x[i]} - double{largest});
  return static_cast<float>(sum);
}

constexpr tiercel::SamplerKernels kPlain{plain_argmax, plain_exp_sum};

// A vocabulary that is no multiple of a block, in a buffer of its exact size so that the address sanitizer sees a read
// past it.
std::vector<float> some_logits(int64_t v, uint32_t seed) {
  std::vector<float> x(v);
  for (auto& value : x) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<float>(seed >> 8) * 0x1p-20f;
  }
  return x;
}

int32_t sampled(const SamplerParams& p, const std::vector<float>& x, const std::vector<int32_t>& tokens, int64_t n_prompt) {
  SamplerScratch scratch(static_cast<int64_t>(x.size()), kPlain);
  return tiercel::sample_row(p, {x, tokens, n_prompt}, scratch, nullptr).token;
}

} // namespace

TEST(a_greedy_sampler_takes_the_first_of_equal_largest) { CHECK(sampled({}, {1, 3, 2, 3}, {}, 0) == 1); }

TEST(a_sampler_answers_bad_logits_for_nan_and_infinity) {
  SamplerParams warm;
  warm.temperature = 1;
  for (const auto& p : {SamplerParams{}, warm}) {
    CHECK(sampled(p, {1, std::nanf(""), 2}, {}, 0) == tiercel::kBadLogits);
    CHECK(sampled(p, {1, kInf, 2}, {}, 0) == tiercel::kBadLogits);
    CHECK(sampled(p, {-kInf, -kInf}, {}, 0) == tiercel::kNothingAllowed);
  }
}

TEST(min_tokens_yields_when_only_stop_ids_are_allowed) {
  SamplerParams p;
  p.has_allowed_ids = true;
  p.allowed_ids = {2};
  p.stop_ids = {2};
  p.min_tokens = 5;
  CHECK(sampled(p, {1, 2, 0}, {0}, 1) == 2);
  p.bad_tokens = {2};
  p.bad_ends = {1};
  CHECK(sampled(p, {1, 2, 0}, {0}, 1) == tiercel::kNothingAllowed);
}

TEST(ids_outside_the_vocabulary_are_ignored_everywhere) {
  SamplerParams p;
  p.temperature = 1;
  p.repetition_penalty = 1.5;
  p.frequency_penalty = 1;
  p.bias = {{-1, 5}, {70, 5}};
  p.stop_ids = {-3, 70};
  p.min_tokens = 9;
  p.bad_tokens = {-2, 70, 70, -5};
  p.bad_ends = {1, 2, 4};
  const auto x = some_logits(70, 1);
  const int32_t token = sampled(p, x, {-1, 70, 1 << 30, 70}, 2);
  CHECK(token >= 0 && token < 70);
}

TEST(a_scratch_keeps_nothing_of_the_rows_before) {
  SamplerParams p;
  p.temperature = 0.8;
  p.top_p = 0.9;
  p.top_k = 40;
  p.repetition_penalty = 1.2;
  p.presence_penalty = 0.5;
  p.seed = 7;
  const int64_t v = 1003;
  SamplerScratch used(v, kPlain);
  std::vector<int32_t> tokens = {1, 2, 3, 1000};
  for (uint32_t seed = 0; seed < 50; ++seed) {
    const auto x = some_logits(v, seed);
    SamplerScratch fresh(v, kPlain);
    int32_t ids[2][80];
    float logprobs[2][80];
    const tiercel::TopOut top[2] = {{80, ids[0], logprobs[0]}, {80, ids[1], logprobs[1]}};
    const SampleOut a = tiercel::sample_row(p, {x, tokens, 2}, used, &top[0]);
    const SampleOut b = tiercel::sample_row(p, {x, tokens, 2}, fresh, &top[1]);
    CHECK(a.token == b.token && a.logprob == b.logprob && a.rank == b.rank);
    CHECK(std::memcmp(ids[0], ids[1], sizeof ids[0]) == 0 && std::memcmp(logprobs[0], logprobs[1], sizeof logprobs[0]) == 0);
    tokens.push_back(a.token);
  }
}

TEST(scored_log_probabilities_sum_to_one_and_are_in_order) {
  const int32_t v = 517;
  const auto x = some_logits(v, 3);
  SamplerScratch scratch(v, kPlain);
  std::vector<int32_t> ids(v + 2);
  std::vector<float> logprobs(v + 2);
  const SampleOut out = tiercel::score_row(x, 5, scratch, {v + 2, ids.data(), logprobs.data()});
  double sum = 0;
  for (int32_t i = 0; i < v; ++i) {
    sum += std::exp(static_cast<double>(logprobs[i]));
    CHECK(i == 0 || logprobs[i - 1] >= logprobs[i]);
  }
  CHECK(std::abs(sum - 1) < 1e-5);
  CHECK(ids[out.rank - 1] == 5 && logprobs[out.rank - 1] == out.logprob);
  CHECK(ids[v] == -1 && ids[v + 1] == -1 && std::isnan(logprobs[v]));
}

TEST(a_scored_token_outside_the_vocabulary_has_no_score) {
  const auto x = some_logits(64, 3);
  SamplerScratch scratch(64, kPlain);
  for (int32_t token : {-1, 64}) {
    const SampleOut out = tiercel::score_row(x, token, scratch, {0, nullptr, nullptr});
    CHECK(out.token == tiercel::kNothingAllowed && std::isnan(out.logprob) && out.rank == 0);
  }
}
