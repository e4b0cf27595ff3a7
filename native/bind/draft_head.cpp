// Heads that pick drafts.
#include "tiercel/draft_head.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "bind.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiercel {
namespace {

using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using FloatRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Weights = std::map<std::string, Floats>;

void refuse(const std::string& why) { throw nb::value_error(("DraftHead: " + why).c_str()); }

// Takes the array of a name, which is then used; one without rows if there is none. A vector is one row.
DraftHead::Matrix take(Weights& weights, const std::string& name) {
  const auto found = weights.find(name);
  if (found == weights.end()) return {};
  const Floats& a = found->second;
  if (a.ndim() < 1 || a.ndim() > 2) refuse(name + ": got " + std::to_string(a.ndim()) + " dimensions; 1 or 2 are needed");
  const bool is_vector = a.ndim() == 1;
  DraftHead::Matrix m{is_vector ? 1 : static_cast<int64_t>(a.shape(0)), static_cast<int64_t>(a.shape(is_vector ? 0 : 1)), {}};
  m.data.assign(a.data(), a.data() + a.size());
  weights.erase(found);
  return m;
}

DraftHead::Kind kind_named(const std::string& name) {
  if (name == "plain") return DraftHead::Kind::Plain;
  if (name == "markov") return DraftHead::Kind::Markov;
  if (name == "selector") return DraftHead::Kind::Selector;
  refuse("kind: got '" + name + "'; plain, markov or selector is needed");
  return {};
}

DraftHead::Markov markov_named(const std::string& name) {
  if (name == "vanilla") return DraftHead::Markov::Vanilla;
  if (name == "gated") return DraftHead::Markov::Gated;
  if (name == "rnn") return DraftHead::Markov::Rnn;
  refuse("markov: got '" + name + "'; vanilla, gated or rnn is needed");
  return {};
}

std::shared_ptr<DraftHead> make_draft_head(const std::string& kind, int64_t vocab, int64_t target_vocab, Weights weights,
                                           const std::string& markov, int64_t topk, bool confidence_reads_markov,
                                           const std::optional<Ints>& d2t, std::optional<int32_t> level) {
  DraftHead::Spec spec;
  spec.kind = kind_named(kind);
  spec.markov = markov_named(markov);
  spec.vocab = vocab;
  spec.target_vocab = target_vocab;
  spec.topk = topk;
  spec.confidence_reads_markov = confidence_reads_markov;
  const bool is_selector = spec.kind == DraftHead::Kind::Selector;
  const char* mix = is_selector ? "projection" : spec.markov == DraftHead::Markov::Rnn ? "joint" : "gate";
  spec.before = take(weights, is_selector ? "predecessor" : "w1");
  spec.after = take(weights, is_selector ? "successor" : "w2");
  spec.mix = take(weights, mix);
  spec.mix_bias = take(weights, std::string(mix) + "_bias").data;
  spec.confidence = take(weights, "confidence");
  const DraftHead::Matrix bias = take(weights, "confidence_bias");
  if (bias.n && (bias.n * bias.k != 1 || spec.confidence.n == 0)) refuse("confidence_bias: one number for a confidence head is needed");
  if (bias.n) spec.confidence_bias = bias.data[0];
  if (!weights.empty()) refuse(weights.begin()->first + ": a " + kind + " head of this kind has no such weight");
  if (d2t) spec.d2t.assign(d2t->data(), d2t->data() + d2t->size());
  if (d2t && spec.d2t.empty()) refuse("d2t: got no offsets; one for each drafted id is needed");
  const int32_t i = level.value_or(n_kernel_levels() - 1);
  if (i < 0 || i >= n_kernel_levels()) refuse("level: must be in 0..n_kernel_levels()");
  if (const std::string why = spec.broken(); !why.empty()) refuse(why);
  return std::make_shared<DraftHead>(kernel_level(i), std::move(spec));
}

using Odds = std::vector<std::pair<std::vector<int32_t>, std::vector<double>>>;

std::tuple<std::vector<int32_t>, std::vector<float>, Odds> pick_door(const DraftHead& head, const FloatRows& logits,
                                                                     const std::optional<FloatRows>& hidden, int32_t anchor,
                                                                     const SamplerParams* params, int64_t position, bool apart) {
  const auto k = static_cast<int64_t>(logits.shape(0)), width = static_cast<int64_t>(logits.shape(1));
  if (width != head.vocab())
    refuse("logits: got " + std::to_string(width) + " columns; " + std::to_string(head.vocab()) + " ids are drafted");
  const int64_t needed = head.hidden_width();
  const int64_t n = hidden ? static_cast<int64_t>(hidden->shape(0)) : 0, e = hidden ? static_cast<int64_t>(hidden->shape(1)) : 0;
  if (needed > 0 && (n != k || e != needed))
    refuse("hidden: got [" + std::to_string(n) + ", " + std::to_string(e) + "]; [" + std::to_string(k) + ", " + std::to_string(needed) +
           "] is needed");
  if (position < 0) refuse("position: must be 0 or more");
  DraftHead::Scratch scratch(head);
  std::vector<int32_t> tokens(static_cast<size_t>(k));
  std::vector<float> confidence(static_cast<size_t>(k));
  std::vector<int32_t> n_odds(static_cast<size_t>(k)), ids(static_cast<size_t>(k * head.n_choices()));
  std::vector<double> q(ids.size());
  const DraftHead::Kept kept{n_odds.data(), ids.data(), q.data()};
  head.pick({logits.data(), width, hidden ? hidden->data() : nullptr, e, anchor, params, position, apart ? &kept : nullptr}, k, scratch,
            tokens.data(), confidence.data());
  Odds odds;
  for (int64_t i = 0; apart && i < k; ++i) {
    const int64_t from = i * head.n_choices(), to = from + n_odds[static_cast<size_t>(i)];
    odds.push_back({{ids.begin() + from, ids.begin() + to}, {q.begin() + from, q.begin() + to}});
  }
  return {tokens, confidence, odds};
}

std::pair<std::vector<int32_t>, std::vector<float>> pick_coupled_door(const DraftHead& head, const FloatRows& logits,
                                                                      const std::optional<FloatRows>& hidden, int32_t anchor,
                                                                      const SamplerParams* params, int64_t position) {
  auto [tokens, confidence, odds] = pick_door(head, logits, hidden, anchor, params, position, false);
  return {std::move(tokens), std::move(confidence)};
}

std::tuple<std::vector<int32_t>, std::vector<float>, Odds> pick_apart_door(const DraftHead& head, const FloatRows& logits,
                                                                           const std::optional<FloatRows>& hidden, int32_t anchor,
                                                                           const SamplerParams* params, int64_t position) {
  return pick_door(head, logits, hidden, anchor, params, position, true);
}

} // namespace

