// What the bindings of programs and of what runs them share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tiercel/drafting.hpp"
#include "tiercel/packed.hpp"
#include "tiercel/program.hpp"

namespace tiercel {

using Buffer = std::pair<int64_t, int64_t>; // offset, stride in bytes

inline BufferRef place_of(const Buffer& b) { return {b.first, b.second}; }
inline std::optional<BufferRef> place_of(const std::optional<Buffer>& b) { return b ? std::optional(place_of(*b)) : std::nullopt; }

// A program being built, with the packed weights it points into.
struct Recording {
  std::unique_ptr<Program> program;
  std::vector<std::shared_ptr<PackedStore>> weights;

  void add(bool is_logits_rows, OpBody body) {
    if (!program) throw nanobind::value_error("Program: it was given to a StepRunner; build a new one");
    program->add({is_logits_rows ? Rows::Logits : Rows::Tokens, std::move(body)});
  }
  const PackedMatrix& keep(const std::shared_ptr<PackedStore>& w) {
    weights.push_back(w);
    return w->view();
  }
};

// A drafter before it has pages: what a StepRunner takes to draft with.
struct DraftRecording {
  struct Module {
    Recording recording;
    int64_t arena_bytes;
    BufferRef logits, hidden;
  };
  std::vector<Module> modules;
  std::shared_ptr<const DraftHead> head;
  DraftSetup setup;
  int64_t max_tokens, max_rows;

  DraftRecording(std::shared_ptr<const DraftHead> of, DraftSetup with, int64_t n_tokens, int64_t n_rows)
      : head(std::move(of)), setup(with), max_tokens(n_tokens), max_rows(n_rows) {}
  DraftRecording(DraftRecording&&) = default; // and no copy, which the vector would only seem to have

  // Seals the programs over the pages. The recordings are used up, but for their weights.
  std::unique_ptr<Drafting> make(const KvPool& pool, int64_t n_slots, int64_t max_len, int64_t n_token_ids);
};

} // namespace tiercel
