// Heads that pick drafts, and the convolution of a drafter's block: one answer at every level, bad rows, and specs that do not fit. What
// they compute is tested from Python, against numpy.
#include <cmath>
#include <limits>

#include "../src/sampler_noise.hpp"
#include "check.hpp"
#include "kernel_rig.hpp"
#include "tiercel/draft_head.hpp"

namespace tiercel {
namespace {

using test::Numbers;

constexpr int64_t kTokens = 300, kDrafted = 130, kHidden = 37, kRank = 19, kDrafts = 6;

DraftHead::Matrix matrix(int64_t n, int64_t k, uint64_t seed) { return {n, k, Numbers(seed).floats(n * k)}; }

DraftHead::Spec spec_of(DraftHead::Kind kind, DraftHead::Markov markov, int64_t topk) {
  DraftHead::Spec s;
  s.kind = kind;
  s.markov = markov;
  s.vocab = kDrafted;
  s.target_vocab = kTokens;
  for (int32_t i = 0; i < kDrafted; ++i) s.d2t.push_back(i % 2 == 0 ? 0 : kTokens - 1 - 2 * i);
  if (kind == DraftHead::Kind::Plain) return s;
  s.topk = topk;
  s.before = matrix(kTokens, kRank, 1);
  s.after = matrix(kDrafted, kRank, 2);
  if (kind == DraftHead::Kind::Selector) {
    s.mix = matrix(kRank, kHidden, 3);
    return s;
  }
  if (markov == DraftHead::Markov::Gated) s.mix = matrix(kRank, kHidden + kRank, 3);
  if (markov == DraftHead::Markov::Rnn) s.mix = matrix(3 * kRank, kHidden + 2 * kRank, 3);
  if (s.mix.n > 0) s.mix_bias = Numbers(4).floats(s.mix.n);
  s.confidence = matrix(1, kHidden + kRank, 5);
  s.confidence_reads_markov = true;
  return s;
}

std::vector<DraftHead::Spec> specs() {
  using K = DraftHead::Kind;
  using M = DraftHead::Markov;
  std::vector<DraftHead::Spec> all = {spec_of(K::Plain, M::Vanilla, 0), spec_of(K::Selector, M::Vanilla, 16)};
  for (M markov : {M::Vanilla, M::Gated, M::Rnn})
    for (int64_t topk : {int64_t{0}, int64_t{1}, int64_t{16}, kDrafted}) all.push_back(spec_of(K::Markov, markov, topk));
  return all;
}

struct Picked {
  std::vector<int32_t> tokens = std::vector<int32_t>(kDrafts, -7);
  std::vector<float> confidence = std::vector<float>(kDrafts, -7.0f);
};

// Rows of exactly as many numbers as are told, so that a sanitizer sees whoever reads past them.
Picked pick(const DraftHead& head, const SamplerParams* params, const std::vector<float>& logits, const std::vector<float>& hidden,
            int32_t anchor = 5) {
  DraftHead::Scratch scratch(head);
  Picked p;
  for (int twice = 0; twice < 2; ++twice) // a used scratch gives what a new one does
    head.pick({logits.data(), kDrafted, hidden.data(), kHidden, anchor, params, 40}, kDrafts, scratch, p.tokens.data(),
              p.confidence.data());
  return p;
}

} // namespace

TEST(a_draft_head_picks_the_same_at_every_level) {
  SamplerParams drawn;
  drawn.temperature = 0.8;
  drawn.seed = 77;
  for (const DraftHead::Spec& spec : specs()) {
    CHECK(spec.broken().empty());
    for (const SamplerParams* params : {static_cast<const SamplerParams*>(nullptr), static_cast<const SamplerParams*>(&drawn)}) {
      const std::vector<float> logits = Numbers(9).floats(kDrafts * kDrafted, 4.0f), hidden = Numbers(10).floats(kDrafts * kHidden);
      const DraftHead first(kernel_level(0), spec);
      const Picked expected = pick(first, params, logits, hidden);
      for (int32_t token : expected.tokens) CHECK(token >= 0 && token < kTokens);
      for (float c : expected.confidence) CHECK(c > 0.0f && c <= 1.0001f);
      for (int32_t i = 1; i < n_kernel_levels(); ++i) {
        const Picked found = pick(DraftHead(kernel_level(i), spec), params, logits, hidden);
        CHECK(found.tokens == expected.tokens);
        CHECK(test::same_bits(found.confidence, expected.confidence));
      }
    }
  }
}

TEST(a_draft_head_stops_at_the_first_row_that_is_no_distribution) {
  for (const DraftHead::Spec& spec : specs()) {
    const DraftHead head(kernel_level(n_kernel_levels() - 1), spec);
    const std::vector<float> hidden = Numbers(10).floats(kDrafts * kHidden);
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      std::vector<float> logits = Numbers(9).floats(kDrafts * kDrafted, 4.0f);
      logits[3 * kDrafted + kDrafted - 1] = bad;
      const Picked found = pick(head, nullptr, logits, hidden);
      for (size_t i = 0; i < kDrafts; ++i) CHECK((found.tokens[i] == -1) == (i >= 3) && std::isnan(found.confidence[i]) == (i >= 3));
    }
    const std::vector<float> logits = Numbers(9).floats(kDrafts * kDrafted, 4.0f);
    for (const int32_t anchor : {-1, static_cast<int32_t>(kTokens)}) CHECK(pick(head, nullptr, logits, hidden, anchor).tokens[0] == -1);
  }
}

