// Owned packed matrices: where the weights of a loaded model live.
//
// PackedArena hands out memory in 2 MiB pages (asked for, not guaranteed), so that many small matrices share huge pages; 4 KiB pages
// cost a tenth of the read bandwidth. Memory is freed when the arena and every matrix cut from it are gone.
// PackedStore is one matrix. It is written by pack() only, once; afterwards any thread may read it.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "tiercel/kernels.hpp"

namespace tiercel {

// Bytes of one file row of k columns; 0 when the format cannot hold k columns.
int64_t file_row_bytes(Format format, int64_t k);

// Reads a rounded activation row (QuantRows) back: q [k] and the scale of each group [k / 32]. For tests.
void read_quant_row(const uint8_t* row, int64_t k, int8_t* q, float* scale);

// Thread-safe.
class PackedArena {
 public:
  PackedArena() = default;
  ~PackedArena();
  PackedArena(const PackedArena&) = delete;
  PackedArena& operator=(const PackedArena&) = delete;

  // 64-byte aligned, zeroed memory, valid as long as the arena. Throws std::bad_alloc.
  uint8_t* take(int64_t bytes);

 private:
  struct Chunk {
    void* mapping;
    int64_t mapping_bytes;
    uint8_t* begin; // 2 MiB aligned
    int64_t n_bytes_used, n_bytes;
  };
  std::mutex mutex_;
  std::vector<Chunk> chunks_; // guarded by mutex_
};

class PackedStore {
 public:
  // REQUIRES: packed_bytes(format, n, k) > 0. Without an arena the matrix gets one of its own.
  PackedStore(Format format, int64_t n, int64_t k, bool expand_to_f32, std::shared_ptr<PackedArena> arena = nullptr);

  // Fills the matrix from file rows (see pack_matrix) with n_threads threads of its own. row_order: n row numbers, or null.
  void pack(const uint8_t* rows, int64_t row_bytes, const int32_t* row_order, int32_t n_threads);

  // As handed to kernels; its format is F32 when expand_to_f32 was asked for.
  const PackedMatrix& view() const { return view_; }
  int64_t n_bytes() const { return (view_.n + 15) / 16 * view_.tile_bytes; }

 private:
  std::shared_ptr<PackedArena> arena_;
  uint8_t* data_;
  Format file_format_;
  bool expand_to_f32_;
  PackedMatrix view_;
};

} // namespace tiercel
