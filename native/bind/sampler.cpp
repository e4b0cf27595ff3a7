// Sampling parameters for the step runner, and doors through which tests compare one row with the reference.
#include "tiercel/sampler.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "bind.hpp"
#include "tiercel/kernels.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiercel {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = std::vector<int32_t>;
using Sampled = std::tuple<int32_t, float, int32_t, Ids, std::vector<float>>;

constexpr size_t kVocabMax = size_t{1} << 19;

void require(bool holds, const char* message) {
  if (!holds) throw nb::value_error(message);
}

void check(const SamplerParams& p) {
  require(std::isfinite(p.temperature) && p.temperature >= 0, "temperature: must be finite and 0 or more");
  require(p.temperature == 0 || static_cast<float>(p.temperature) > 0, "temperature: too small for float32; use 0");
  require(p.top_p > 0 && p.top_p <= 1, "top_p: must be above 0, up to 1");
  require(p.top_k >= 0, "top_k: must be 0 or more");
  require(p.min_p >= 0 && p.min_p <= 1, "min_p: must be in 0..1");
  require(std::isfinite(p.presence_penalty), "presence_penalty: must be finite");
  require(std::isfinite(p.frequency_penalty), "frequency_penalty: must be finite");
  require(std::isfinite(p.repetition_penalty) && p.repetition_penalty > 0, "repetition_penalty: must be finite, above 0");
  require(p.min_tokens >= 0, "min_tokens: must be 0 or more");
  for (const auto& [id, value] : p.bias) require(std::isfinite(value), "logit_bias: values must be finite");
}

SamplerParams make_sampler_params(double temperature, double top_p, int64_t top_k, double min_p, double presence_penalty,
                                  double frequency_penalty, double repetition_penalty, uint64_t seed, int64_t min_tokens, Ids stop_ids,
                                  const std::vector<std::pair<int32_t, double>>& logit_bias, std::optional<Ids> allowed_ids,
                                  const std::vector<Ids>& bad_words, Ids told_ids) {
  SamplerParams p;
  p.temperature = temperature;
  p.top_p = top_p;
  p.top_k = top_k;
  p.min_p = min_p;
  p.presence_penalty = presence_penalty;
  p.frequency_penalty = frequency_penalty;
  p.repetition_penalty = repetition_penalty;
  p.seed = p.apart_seed = seed;
  p.min_tokens = min_tokens;
  p.stop_ids = std::move(stop_ids);
  p.told_ids = std::move(told_ids);
  for (const auto& [id, value] : logit_bias) p.bias.push_back({id, value});
  p.has_allowed_ids = allowed_ids.has_value();
  if (allowed_ids) p.allowed_ids = std::move(*allowed_ids);
  for (const Ids& word : bad_words) {
    require(!word.empty(), "bad_words: a word must have at least one token");
    p.bad_tokens.insert(p.bad_tokens.end(), word.begin(), word.end());
    p.bad_ends.push_back(static_cast<int32_t>(p.bad_tokens.size()));
  }
  check(p);
  return p;
}

SamplerKernels kernels_of(std::optional<int32_t> level) {
  const int32_t i = level.value_or(n_kernel_levels() - 1);
  require(i >= 0 && i < n_kernel_levels(), "level: must be in 0..n_kernel_levels()");
  return {kernel_level(i)->argmax, kernel_level(i)->exp_sum};
}

// Room for the answer of a test door.
struct Tops {
  explicit Tops(int32_t n) : ids(n), logprobs(n), out{n, ids.data(), logprobs.data()} {}
  Ids ids;
  std::vector<float> logprobs;
  TopOut out;
};

SamplerScratch scratch_for(const Logits& logits, std::optional<int32_t> level) {
  require(logits.shape(0) > 0 && logits.shape(0) < kVocabMax, "logits: must hold 1..2^19 - 1 values");
  return {static_cast<int64_t>(logits.shape(0)), kernels_of(level)};
}

Sampled sample_row_door(Logits logits, const SamplerParams& params, Tokens tokens, int64_t n_prompt, std::optional<int32_t> n_top,
                        std::optional<int32_t> level, std::optional<Words> mask) {
  require(n_prompt >= 0 && n_prompt <= static_cast<int64_t>(tokens.shape(0)), "n_prompt: must be in 0..len(tokens)");
  require(n_top.value_or(0) >= 0, "n_top: must be 0 or more");
  require(!mask || static_cast<int64_t>(mask->shape(0)) == mask_words(static_cast<int64_t>(logits.shape(0))),
          "mask: must hold a bit for each logit, in words of 32");
  SamplerScratch scratch = scratch_for(logits, level);
  Tops tops(n_top.value_or(0));
  const SampleRow row{{logits.data(), logits.shape(0)},
                      {tokens.data(), tokens.shape(0)},
                      n_prompt,
                      mask ? std::span<const uint32_t>(mask->data(), mask->shape(0)) : std::span<const uint32_t>()};
  const SampleOut out = sample_row(params, row, scratch, n_top ? &tops.out : nullptr);
  return {out.token, out.logprob, out.rank, tops.ids, tops.logprobs};
}

