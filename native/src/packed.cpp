// Memory of packed matrices, and packing with threads.
#include "tiercel/packed.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <thread>

namespace tiercel {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kPieceBytes = int64_t{1} << 20;  // some 1 ms of packing: what a thread takes at a time
constexpr int64_t kChunkBytes = int64_t{64} << 20; // address space only: pages appear when written

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

} // namespace

PackedArena::~PackedArena() {
  for (const Chunk& c : chunks_) munmap(c.mapping, static_cast<size_t>(c.mapping_bytes));
}

uint8_t* PackedArena::take(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  bytes = round_up(bytes, 64);
  if (chunks_.empty() || chunks_.back().n_bytes - chunks_.back().n_bytes_used < bytes) {
    const int64_t n_bytes = bytes > kChunkBytes / 2 ? round_up(bytes, kHugePage) : kChunkBytes;
    const int64_t mapping_bytes = n_bytes + kHugePage;
    chunks_.reserve(chunks_.size() + 1); // nothing may throw between the mapping and its record
    void* mapping =
        mmap(nullptr, static_cast<size_t>(mapping_bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    uint8_t* begin = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<int64_t>(mapping), kHugePage));
    madvise(begin, static_cast<size_t>(n_bytes), MADV_HUGEPAGE); // a hint: refusal costs speed only
    const Chunk chunk = {mapping, mapping_bytes, begin, 0, n_bytes};
    // A chunk made for one big matrix is full; keep cutting small ones from the chunk before it.
    if (n_bytes == kChunkBytes || chunks_.empty()) {
      chunks_.push_back(chunk);
    } else {
      chunks_.insert(chunks_.end() - 1, chunk);
      Chunk& own = *(chunks_.end() - 2);
      own.n_bytes_used = bytes;
      return own.begin;
    }
  }
  Chunk& c = chunks_.back();
  uint8_t* at = c.begin + c.n_bytes_used;
  c.n_bytes_used += bytes;
  return at;
}

PackedStore::PackedStore(Format format, int64_t n, int64_t k, bool expand_to_f32, std::shared_ptr<PackedArena> arena)
    : arena_(arena ? std::move(arena) : std::make_shared<PackedArena>()), file_format_(format), expand_to_f32_(expand_to_f32) {
  const Format packed = expand_to_f32 ? Format::F32 : format;
  const int64_t bytes = packed_bytes(packed, n, k);
  data_ = arena_->take(bytes);
  view_ = {packed, n, k, data_, bytes / ((n + 15) / 16)};
}

void PackedStore::pack_tiles(const uint8_t* rows, int64_t row_bytes, const int32_t* row_order, int64_t first_tile, int64_t end_tile) {
  if (!pack_matrix(file_format_, expand_to_f32_, rows, row_bytes, row_order, view_.n, view_.k, data_, first_tile, end_tile))
    *is_finite_ = false;
}

void PackedStore::pack(const uint8_t* rows, int64_t row_bytes, const int32_t* row_order, int32_t n_threads) {
  const auto share = [&](int32_t t) { pack_tiles(rows, row_bytes, row_order, n_tiles() * t / n_threads, n_tiles() * (t + 1) / n_threads); };
  std::vector<std::jthread> others; // joined however this ends: a thread that cannot be started throws
  for (int32_t t = 1; t < n_threads; ++t) others.emplace_back(share, t);
  share(0);
}

PackingTeam::PackingTeam(std::vector<PackingJob> jobs, int32_t n_threads, bool releases) : jobs_(std::move(jobs)), releases_(releases) {
  n_pieces_left_ = std::make_unique<std::atomic<int32_t>[]>(jobs_.size());
  for (size_t i = 0; i < jobs_.size(); ++i) {
    const PackedStore& store = *jobs_[i].store;
    const int64_t n_tiles = store.n_tiles();
    const int64_t step = std::max<int64_t>(1, kPieceBytes / store.view().tile_bytes);
    int32_t n_pieces = 0;
    for (int64_t first = 0; first < n_tiles; first += step, ++n_pieces)
      pieces_.push_back({static_cast<int32_t>(i), first, std::min(first + step, n_tiles)});
    n_pieces_left_[i] = n_pieces;
  }
  threads_.reserve(static_cast<size_t>(n_threads));
  try {
    for (int32_t t = 0; t < n_threads; ++t) threads_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {
    // As many as there are: join() does the rest.
  }
}

PackingTeam::~PackingTeam() { next_ = pieces_.size(); } // the threads' destructors join

void PackingTeam::join() {
  work();
  threads_.clear();
}

void PackingTeam::work() {
  for (size_t at; (at = next_.fetch_add(1)) < pieces_.size();) {
    const Piece& piece = pieces_[at];
    const PackingJob& job = jobs_[static_cast<size_t>(piece.job)];
    job.store->pack_tiles(job.rows, job.row_bytes, job.row_order.empty() ? nullptr : job.row_order.data(), piece.first_tile,
                          piece.end_tile);
    if (n_pieces_left_[piece.job].fetch_sub(1) == 1 && releases_) {
      const int64_t page = sysconf(_SC_PAGESIZE);
      const int64_t first = round_up(reinterpret_cast<int64_t>(job.rows), page);
      const int64_t end = (reinterpret_cast<int64_t>(job.rows) + job.row_bytes * job.n_file_rows) / page * page;
      if (first < end) madvise(reinterpret_cast<void*>(first), static_cast<size_t>(end - first), MADV_DONTNEED); // advice only
    }
  }
}

} // namespace tiercel
