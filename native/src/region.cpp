#include <sys/mman.h>

#include <new>

#include "tiercel/program.hpp"

namespace tiercel {

Region::Region(int64_t bytes) : bytes_(bytes) {
  if (bytes <= 0) return;
  constexpr int64_t kHuge = 2 << 20;
  // Rounded up so that a huge page never spans into somebody else's mapping.
  bytes_ = (bytes + kHuge - 1) / kHuge * kHuge;
  void* p = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  madvise(p, static_cast<size_t>(bytes_), MADV_HUGEPAGE); // a refusal only costs speed
  data_ = static_cast<uint8_t*>(p);
}

Region::~Region() {
  if (data_) munmap(data_, static_cast<size_t>(bytes_));
}

} // namespace tiercel
