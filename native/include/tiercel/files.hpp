// Reads files whole, past the page cache where that is faster, and sums bytes up. Knows no format. Any thread may call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tiercel {

// Read `path` into `buffer`; return the file's length, which is more than was read if it does not fit, or -errno.
// With `past_cache`, a file whose last page the page cache does not have is read past it.
// REQUIRES: the buffer begins at a multiple of 4096 and is as long as one.
int64_t read_file(const char* path, std::span<uint8_t> buffer, bool past_cache);

// Return the CRC-32 of zlib and of Ethernet (polynomial 0x04c11db7, reflected) of what `crc` is that of, then `data`.
uint32_t crc32(uint32_t crc, std::span<const uint8_t> data);

} // namespace tiercel