Sampled score_row_door(Logits logits, int32_t token, int32_t n_top, std::optional<int32_t> level) {
  require(n_top >= 0, "n_top: must be 0 or more");
  SamplerScratch scratch = scratch_for(logits, level);
  Tops tops(n_top);
  const SampleOut out = score_row({logits.data(), logits.shape(0)}, token, scratch, tops.out);
  return {out.token, out.logprob, out.rank, tops.ids, tops.logprobs};
}

using LogitsRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Odds = std::vector<std::pair<Ids, std::vector<double>>>;

// One sequence's rows as StepRunner verifies them: row i has draft i behind it, the last none.
Ids verify_door(const std::string& how, LogitsRows logits, const Ids& drafts, const Odds& odds, const SamplerParams& params, Tokens tokens,
                int64_t n_prompt) {
  const auto k = static_cast<int64_t>(drafts.size()), v = static_cast<int64_t>(logits.shape(1));
  require(static_cast<int64_t>(logits.shape(0)) == k + 1, "logits: a row for each draft and one more are needed");
  require(static_cast<int64_t>(odds.size()) == k, "odds: as many as drafts are needed");
  SamplerScratch scratch(v, kernels_of(std::nullopt));
  Ids all(tokens.data(), tokens.data() + tokens.shape(0));
  all.insert(all.end(), drafts.begin(), drafts.end());
  const auto row = [&](int64_t i) {
    return SampleRow{{logits.data() + i * v, static_cast<size_t>(v)}, {all.data(), tokens.shape(0) + static_cast<size_t>(i)}, n_prompt};
  };
  std::vector<std::vector<double>> p;
  std::vector<TestedDraft> tested;
  for (int64_t i = 0; i < k; ++i) {
    const auto& [ids, q] = odds[static_cast<size_t>(i)];
    const bool is_known = std::find(ids.begin(), ids.end(), drafts[static_cast<size_t>(i)]) != ids.end();
    require(is_known && ids.size() == q.size(), "odds: a chance for each id, the draft among them, is needed");
    for (const int32_t id : ids) require(id >= 0 && id < v, "odds: an id is outside the vocabulary");
    p.emplace_back(ids.size());
    if (!chances_of(params, row(i), scratch, ids, p.back())) p.back().clear();
    tested.push_back({drafts[static_cast<size_t>(i)], {ids, q}, p.back()});
  }
  const auto [n, joint] = accept_drafts(verification_named(how), tested, params.apart_seed, static_cast<uint32_t>(tokens.shape(0)));
  Ids found(drafts.begin(), drafts.begin() + n);
  const bool is_residual = n < k && !tested[static_cast<size_t>(n)].p.empty();
  found.push_back((is_residual ? sample_residual(params, row(n), scratch, tested[static_cast<size_t>(n)].odds, joint, nullptr)
                               : sample_row(params, row(n), scratch, nullptr))
                      .token);
  return found;
}

} // namespace

Verification verification_named(const std::string& name) {
  if (name == "matching") return Verification::Matching;
  if (name == "standard") return Verification::Standard;
  if (name == "block") return Verification::Block;
  throw nb::value_error("verification: needs to be matching, standard or block");
}

void bind_sampler(nb::module_& m) {
  nb::class_<SamplerParams>(m, "SamplerParams", "What a slot asks of its tokens; made by make_sampler_params.");
  m.def("make_sampler_params", &make_sampler_params, nb::kw_only(), "temperature"_a = 0.0, "top_p"_a = 1.0, "top_k"_a = 0, "min_p"_a = 0.0,
        "presence_penalty"_a = 0.0, "frequency_penalty"_a = 0.0, "repetition_penalty"_a = 1.0, "seed"_a = 0, "min_tokens"_a = 0,
        "stop_ids"_a = Ids{}, "logit_bias"_a = std::vector<std::pair<int32_t, double>>{}, "allowed_ids"_a = nb::none(),
        "bad_words"_a = std::vector<Ids>{}, "told_ids"_a = Ids{}, "Raises ValueError when a value is out of its range.");
  m.def("sample_row", &sample_row_door, "logits"_a, "params"_a, "tokens"_a, "n_prompt"_a, nb::kw_only(), "n_top"_a = nb::none(),
        "level"_a = nb::none(), "mask"_a = nb::none(),
        "One row's (token, logprob, rank, top ids, top logprobs). For tests: allocates its scratch at each call.");
  m.def("score_row", &score_row_door, "logits"_a, "token"_a, nb::kw_only(), "n_top"_a = 0, "level"_a = nb::none(),
        "The same for a given token. For tests.");
  m.def("verify_drafts", &verify_door, "how"_a, "logits"_a, "drafts"_a, "odds"_a, "params"_a, "tokens"_a, "n_prompt"_a,
        "The tokens that come of one sequence's drafts, verified by rejection; odds: of each, ids and chances. For tests.");
}

} // namespace tiercel
