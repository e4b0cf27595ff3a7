// Copies of slots' recurrent states: to places that outlive the slot, and back.
//
// A copy is asked for between two steps and runs between them: after every step that was submitted before it, and before any later one. So
// a state is saved as those steps leave it, and a place may be asked to be written again while an older copy from it is still to run.
//
// Not thread-safe: `ask`, `take_due` and `is_due` under the runner's lock; `run` on the thread that runs steps, with no step running.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>

#include "tiercel/program.hpp"
#include "tiercel/team.hpp"

namespace tiercel {

struct StateCopy {
  int32_t slot, snapshot;
  bool is_save;          // from the slot to the place; else back
  int64_t n_steps_first; // steps submitted before it
};

class StateCopies {
 public:
  // slots: [n_slots][state_bytes], the program's.
  StateCopies(uint8_t* slots, int64_t state_bytes, int64_t n_snapshots);

  int64_t n_snapshots() const { return n_snapshots_; }
  void ask(StateCopy copy) { asked_.push_back(copy); }
  // Whether the next copy comes before the step that follows the first `n_steps_done`.
  bool is_due(int64_t n_steps_done) const { return !asked_.empty() && asked_.front().n_steps_first <= n_steps_done; }
  // The copy that is due, which is under way until `ended`.
  StateCopy take_due();
  void ended() { is_running_ = false; }
  // Whether a copy to this place is still to be made, or with `is_read` one from it too.
  bool is_open(int32_t snapshot, bool is_read) const;
  uint8_t* place(int32_t snapshot) const { return places_->data() + snapshot * state_bytes_; }
  int64_t state_bytes() const { return state_bytes_; }
  void run(const StateCopy& copy, Team& team) const;

 private:
  uint8_t* slots_;
  int64_t state_bytes_, n_snapshots_;
  std::unique_ptr<Region> places_; // [n_snapshots][state_bytes]; memory comes as places are written
  std::deque<StateCopy> asked_;
  StateCopy running_{};
  bool is_running_ = false;
};

} // namespace tiercel