void bind_draft_head(nb::module_& m) {
  nb::class_<DraftHead>(m, "DraftHead", "Picks drafts from a draft pass's logits; made by make_draft_head, immutable.")
      .def_prop_ro("vocab", &DraftHead::vocab, "Ids that are drafted: columns of logits.")
      .def_prop_ro("hidden_width", &DraftHead::hidden_width, "Columns of a hidden row that are read; 0: none is.")
      .def("pick", &pick_coupled_door, "logits"_a, "hidden"_a.none(), "anchor"_a, "params"_a.none() = nb::none(), "position"_a = 0,
           "Target ids and confidences of as many drafts as there are rows. For tests: allocates its scratch at each call.")
      .def("pick_apart", &pick_apart_door, "logits"_a, "hidden"_a.none(), "anchor"_a, "params"_a.none() = nb::none(), "position"_a = 0,
           "The same of drafts drawn apart, and what each was drawn from: ids, and their chances.");
  m.def("make_draft_head", &make_draft_head, "kind"_a, "vocab"_a, "target_vocab"_a, "weights"_a, nb::kw_only(), "markov"_a = "vanilla",
        "topk"_a = 0, "confidence_reads_markov"_a = false, "d2t"_a = nb::none(), "level"_a = nb::none(),
        "weights: float32 arrays by role. markov: w1 [V, r], w2 [D, r]; gate [r, E + r] and gate_bias [r] if gated, joint [3 r, 2 r + E] "
        "and joint_bias [3 r] if rnn; perhaps confidence [1, E] (or [1, E + r]) and confidence_bias [1]. selector: predecessor [V, r], "
        "successor [D, r], projection [r, E]. Copied. Raises ValueError with the name of what does not fit.");
}

} // namespace tiercel
