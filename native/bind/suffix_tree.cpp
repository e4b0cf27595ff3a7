// The door to SuffixTree: drafters of spec/ keep one a sequence and one for all.
#include "tiercel/suffix_tree.hpp"

#include <nanobind/stl/vector.h>

#include <optional>

#include "bind.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiercel {

namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const int32_t> span_of(const Ints& a) { return {a.data(), a.size()}; }

// So many tokens take about as long as it takes to get the interpreter's lock back.
constexpr size_t kManyTokens = 512;

} // namespace

void bind_suffix_tree(nb::module_& m) {
  nb::class_<SuffixTree>(m, "SuffixTree", "Which tokens followed a context before, and how often; see suffix_tree.hpp.")
      .def(
          "__init__",
          [](SuffixTree* self, int32_t max_depth, int64_t max_bytes) {
            if (max_depth < 1 || max_depth > 1024) throw nb::value_error("max_depth: needs 1 to 1024");
            new (self) SuffixTree(max_depth, max_bytes);
          },
          "max_depth"_a, "max_bytes"_a)
      .def("begin", &SuffixTree::begin)
      .def(
          "extend",
          [](SuffixTree& t, int32_t text, const Ints& tokens) {
            if (text < 0 || text >= t.n_texts()) throw nb::value_error("text: it was not begun");
            for (const int32_t id : span_of(tokens))
              if (id < 0) throw nb::value_error("tokens: an id is below 0");
            std::optional<nb::gil_scoped_release> release;
            if (tokens.size() > kManyTokens) release.emplace();
            return t.extend(text, span_of(tokens));
          },
          "text"_a, "tokens"_a)
      .def(
          "propose",
          [](const SuffixTree& t, const Ints& context, int32_t n_max, double factor, double min_probability) {
            Continuation c = t.propose(span_of(context), n_max, factor, min_probability);
            return nb::make_tuple(std::move(c.tokens), std::move(c.probabilities), c.n_matched, c.score);
          },
          "context"_a, "n_max"_a, "factor"_a, "min_probability"_a)
      .def(
          "count", [](const SuffixTree& t, const Ints& run) { return t.count(span_of(run)); }, "run"_a)
      .def_prop_ro("n_bytes", &SuffixTree::bytes)
      .def_prop_ro("n_nodes", &SuffixTree::n_nodes);
}

} // namespace tiercel
