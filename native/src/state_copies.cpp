#include "tiercel/state_copies.hpp"

#include <algorithm>
#include <cstring>

namespace tiercel {

StateCopies::StateCopies(uint8_t* slots, int64_t state_bytes, int64_t n_snapshots)
    : slots_(slots), state_bytes_(state_bytes), n_snapshots_(n_snapshots), places_(std::make_unique<Region>(state_bytes * n_snapshots)) {}

StateCopy StateCopies::take_due() {
  running_ = asked_.front();
  is_running_ = true;
  asked_.pop_front();
  return running_;
}

bool StateCopies::is_open(int32_t snapshot, bool is_read) const {
  const auto concerns = [&](const StateCopy& copy) { return copy.snapshot == snapshot && (copy.is_save || is_read); };
  return (is_running_ && concerns(running_)) || std::any_of(asked_.begin(), asked_.end(), concerns);
}

void StateCopies::run(const StateCopy& copy, Team& team) const {
  uint8_t* state = slots_ + copy.slot * state_bytes_;
  uint8_t* place = this->place(copy.snapshot);
  struct Job {
    uint8_t* to;
    const uint8_t* from;
    int64_t bytes, run_bytes;
  } job{copy.is_save ? place : state, copy.is_save ? state : place, state_bytes_, 0};
  const int64_t n_lines = (state_bytes_ + 63) / 64;
  job.run_bytes = (n_lines + team.n_threads() - 1) / team.n_threads() * 64;
  team.run(
      [](void* arg, int32_t thread) {
        const auto* j = static_cast<const Job*>(arg);
        const int64_t first = std::min(thread * j->run_bytes, j->bytes), last = std::min(first + j->run_bytes, j->bytes);
        std::memcpy(j->to + first, j->from + first, static_cast<size_t>(last - first));
      },
      &job);
}

} // namespace tiercel
