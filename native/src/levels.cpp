// Which kernel tables this build holds and this processor can run. Decided once, at the first call.
#include "tiercel/kernels.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tiercel {

namespace scalar {
extern const KernelTable table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable table;
}
namespace avx512 {
extern const KernelTable table;
}
#endif

namespace {

struct Levels {
  const KernelTable* tables[3] = {};
  int32_t n = 0;

  Levels() {
    tables[n++] = &scalar::table;
#if defined(__x86_64__)
    // __builtin_cpu_supports also asks the operating system whether it saves the wide registers.
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    if (avx2) tables[n++] = &avx2::table;
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
      tables[n++] = &avx512::table;
#endif
  }

#if defined(__x86_64__)
  // gcc 12's __builtin_cpu_supports knows no "f16c".
  static bool has_f16c() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29)) != 0;
  }
#endif
};

const Levels& levels() {
  static const Levels found;
  return found;
}

} // namespace

int32_t n_kernel_levels() { return levels().n; }
const KernelTable* kernel_level(int32_t i) { return levels().tables[i]; }

} // namespace tiercel
