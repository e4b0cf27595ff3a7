// Owned packed matrices: where the weights of a loaded model live.
//
// PackedArena hands out memory in 2 MiB pages (asked for, not guaranteed), so that many small matrices share huge pages; 4 KiB pages
// cost a tenth of the read bandwidth. Memory is freed when the arena and every matrix cut from it are gone.
// PackedStore is one matrix. It is written by pack() or a PackingTeam, once; afterwards any thread may read it.
// PackingTeam packs many matrices on threads of its own, while the thread that made it does something else.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
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

  // The same for tiles first_tile .. end_tile only. Threads may do different tiles at once.
  void pack_tiles(const uint8_t* rows, int64_t row_bytes, const int32_t* row_order, int64_t first_tile, int64_t end_tile);
  int64_t n_tiles() const { return (view_.n + 15) / 16; }

  // As handed to kernels; its format is F32 when expand_to_f32 was asked for.
  const PackedMatrix& view() const { return view_; }
  int64_t n_bytes() const { return (view_.n + 15) / 16 * view_.tile_bytes; }
  // False when what was packed so far holds NaN or infinity.
  bool is_finite() const { return *is_finite_; }

 private:
  std::shared_ptr<PackedArena> arena_;
  uint8_t* data_;
  Format file_format_;
  bool expand_to_f32_;
  PackedMatrix view_;
  std::unique_ptr<std::atomic<bool>> is_finite_ = std::make_unique<std::atomic<bool>>(true); // any packing thread clears it
};

// One matrix to pack. `rows` stays valid until the team is joined.
struct PackingJob {
  std::shared_ptr<PackedStore> store;
  const uint8_t* rows;
  int64_t row_bytes, n_file_rows;
  std::vector<int32_t> row_order; // empty: stored order
};

// Lives from its construction, which starts n_threads threads, to join() or destruction, which stops early. With fewer threads than
// asked for, or none, join() does what is left. Owner: one thread; the others touch only what is atomic and their own tiles.
class PackingTeam {
 public:
  // Jobs are taken in order. When `releases`, the whole pages of a job's rows are given back once it is packed (MADV_DONTNEED): rows must
  // then be a private or read-only map of a file.
  PackingTeam(std::vector<PackingJob> jobs, int32_t n_threads, bool releases);
  ~PackingTeam();
  PackingTeam(const PackingTeam&) = delete;
  PackingTeam& operator=(const PackingTeam&) = delete;

  // Helps until every matrix is packed. May be called again.
  void join();
  const std::vector<PackingJob>& jobs() const { return jobs_; }

 private:
  struct Piece {
    int32_t job;
    int64_t first_tile, end_tile;
  };
  void work();

  std::vector<PackingJob> jobs_;
  std::vector<Piece> pieces_;
  std::unique_ptr<std::atomic<int32_t>[]> n_pieces_left_; // of each job
  std::atomic<size_t> next_{0};
  const bool releases_;
  std::vector<std::jthread> threads_;
};

} // namespace tiercel