TEST(a_hidden_row_that_is_no_number_ends_the_drafts_or_shows_in_the_confidence) {
  const std::vector<float> logits = Numbers(9).floats(kDrafts * kDrafted, 4.0f);
  for (const DraftHead::Spec& spec : specs()) {
    const DraftHead head(kernel_level(0), spec);
    if (!head.reads_hidden()) continue;
    std::vector<float> hidden = Numbers(10).floats(kDrafts * kHidden);
    hidden[2 * kHidden] = std::numeric_limits<float>::quiet_NaN();
    const Picked found = pick(head, nullptr, logits, hidden);
    CHECK(found.tokens[1] >= 0 && std::isfinite(found.confidence[1]));
    CHECK(std::isnan(found.confidence[2]));
  }
}

TEST(a_draft_head_that_does_not_fit_says_what_does_not) {
  using K = DraftHead::Kind;
  using M = DraftHead::Markov;
  const auto says = [](const DraftHead::Spec& s, const char* what) { return s.broken().rfind(what, 0) == 0; };
  DraftHead::Spec s = spec_of(K::Markov, M::Gated, 16);
  s.mix.data.pop_back();
  CHECK(says(s, "gate: "));
  s = spec_of(K::Markov, M::Vanilla, 16);
  s.before.n -= 1;
  CHECK(says(s, "w1: got [299, 19]; [300, 19] is needed"));
  s = spec_of(K::Selector, M::Vanilla, 16);
  s.after.data[3] = std::numeric_limits<float>::infinity();
  CHECK(says(s, "successor: holds NaN"));
  s = spec_of(K::Plain, M::Vanilla, 0);
  s.d2t[4] += 1000;
  CHECK(says(s, "d2t: drafted id 4 stands for token 1004"));
  s = spec_of(K::Plain, M::Vanilla, 0);
  s.vocab = 0;
  CHECK(says(s, "vocab: "));
}

TEST(the_word_of_one_token_is_that_of_its_block) {
  uint32_t words[sampler_noise::kBlock];
  for (const sampler_noise::Key key : {sampler_noise::Key{0, 0}, sampler_noise::Key{0x123456789abcdef0u, 77}}) {
    for (const int64_t block : {0, 1, 7, 4000}) {
      sampler_noise::block_words(key, block, words);
      for (int64_t i = 0; i < sampler_noise::kBlock; ++i) CHECK(sampler_noise::word_of(key, block * sampler_noise::kBlock + i) == words[i]);
    }
  }
}

TEST(a_block_convolution_reads_its_own_block_and_gives_the_same_at_every_level) {
  for (const int32_t group : {1, 5, 16, 32}) {
    const int64_t width = group == 5 ? 45 : 96, n_rows = 7, n_groups = width / group;
    const int32_t taps = 3;
    const int32_t seq_rows[] = {0, 1, 5, 7}, row_seq[] = {0, 1, 1, 1, 1, 2, 2};
    StepView view = {};
    view.n_tokens = n_rows, view.n_seqs = 3, view.seq_rows = seq_rows, view.row_seq = row_seq;
    const std::vector<float> x = Numbers(1).floats(n_rows * width), delta = Numbers(2).floats(n_rows * taps * n_groups),
                             base = Numbers(3).floats(taps * width);
    std::vector<float> expected;
    for (int32_t level = 0; level < n_kernel_levels(); ++level) {
      std::vector<float> y(x.size(), -7.0f);
      const BlockConvArgs args{x.data(), width, width, delta.data(), taps * n_groups, taps, group, base.data(), y.data(), width};
      test::on_team(level + 1, 64, [&](const ThreadCtx& ctx) { kernel_level(level)->block_conv(args, view, ctx); });
      if (level == 0) expected = y;
      CHECK(test::same_bits(y, expected));
    }
    for (int64_t c = 0; c < width; ++c) { // the first row of a block has nothing before it
      const int64_t at = 5 * width + c, g = 5 * taps * n_groups + c / group;
      CHECK(expected[static_cast<size_t>(at)] ==
            (base[static_cast<size_t>(c)] + delta[static_cast<size_t>(g)]) * x[static_cast<size_t>(at)]);
    }
  }
}

} // namespace tiercel
