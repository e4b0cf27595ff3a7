// Rates of the machine, for putting an op's time beside its limit.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "bind.hpp"
#include "tiercel/program.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiercel {
namespace {

constexpr int kTries = 7;

// Units of work a second, all threads together, best of some tries: a limit is not an average.
double measure_rate(const std::string& level, const std::string& kind, int32_t n_threads, int64_t working_set_bytes) {
  const KernelTable* table = nullptr;
  for (int32_t i = 0; i < n_kernel_levels(); ++i)
    if (level == kernel_level(i)->level) table = kernel_level(i);
  if (!table) throw nb::value_error("level: this processor and build have no such level");
  if (n_threads < 1) throw nb::value_error("n_threads: needs 1 or more");
  if (kind != "fma" && kind != "dot" && kind != "read") throw nb::value_error("kind: needs 'fma', 'dot' or 'read'");
  const bool is_read = kind == "read";
  if (is_read && working_set_bytes < 4096 * n_threads) throw nb::value_error("working_set_bytes: needs 4096 a thread or more");

  const nb::gil_scoped_release unlocked;
  struct Job {
    const KernelTable* table;
    Probe kind;
    const uint8_t* data;
    int64_t share, n, n_passes;
    float sink;
  } job{table, is_read ? Probe::Read : kind == "fma" ? Probe::Fma : Probe::Dot, nullptr, 0, 400000, 1, 0.0f};
  const int64_t bytes = is_read ? working_set_bytes : 4096 * n_threads;
  Region region(bytes);
  std::memset(region.data(), 1, static_cast<size_t>(bytes));
  job.data = region.data();
  job.share = bytes / n_threads / 512 * 512;
  if (is_read) {
    job.n = job.share;
    job.n_passes = std::max<int64_t>(1, (int64_t{192} << 20) / bytes);
  }
  Team team(n_threads, {});
  double best_s = 1e30;
  for (int i = 0; i < kTries; ++i) {
    const auto start = std::chrono::steady_clock::now();
    team.run(
        [](void* arg, int32_t thread) {
          auto* j = static_cast<Job*>(arg);
          for (int64_t pass = 0; pass < j->n_passes; ++pass)
            if (j->table->probe(j->kind, j->data + thread * j->share, j->n) == 42.0f) j->sink = 1.0f; // never; keeps the work
        },
        &job);
    best_s = std::min(best_s, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  const double per_thread =
      is_read ? static_cast<double>(job.n * job.n_passes) : 12.0 * static_cast<double>(job.n) * (kind == "fma" ? 32 : 128);
  return per_thread * n_threads / best_s;
}

} // namespace

void bind_probe(nb::module_& m) {
  m.def("measure_rate", &measure_rate, "level"_a, "kind"_a, "n_threads"_a, "working_set_bytes"_a = 0,
        "What the machine can do at most: 'fma' float operations, 'dot' int8 operations, 'read' bytes of a working set, each a second.");
}

} // namespace tiercel
