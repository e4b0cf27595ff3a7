// A team of threads that runs one function together (SPMD), with a barrier inside.
//
// The caller of run() is thread 0; the others are the team's own. Between runs they spin for a moment, then sleep on a futex.
// Inside a run every thread may be pinned to its own processor: two free spinners on one processor cost a step 200 times its length.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "tiercel/kernels.hpp"

namespace tiercel {

class Team {
 public:
  // cpus: the processor of each thread, or empty to leave placement to the system. n_threads >= 1.
  Team(int32_t n_threads, std::vector<int32_t> cpus);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int32_t n_threads() const { return n_threads_; }
  Barrier* barrier() { return &barrier_; }

  // Calls fn(arg, thread) on every thread and returns when all have returned. One run at a time, always from the same thread.
  void run(void (*fn)(void*, int32_t), void* arg);

  // What `thread`, which calls this, fetches into its cache from now on while it waits at the barrier: it will read that next.
  void look_ahead(int32_t thread, WeightRun run);

  // Pins the calling thread as thread 0 and sets its floating-point mode. Called once by the thread that will call run().
  void adopt_caller();

 private:
  struct alignas(64) Flag {
    std::atomic<uint64_t> n_arrived{0};
  };
  // All threads watch all flags: one hop, 100 to 200 ns for a few threads.
  struct alignas(64) Lookahead {
    const uint8_t* next = nullptr;
    const uint8_t* end = nullptr;
  };
  struct FlagBarrier : Barrier {
    std::unique_ptr<Flag[]> flags;
    std::unique_ptr<Lookahead[]> ahead; // each thread's own
    int32_t n = 0;
  };

  static void wait_all(Barrier* self, int32_t thread);
  void end();
  void serve(int32_t thread);
  void settle(int32_t thread) const;

  const int32_t n_threads_;
  const std::vector<int32_t> cpus_;
  FlagBarrier barrier_;

  // Written by run() before epoch_ is raised; read by the others after they see it.
  void (*fn_)(void*, int32_t) = nullptr;
  void* arg_ = nullptr;
  std::atomic<int32_t> epoch_{0}; // 32 bits: what a futex compares; wrapping is harmless, only equality is asked
  std::atomic<bool> is_closing_{false};
  std::vector<std::thread> threads_;
};

} // namespace tiercel
