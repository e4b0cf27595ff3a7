// What the row and attention kernel tests share: repeatable numbers, every level, and a team with poisoned scratch.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "tiercel/kernels.hpp"
#include "tiercel/team.hpp"

namespace tiercel::test {

// A fixed stream of floats in [-1, 1).
class Numbers {
 public:
  explicit Numbers(uint64_t seed) : state_(seed * 2654435761u + 1) {}
  uint32_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 33);
  }
  float uniform() { return static_cast<float>(next()) / 1073741824.0f - 1.0f; }
  std::vector<float> floats(int64_t n, float scale = 1.0f) {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) v = scale * uniform();
    return x;
  }

 private:
  uint64_t state_;
};

// 64-byte aligned bytes, all ones to begin with: as f16 and as f32 that is NaN, so whatever reads it unwritten shows.
class Poisoned {
 public:
  explicit Poisoned(int64_t n) : bytes_(static_cast<size_t>(n) + 64, 0xff) {
    at_ = bytes_.data() + (64 - reinterpret_cast<uintptr_t>(bytes_.data()) % 64) % 64;
  }
  uint8_t* data() { return at_; }

 private:
  std::vector<uint8_t> bytes_;
  uint8_t* at_;
};

// Calls kernel(ctx) on every thread of a new team.
template <class Kernel>
void on_team(int32_t n_threads, int64_t scratch_bytes, Kernel kernel) {
  Team team(n_threads, {});
  struct Call {
    Kernel& kernel;
    Team& team;
    std::vector<Poisoned> scratch;
    int64_t scratch_bytes;
  } call{kernel, team, {}, scratch_bytes};
  for (int32_t i = 0; i < n_threads; ++i) call.scratch.emplace_back(scratch_bytes);
  team.run(
      [](void* arg, int32_t thread) {
        Call& c = *static_cast<Call*>(arg);
        uint8_t* scratch = c.scratch[static_cast<size_t>(thread)].data();
        c.kernel(ThreadCtx{thread, c.team.n_threads(), c.team.barrier(), scratch, c.scratch_bytes});
      },
      &call);
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

} // namespace tiercel::test
