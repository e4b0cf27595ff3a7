// Drafters: what a step runner drafts with.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "bind.hpp"
#include "recording.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiercel {

std::unique_ptr<Drafting> DraftRecording::make(const KvPool& pool, int64_t n_slots, int64_t max_len, int64_t n_token_ids) {
  const bool is_chain = setup.kind == DraftKind::Chain;
  const int64_t n_rows = is_chain ? n_slots : n_slots * setup.n_block_rows;
  if (max_tokens < n_rows || max_rows < n_slots * (is_chain ? 1 : setup.n_block_rows - setup.first_logits_row))
    throw nb::value_error("Drafting: fewer rows than its passes have");
  if (head->target_vocab() != n_token_ids) throw nb::value_error("Drafting: the head drafts for another vocabulary than the target's");
  std::vector<DraftModule> made;
  for (Module& m : modules) {
    if (!m.recording.program) throw nb::value_error("Drafting: it was given to a StepRunner; build a new one");
    if (head->reads_hidden() && (!setup.gives_hidden || head->hidden_width() * 4 > m.hidden.stride_bytes))
      throw nb::value_error("Drafting: the head reads wider rows than the drafter's program gives out");
    m.recording.program->seal(m.arena_bytes, pool, m.logits, head->vocab(), max_tokens, max_rows, n_slots, max_len);
    const int64_t width = m.recording.program->given_width();
    const BufferRef& given = made.empty() ? setup.target_hidden : made.back().hidden;
    if (is_chain != (width > 0) || width * 4 > given.stride_bytes || (!made.empty() && width != made[0].program->given_width()))
      throw nb::value_error("Drafting: the rows given are not those that a chain's program takes");
    made.push_back({std::move(m.recording.program), m.hidden});
  }
  return std::make_unique<Drafting>(std::move(made), head, setup, n_slots, max_len, max_tokens, n_token_ids);
}

static Draws draws_named(const std::string& name) {
  if (name == "coupled") return Draws::Coupled;
  if (name == "apart") return Draws::Apart;
  if (name == "likeliest") return Draws::Likeliest;
  throw nb::value_error("draws: needs to be coupled, apart or likeliest");
}

// A program, its arena's size, and where its logits and the rows that it gives out stand.
using Module = std::tuple<Recording*, int64_t, Buffer, std::optional<Buffer>>;

void bind_drafting(nb::module_& m) {
  nb::class_<DraftRecording>(m, "Drafting", "A drafter for one StepRunner: programs over its pages, and how drafts are picked.")
      .def(
          "__init__",
          [](DraftRecording* self, const std::vector<Module>& modules, std::shared_ptr<DraftHead> head, const std::string& kind,
             int32_t n_draft_max, std::tuple<int32_t, int32_t, int32_t> block, std::pair<int64_t, int64_t> max_rows,
             std::optional<Buffer> target_hidden, const std::string& draws) {
            if (kind != "block" && kind != "chain") throw nb::value_error("kind: needs to be block or chain");
            const auto [n_block_rows, first_logits_row, mask_token] = block;
            const bool is_block = kind == "block";
            if (n_draft_max < 1) throw nb::value_error("n_draft_max: needs 1 or more");
            if (modules.empty() || (is_block && modules.size() > 1)) throw nb::value_error("modules: a block has one, a chain one or more");
            if (is_block && (first_logits_row < 0 || n_draft_max > n_block_rows - first_logits_row))
              throw nb::value_error("n_draft_max: more than a block has rows for");
            DraftSetup setup{is_block ? DraftKind::Block : DraftKind::Chain, n_draft_max, n_block_rows, first_logits_row, mask_token};
            if (target_hidden) setup.target_hidden = place_of(*target_hidden);
            setup.gives_hidden = true;
            setup.draws = draws_named(draws);
            for (const auto& [recording, arena_bytes, logits, hidden] : modules) {
              if (!recording->program) throw nb::value_error("Drafting: this program is already in use");
              setup.gives_hidden = setup.gives_hidden && hidden;
            }
            if (!is_block && (!target_hidden || ((n_draft_max > 1 || modules.size() > 1) && !setup.gives_hidden)))
              throw nb::value_error("Drafting: a chain needs rows of the target, and for more than one draft its own");
            new (self) DraftRecording(std::move(head), setup, max_rows.first, max_rows.second);
            for (const auto& [recording, arena_bytes, logits, hidden] : modules)
              self->modules.push_back({{std::move(recording->program), std::move(recording->weights)},
                                       arena_bytes,
                                       place_of(logits),
                                       hidden ? place_of(*hidden) : BufferRef{}});
          },
          "modules"_a, "head"_a, "kind"_a, "n_draft_max"_a, "block"_a, "max_rows"_a, "target_hidden"_a = nb::none(), "draws"_a = "coupled");
  m.def(
      "choose_drafts",
      [](const std::vector<std::vector<float>>& confidence, int64_t n_rows, std::vector<double> step_seconds, std::vector<double> chances,
         bool stops_early) {
        std::vector<const float*> rows;
        std::vector<int32_t> counts;
        for (const auto& own : confidence) rows.push_back(own.data()), counts.push_back(static_cast<int32_t>(own.size()));
        std::vector<DraftOffer> offers;
        choose_drafts({std::move(step_seconds), std::move(chances)}, rows, n_rows, counts, offers, stops_early);
        return counts;
      },
      "confidence"_a, "n_rows"_a, "step_seconds"_a, "chances"_a, "stops_early"_a = false,
      "How many of each sequence's drafts a step computes.");
}

} // namespace tiercel
