#include "tiercel/files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tiercel {

namespace {

// A descriptor that closes itself.
struct Descriptor {
  int fd;
  explicit Descriptor(const char* path) : fd(open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW)) {}
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
};

ssize_t read_some(int fd, std::span<uint8_t> to, int64_t from, int flags) {
  iovec part{to.data(), to.size()};
  ssize_t n;
  do n = flags ? preadv2(fd, &part, 1, from, flags) : preadv(fd, &part, 1, from);
  while (n < 0 && errno == EINTR);
  return n;
}

// Whether the page cache has the last page, and so, likely, all: a look at a header leaves the first.
bool is_cached(int fd, int64_t n_bytes, std::span<uint8_t> buffer) {
  // RANDOM: else the question alone makes the kernel read ahead, and reading past the cache would wait for that.
  posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
  if (read_some(fd, buffer.first(1), n_bytes > 0 ? n_bytes - 1 : 0, RWF_NOWAIT) != 1) return false;
  posix_fadvise(fd, 0, 0, POSIX_FADV_NORMAL);
  return true;
}

// Read from the beginning on, past the page cache: how much, or -errno. 0 where that cannot be done: a file system in
// memory or over a network, a medium that wants another alignment.
int64_t read_past_cache(int fd, std::span<uint8_t> buffer) {
  const int flags = fcntl(fd, F_GETFL);
  if (fcntl(fd, F_SETFL, flags | O_DIRECT) != 0) return 0;
  const ssize_t n = read_some(fd, buffer, 0, 0);
  const int error = errno;
  fcntl(fd, F_SETFL, flags);
  if (n >= 0) return n;
  return error == EINVAL ? 0 : -error;
}

constexpr uint32_t kPolynomial = 0xedb88320; // reflected

// table[k][b]: the CRC of byte b and k bytes of 0 after it.
constexpr std::array<std::array<uint32_t, 256>, 8> make_table() {
  std::array<std::array<uint32_t, 256>, 8> table{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int i = 0; i < 8; ++i) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    table[0][b] = crc;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t b = 0; b < 256; ++b) table[k][b] = (table[k - 1][b] >> 8) ^ table[0][table[k - 1][b] & 255];
  return table;
}
constexpr auto kTable = make_table();

// Eight bytes at a time, each through the table of its distance from the end.
uint32_t crc32_by_table(uint32_t crc, std::span<const uint8_t> data) {
  size_t i = 0;
  for (; i + 8 <= data.size(); i += 8) {
    uint32_t next = 0;
    for (size_t j = 0; j < 8; ++j) {
      const uint8_t before = j < 4 ? static_cast<uint8_t>(crc >> (8 * j)) : uint8_t{0};
      next ^= kTable[7 - j][data[i + j] ^ before];
    }
    crc = next;
  }
  for (; i < data.size(); ++i) crc = (crc >> 8) ^ kTable[0][(crc ^ data[i]) & 255];
  return crc;
}

#if defined(__x86_64__)

#define TIERCEL_FOLDS __attribute__((target("pclmul,sse4.1")))

// Multiply both halves of `a` by the two constants, without carries, and add.
TIERCEL_FOLDS __m128i fold(__m128i a, __m128i constants) {
  return _mm_xor_si128(_mm_clmulepi64_si128(a, constants, 0x00), _mm_clmulepi64_si128(a, constants, 0x11));
}

TIERCEL_FOLDS __m128i load(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }

// Source: Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ" (Intel, 2009), reflected form:
// fold 64 bytes onto the next 64, then 16 onto 16, then reduce 128 bits to 32 by Barrett. The constants are x^k mod P.
// REQUIRES: at least 64 bytes, a multiple of 16.
TIERCEL_FOLDS uint32_t crc32_by_folding(uint32_t crc, std::span<const uint8_t> data) {
  const __m128i by_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
  const __m128i barrett = _mm_set_epi64x(0x1f7011641, 0x1db710641);
  const __m128i low_32 = _mm_setr_epi32(~0, 0, ~0, 0);
  const uint8_t *at = data.data(), *const end = at + data.size();
  __m128i x[4];
  for (int i = 0; i < 4; ++i) x[i] = load(at + 16 * i);
  x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  for (at += 64; end - at >= 64; at += 64)
    for (int i = 0; i < 4; ++i) x[i] = _mm_xor_si128(fold(x[i], by_512), load(at + 16 * i));
  __m128i y = x[0];
  for (int i = 1; i < 4; ++i) y = _mm_xor_si128(fold(y, by_128), x[i]);
  for (; at < end; at += 16) y = _mm_xor_si128(fold(y, by_128), load(at));
  y = _mm_xor_si128(_mm_srli_si128(y, 8), _mm_clmulepi64_si128(y, by_128, 0x10));
  const __m128i by_64 = _mm_set_epi64x(0, 0x163cd6124);
  y = _mm_xor_si128(_mm_srli_si128(y, 4), _mm_clmulepi64_si128(_mm_and_si128(y, low_32), by_64, 0x00));
  __m128i q = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(y, low_32), barrett, 0x10), low_32);
  q = _mm_clmulepi64_si128(q, barrett, 0x00);
  return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(y, q), 1));
}

#endif

} // namespace

int64_t read_file(const char* path, std::span<uint8_t> buffer, bool past_cache) {
  const Descriptor file(path);
  struct stat status{};
  if (file.fd < 0 || fstat(file.fd, &status) != 0) return -errno;
  const int64_t n_bytes = status.st_size;
  if (n_bytes > static_cast<int64_t>(buffer.size())) return n_bytes;
  int64_t n_read = 0;
  if (past_cache && !is_cached(file.fd, n_bytes, buffer)) n_read = read_past_cache(file.fd, buffer);
  if (n_read < 0) return n_read;
  while (n_read < n_bytes) {
    const ssize_t n = read_some(file.fd, buffer.subspan(static_cast<size_t>(n_read)), n_read, 0);
    if (n < 0) return -errno;
    if (n == 0) return n_read;
    n_read += n;
  }
  return n_bytes;
}

uint32_t crc32(uint32_t crc, std::span<const uint8_t> data) {
  crc = ~crc;
#if defined(__x86_64__)
  const bool can_fold = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (can_fold && data.size() >= 64) {
    const size_t n = data.size() / 16 * 16;
    crc = crc32_by_folding(crc, data.first(n));
    data = data.subspan(n);
  }
#endif
  return ~crc32_by_table(crc, data);
}

} // namespace tiercel
