#include "tiercel/draft_head.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "sampler_noise.hpp"
#include "tiercel/verify.hpp"

namespace tiercel {

namespace {

using sampler_noise::kBlock;
using sampler_noise::largest_of_block;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

float sigmoid(float x) { return static_cast<float>(1.0 / (1.0 + std::exp(-double{x}))); }

// The ids of the n largest of x, best first, the lower id first of equals. Blocks below the last of them are passed over.
void find_best(const float* x, int64_t n_x, int64_t n, int32_t* ids) {
  int64_t held = 0;
  for (int64_t i = 0; i < n_x; ++i) {
    if (held == n) {
      while (i % kBlock == 0 && i + kBlock <= n_x && !(largest_of_block(x + i) > x[ids[n - 1]])) i += kBlock;
      if (i >= n_x || !(x[i] > x[ids[n - 1]])) continue;
    }
    int64_t at = held < n ? held++ : n - 1;
    for (; at > 0 && x[i] > x[ids[at - 1]]; --at) ids[at] = ids[at - 1];
    ids[at] = static_cast<int32_t>(i);
  }
}

using Spec = DraftHead::Spec;
using Matrix = DraftHead::Matrix;

std::string shape_text(int64_t n, int64_t k) { return "[" + std::to_string(n) + ", " + std::to_string(k) + "]"; }

std::string broken_matrix(const std::string& name, const Matrix& m, int64_t n, int64_t k) {
  if (m.n != n || m.k != k || static_cast<int64_t>(m.data.size()) != n * k)
    return name + ": got " + shape_text(m.n, m.k) + "; " + shape_text(n, k) + " is needed";
  return std::all_of(m.data.begin(), m.data.end(), [](float x) { return std::isfinite(x); }) ? "" : name + ": holds NaN or infinity";
}

std::string broken_ids(const Spec& s) {
  const std::string of = std::to_string(s.vocab), all = std::to_string(s.target_vocab);
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  if (s.vocab < 1 || s.target_vocab < 1 || s.vocab > s.target_vocab || s.target_vocab > kMost)
    return "vocab: got " + of + " ids drafted of " + all + "; 1 or more, and not more than all, are needed";
  if (s.topk < 0 || s.topk > s.vocab) return "topk: got " + std::to_string(s.topk) + "; 0 to the " + of + " ids drafted are needed";
  if (s.d2t.empty()) return "";
  if (static_cast<int64_t>(s.d2t.size()) != s.vocab) return "d2t: got " + std::to_string(s.d2t.size()) + " offsets; " + of + " are needed";
  std::vector<bool> is_seen(static_cast<size_t>(s.target_vocab));
  for (int64_t i = 0; i < s.vocab; ++i) {
    const int64_t id = i + s.d2t[static_cast<size_t>(i)];
    if (id < 0 || id >= s.target_vocab || is_seen[static_cast<size_t>(id)])
      return "d2t: drafted id " + std::to_string(i) + " stands for token " + std::to_string(id) + "; tokens below " + all +
             ", each once, are needed";
    is_seen[static_cast<size_t>(id)] = true;
  }
  return "";
}

// Columns of mix beside the hidden row's.
int64_t own_columns(const Spec& s) {
  if (s.kind == DraftHead::Kind::Selector) return 0;
  return s.markov == DraftHead::Markov::Rnn ? 2 * s.after.k : s.after.k;
}

std::string broken_mix(const Spec& s) {
  const bool is_selector = s.kind == DraftHead::Kind::Selector, is_rnn = s.markov == DraftHead::Markov::Rnn;
  const std::string name = is_selector ? "projection" : is_rnn ? "joint" : "gate";
  if (!is_selector && s.markov == DraftHead::Markov::Vanilla)
    return s.mix.n || !s.mix_bias.empty() ? name + ": a vanilla head has none; choose its kind" : "";
  const int64_t own = own_columns(s), n = !is_selector && is_rnn ? 3 * s.after.k : s.after.k;
  if (s.mix.k <= own) return name + ": got " + shape_text(s.mix.n, s.mix.k) + "; more columns than " + std::to_string(own) + " are needed";
  if (std::string why = broken_matrix(name, s.mix, n, s.mix.k); !why.empty()) return why;
  const auto n_bias = static_cast<int64_t>(s.mix_bias.size());
  return n_bias ? broken_matrix(name + "_bias", {1, n_bias, s.mix_bias}, 1, n) : "";
}

std::string broken_confidence(const Spec& s) {
  if (s.confidence.n == 0) return "";
  if (s.kind == DraftHead::Kind::Selector) return "confidence: a selector has none";
  const int64_t r = s.confidence_reads_markov ? s.after.k : 0;
  const int64_t width = s.mix.n > 0 ? s.mix.k - own_columns(s) : std::max<int64_t>(s.confidence.k - r, 1);
  if (!std::isfinite(s.confidence_bias)) return "confidence_bias: holds NaN or infinity";
  return broken_matrix("confidence", s.confidence, 1, width + r);
}

} // namespace

std::string Spec::broken() const {
  if (std::string why = broken_ids(*this); !why.empty()) return why;
  if (kind == Kind::Plain)
    return before.n || after.n || mix.n || confidence.n || topk ? "plain: got weights or topk; a plain head has neither" : "";
  const bool is_markov = kind == Kind::Markov;
  if (!is_markov && topk == 0) return "topk: got 0; a selector needs 1 or more";
  if (std::string why = broken_matrix(is_markov ? "w2" : "successor", after, vocab, std::max<int64_t>(after.k, 1)); !why.empty())
    return why;
  if (std::string why = broken_matrix(is_markov ? "w1" : "predecessor", before, target_vocab, after.k); !why.empty()) return why;
  if (std::string why = broken_mix(*this); !why.empty()) return why;
  return broken_confidence(*this);
}

DraftHead::DraftHead(const KernelTable* kernels, Spec spec) : kernels_(kernels), spec_(std::move(spec)), rank_(spec_.after.k) {
  if (spec_.mix.n > 0)
    hidden_ = spec_.mix.k - own_columns(spec_);
  else if (spec_.confidence.n > 0)
    hidden_ = spec_.confidence.k - (spec_.confidence_reads_markov ? rank_ : 0);
}

DraftHead::Scratch::Scratch(const DraftHead& head)
    : z_(static_cast<size_t>((head.target_vocab() + kBlock - 1) / kBlock * kBlock), -kInf), block_max_(z_.size() / kBlock) {
  const auto n = static_cast<size_t>(head.spec_.topk), r = static_cast<size_t>(head.rank_);
  row_.resize(r > 0 && n == 0 ? static_cast<size_t>(head.vocab()) : 0);
  candidates_.resize(static_cast<size_t>(head.n_choices()));
  scores_.resize(candidates_.size());
  rows_.resize(n * r);
  input_.resize(2 * r + static_cast<size_t>(head.hidden_));
  output_.resize(static_cast<size_t>(head.spec_.mix.n));
  edge_.resize(r);
  state_.resize(r);
}

// output = mix @ input + bias
void DraftHead::mix(Scratch& s) const {
  kernels_->row_products(spec_.mix.data.data(), spec_.mix.n, spec_.mix.k, s.input_.data(), s.output_.data());
  for (size_t i = 0; i < spec_.mix_bias.size(); ++i) s.output_[i] += spec_.mix_bias[i];
}

// The vector whose product with a token's row of `after` is that token's bias behind `before`.
void DraftHead::make_edge(int32_t before, const float* hidden, Scratch& s) const {
  const float *own = before_row(before), *out = s.output_.data();
  float *in = s.input_.data(), *edge = s.edge_.data(), *state = s.state_.data();
  const int64_t r = rank_;
  if (spec_.kind == Kind::Selector) {
    std::copy_n(hidden, hidden_, in);
    mix(s);
    for (int64_t i = 0; i < r; ++i) edge[i] = own[i] * out[i];
    return;
  }
  switch (spec_.markov) {
    case Markov::Vanilla: std::copy_n(own, r, edge); break;
    case Markov::Gated:
      std::copy_n(own, r, std::copy_n(hidden, hidden_, in));
      mix(s);
      for (int64_t i = 0; i < r; ++i) edge[i] = own[i] * sigmoid(out[i]);
      break;
    case Markov::Rnn:
      std::copy_n(hidden, hidden_, std::copy_n(own, r, std::copy_n(state, r, in)));
      mix(s);
      for (int64_t i = 0; i < r; ++i) {
        const float keep = sigmoid(out[i]);
        state[i] = keep * state[i] + (1.0f - keep) * std::tanh(out[r + i]);
        edge[i] = std::tanh(out[2 * r + i]);
      }
      break;
  }
}

float DraftHead::confidence_of(int32_t before, const float* hidden, Scratch& s) const {
  float* end = std::copy_n(hidden, hidden_, s.input_.data());
  if (spec_.confidence_reads_markov) std::copy_n(before_row(before), rank_, end);
  float logit = 0.0f;
  kernels_->row_products(spec_.confidence.data.data(), 1, spec_.confidence.k, s.input_.data(), &logit);
  return sigmoid(logit + spec_.confidence_bias);
}

// Of all drafted ids, by logits that may hold a NaN.
DraftHead::Pick DraftHead::pick_of_all(const float* logits, const Draw& draw, Scratch& s) const {
  const int64_t likeliest = kernels_->argmax(logits, spec_.vocab);
  if (likeliest < 0 || !std::isfinite(logits[likeliest])) return {-1, kNan};
  if (draw.kept.n != nullptr) {
    find_best(logits, spec_.vocab, n_choices(), s.candidates_.data());
    for (size_t i = 0; i < s.candidates_.size(); ++i) s.scores_[i] = logits[s.candidates_[i]];
    return pick_apart(n_choices(), draw, s);
  }
  const float largest = logits[likeliest], t = draw.temperature;
  const float total = kernels_->exp_sum(logits, spec_.vocab, largest);
  if (t == 0.0f) return {target_id(likeliest), 1.0f / total};
  float* z = s.z_.data(); // stays -inf where nothing is drafted
  if (spec_.d2t.empty()) {
    for (int64_t i = 0; i < spec_.vocab; ++i) z[i] = (logits[i] - largest) / t;
  } else {
    for (int64_t i = 0; i < spec_.vocab; ++i) z[target_id(i)] = (logits[i] - largest) / t;
  }
  const auto n_blocks = static_cast<int64_t>(s.block_max_.size());
  for (int64_t b = 0; b < n_blocks; ++b) s.block_max_[static_cast<size_t>(b)] = largest_of_block(z + b * kBlock);
  const int64_t token = sampler_noise::draw(z, s.block_max_.data(), n_blocks, target_id(likeliest), {draw.seed, draw.position});
  return {static_cast<int32_t>(token), static_cast<float>(std::exp(double{z[token]} * double{t})) / total};
}

// Of the topk best logits, which may hold a NaN, each with its bias.
DraftHead::Pick DraftHead::pick_of_best(const float* logits, const Draw& draw, Scratch& s) const {
  const int64_t likeliest = kernels_->argmax(logits, spec_.vocab), n = spec_.topk;
  if (likeliest < 0 || !std::isfinite(logits[likeliest])) return {-1, kNan};
  find_best(logits, spec_.vocab, n, s.candidates_.data());
  const int32_t* ids = s.candidates_.data();
  float* scores = s.scores_.data();
  for (int64_t i = 0; i < n; ++i) std::copy_n(spec_.after.data.data() + ids[i] * rank_, rank_, s.rows_.data() + i * rank_);
  kernels_->row_products(s.rows_.data(), n, rank_, s.edge_.data(), scores);
  float largest = -kInf;
  for (int64_t i = 0; i < n; ++i) {
    scores[i] += logits[ids[i]];
    if (std::isnan(scores[i])) return {-1, kNan};
    largest = std::max(largest, scores[i]);
  }
  if (!std::isfinite(largest)) return {-1, kNan};
  if (draw.kept.n != nullptr) return pick_apart(n, draw, s);
  double total = 0.0, best = 0.0;
  int64_t chosen = -1;
  for (int64_t i = 0; i < n; ++i) {
    total += std::exp(double{scores[i]} - double{largest});
    double value = scores[i];
    if (draw.temperature > 0.0f) {
      const uint32_t word = sampler_noise::word_of({draw.seed, draw.position}, target_id(ids[i]));
      value = double{(scores[i] - largest) / draw.temperature} + sampler_noise::gumbel(word);
    }
    if (chosen >= 0 && (value < best || (value == best && target_id(ids[i]) > target_id(ids[chosen])))) continue;
    best = value;
    chosen = i;
  }
  return {target_id(ids[chosen]), static_cast<float>(std::exp(double{scores[chosen]} - double{largest}) / total)};
}

// Of n candidates by their scores, of which none is NaN and one finite; keeps what it draws from.
DraftHead::Pick DraftHead::pick_apart(int64_t n, const Draw& draw, Scratch& s) const {
  const float *scores = s.scores_.data(), largest = *std::max_element(scores, scores + n);
  const sampler_noise::Key key{draw.seed, draw.position, Stream::Draft, draw.lane};
  double total = 0.0, best = -std::numeric_limits<double>::infinity(), mean = 0.0;
  int32_t n_kept = 0, token = -1;
  for (int64_t i = 0; i < n; ++i) {
    const double z = (double{scores[i]} - double{largest}) / double{draw.temperature}, weight = std::exp(z);
    if (weight == 0.0) continue;
    const int32_t id = target_id(s.candidates_[static_cast<size_t>(i)]);
    const double value = z + sampler_noise::gumbel(sampler_noise::word_of(key, id));
    if (value > best || (value == best && id < token)) best = value, token = id;
    draw.kept.ids[n_kept] = id;
    draw.kept.q[n_kept++] = weight;
    total += weight;
  }
  for (int32_t i = 0; i < n_kept; ++i) {
    const double q = draw.kept.q[i] / total;
    draw.kept.q[i] = q;
    mean += q * q;
  }
  *draw.kept.n = n_kept;
  return {token, static_cast<float>(std::sqrt(mean))};
}

DraftHead::Pick DraftHead::pick_next(int32_t before, const float* logits, const float* hidden, const Draw& draw, Scratch& s) const {
  if (spec_.kind == Kind::Plain) return pick_of_all(logits, draw, s);
  make_edge(before, hidden, s);
  Pick pick{-1, kNan};
  if (spec_.topk > 0) {
    pick = pick_of_best(logits, draw, s);
  } else {
    float* row = s.row_.data();
    kernels_->row_products(spec_.after.data.data(), spec_.vocab, rank_, s.edge_.data(), row);
    for (int64_t i = 0; i < spec_.vocab; ++i) row[i] += logits[i];
    pick = pick_of_all(row, draw, s);
  }
  if (spec_.confidence.n > 0 && pick.token >= 0) pick.probability = confidence_of(before, hidden, s);
  return pick;
}

void DraftHead::pick(const Rows& rows, int64_t k, Scratch& scratch, int32_t* tokens, float* confidence) const {
  std::fill_n(tokens, k, -1);
  std::fill_n(confidence, k, kNan);
  std::fill(scratch.state_.begin(), scratch.state_.end(), 0.0f);
  const bool is_drawn = rows.params != nullptr && rows.params->temperature > 0.0;
  int32_t before = rows.anchor;
  for (int64_t i = 0; i < k; ++i) {
    if (before < 0 || before >= spec_.target_vocab) return;
    Draw draw{is_drawn ? static_cast<float>(rows.params->temperature) : 0.0f,
              is_drawn ? rows.params->seed : 0,
              static_cast<uint32_t>(rows.position + i),
              0,
              {}};
    if (rows.kept != nullptr) rows.kept->n[i] = 0;
    if (rows.kept != nullptr && is_drawn) {
      draw.seed = rows.params->apart_seed;
      draw.position = static_cast<uint32_t>(rows.position - rows.first);
      draw.lane = static_cast<uint32_t>(rows.first + i);
      draw.kept = {rows.kept->n + i, rows.kept->ids + i * n_choices(), rows.kept->q + i * n_choices()};
    }
    const float* hidden = rows.hidden != nullptr ? rows.hidden + i * rows.ld_hidden : nullptr;
    const Pick found = pick_next(before, rows.logits + i * rows.ld_logits, hidden, draw, scratch);
    if (found.token < 0) return;
    tokens[i] = before = found.token;
    confidence[i] = found.probability;
  }
}

} // namespace tiercel
