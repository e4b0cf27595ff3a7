// What recurrent layers make their states of, kept of rows that may turn out wrong.
//
// A state cannot go back. So a sequence with drafts leaves its states as they were: the step computes its rows on a copy of each block of
// them, in the cache, and keeps the inputs of every recurrent op here. Once it is known how many rows are right, `Program::advance` walks
// just these with the same kernels from the same numbers: the bits are those of a step that had no others. A state for each row would take
// rows x states of memory and of writing; inputs take a hundredth of that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tiercel {

// Of one op: rows of row_floats, the first at `offset` of the region; each holds the op's inputs one behind the other.
struct TrialInputs {
  struct Part {
    int64_t from_offset, from_stride_bytes; // in the arena
    int64_t width, column;                  // floats
  };
  size_t op;
  std::vector<Part> parts;
  int64_t row_floats = 0, offset = 0; // floats
  int64_t output_floats = 0;          // of a row that the op writes, when nobody reads it
};

// Rows of a step's sequences that turned out right: `count` of each from its row `first` on.
struct TrialRows {
  const int32_t *first, *count; // [S]
};

} // namespace tiercel
