#include "tiercel/team.hpp"

#include <pthread.h>
#include <sched.h>

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tiercel {

namespace {

// A pause costs about 40 cycles here. 4096 of them are some 50 us: longer than any op's imbalance, short enough that a thread whose
// partner lost its processor gives up its own soon.
constexpr int32_t kSpinsBeforeYield = 4096;
constexpr int32_t kSpinsBeforeSleep = 2048;
// Lines fetched between two looks at the others' flags; more would make the thread late, as only so many can be on their way.
constexpr int32_t kLinesASpin = 4;

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

} // namespace

Team::Team(int32_t n_threads, std::vector<int32_t> cpus) : n_threads_(n_threads), cpus_(std::move(cpus)) {
  barrier_.wait = &Team::wait_all;
  barrier_.flags = std::make_unique<Flag[]>(static_cast<size_t>(n_threads));
  barrier_.ahead = std::make_unique<Lookahead[]>(static_cast<size_t>(n_threads));
  barrier_.n = n_threads;
  threads_.reserve(static_cast<size_t>(n_threads - 1));
  try {
    for (int32_t t = 1; t < n_threads; ++t) threads_.emplace_back([this, t] { serve(t); });
  } catch (...) { // no more are to be had: those that run must not outlive this object
    end();
    throw;
  }
}

Team::~Team() { end(); }

void Team::end() {
  is_closing_.store(true, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (auto& t : threads_) t.join();
}

void Team::wait_all(Barrier* self, int32_t thread) {
  auto* b = static_cast<FlagBarrier*>(self);
  if (b->n == 1) return;
  const uint64_t goal = b->flags[thread].n_arrived.load(std::memory_order_relaxed) + 1;
  b->flags[thread].n_arrived.store(goal, std::memory_order_release);
  Lookahead& ahead = b->ahead[thread];
  for (int32_t i = 0; i < b->n; ++i) {
    int32_t n_spins = 0;
    while (b->flags[i].n_arrived.load(std::memory_order_acquire) < goal) {
      for (int32_t line = 0; line < kLinesASpin && ahead.next < ahead.end; ++line, ahead.next += 64) __builtin_prefetch(ahead.next, 0, 2);
      if (++n_spins < kSpinsBeforeYield)
        pause_briefly();
      else
        sched_yield();
    }
  }
}

void Team::look_ahead(int32_t thread, WeightRun run) { barrier_.ahead[thread] = {run.data, run.data + run.n_bytes}; }

void Team::settle(int32_t thread) const {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040); // flush denormals to zero, read them as zero
#endif
  if (cpus_.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(cpus_[static_cast<size_t>(thread)]), &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set); // a refusal only costs speed
}

void Team::adopt_caller() { settle(0); }

void Team::serve(int32_t thread) {
  settle(thread);
  int32_t seen = 0;
  for (;;) {
    for (int32_t i = 0; i < kSpinsBeforeSleep && epoch_.load(std::memory_order_acquire) == seen; ++i) pause_briefly();
    epoch_.wait(seen, std::memory_order_acquire);
    seen = epoch_.load(std::memory_order_acquire);
    if (is_closing_.load(std::memory_order_relaxed)) return;
    fn_(arg_, thread);
    wait_all(&barrier_, thread);
  }
}

void Team::run(void (*fn)(void*, int32_t), void* arg) {
  fn_ = fn;
  arg_ = arg;
  epoch_.fetch_add(1, std::memory_order_release);
  if (n_threads_ > 1) epoch_.notify_all();
  fn(arg, 0);
  wait_all(&barrier_, 0);
}

} // namespace tiercel
