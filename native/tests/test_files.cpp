// Sums of bytes whose values others have computed, and a file read whole.
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string>
#include <vector>

#include "check.hpp"
#include "tiercel/files.hpp"

using namespace tiercel;

namespace {

std::span<const uint8_t> bytes_of(const std::string& text) { return {reinterpret_cast<const uint8_t*>(text.data()), text.size()}; }

} // namespace

TEST(a_sum_of_bytes_is_that_of_the_standard) {
  CHECK(crc32(0, {}) == 0);
  CHECK(crc32(0, bytes_of("123456789")) == 0xcbf43926);
  CHECK(crc32(crc32(0, bytes_of("12345")), bytes_of("6789")) == 0xcbf43926);
}

TEST(a_sum_does_not_depend_on_how_the_bytes_are_parted) {
  std::vector<uint8_t> data(1000);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(i * i * 7 + 3);
  const std::span<const uint8_t> all(data);
  const uint32_t whole = crc32(5, all);
  for (size_t n = 0; n <= data.size(); ++n) CHECK(crc32(crc32(5, all.first(n)), all.subspan(n)) == whole);
}

TEST(a_file_is_read_whole_or_its_length_or_error_told) {
  char path[] = "/tmp/tiercel_files_XXXXXX";
  const int fd = mkstemp(path);
  CHECK(fd >= 0);
  const std::string text(5000, 'x');
  CHECK(write(fd, text.data(), text.size()) == 5000);
  close(fd);
  constexpr size_t kPage = 4096;
  auto* memory = static_cast<uint8_t*>(std::aligned_alloc(kPage, 2 * kPage));
  const std::span<uint8_t> buffer(memory, 2 * kPage);
  for (const bool past_cache : {false, true}) {
    CHECK(read_file(path, buffer, past_cache) == 5000);
    CHECK(memory[0] == 'x' && memory[4999] == 'x');
    CHECK(read_file(path, buffer.first(kPage), past_cache) == 5000);
  }
  unlink(path);
  CHECK(read_file(path, buffer, true) == -ENOENT);
  std::free(memory);
}
