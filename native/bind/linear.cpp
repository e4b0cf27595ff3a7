// Packed matrices for Python, and test doors to quantize, linear and embed. Production runs the kernels from a program, not from here.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <thread>

#include "bind.hpp"
#include "tiercel/packed.hpp"

namespace nb = nanobind;

namespace tiercel {
namespace {

using Bytes2d = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats1d = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats2d = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr const char* kFormatNames[] = {"F32",  "F16",  "BF16", "Q4_0", "Q4_1",  "Q5_0", "Q5_1",
                                        "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "NVFP4"};
constexpr int kFormatCount = 13;
constexpr int32_t kMaxThreads = 1024;

template <class... Args>
[[noreturn]] void refuse(const char* form, Args... args) {
  char text[256];
  std::snprintf(text, sizeof text, form, args...);
  throw nb::value_error(text);
}

long long number(int64_t x) { return x; }

bool is_quantised(Format f) { return f != Format::F32 && f != Format::F16 && f != Format::BF16; }

void check_threads(const char* where, int32_t n_threads) {
  if (n_threads < 1 || n_threads > kMaxThreads) refuse("%s: n_threads is %d; needs 1 to %d", where, n_threads, kMaxThreads);
}

const KernelTable& table_of(const std::string& level) {
  std::string known;
  for (int32_t i = 0; i < n_kernel_levels(); ++i) {
    if (level == kernel_level(i)->level) return *kernel_level(i);
    known += (i ? ", " : "") + std::string(kernel_level(i)->level);
  }
  refuse("level: got \"%.40s\"; this processor has %s", level.c_str(), known.c_str());
}

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Aligned = std::unique_ptr<uint8_t[], Free>;

Aligned aligned(int64_t n_bytes) {
  uint8_t* p = static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>((n_bytes + 64) / 64 * 64)));
  if (!p) throw std::bad_alloc();
  return Aligned(p);
}

// Runs fn as a team would, each thread with scratch of its own. The kernels behind these doors need no barrier.
template <class Fn>
void run_team(int32_t n_threads, int64_t scratch_bytes, Fn fn) {
  std::vector<Aligned> scratch;
  for (int32_t t = 0; t < n_threads; ++t) scratch.push_back(aligned(scratch_bytes));
  std::vector<std::thread> threads;
  for (int32_t t = 1; t < n_threads; ++t)
    threads.emplace_back([&, t] { fn(ThreadCtx{t, n_threads, nullptr, scratch[t].get(), scratch_bytes}); });
  fn(ThreadCtx{0, n_threads, nullptr, scratch[0].get(), scratch_bytes});
  for (std::thread& t : threads) t.join();
}

// Checks what Python says of a matrix's rows and takes memory for it from the arena.
PackingJob packing_job(int format_number, const Bytes2d& rows, int64_t k, const std::optional<Ids>& row_order, bool expand_to_f32,
                       std::shared_ptr<PackedArena> arena) {
  if (format_number < 0 || format_number >= kFormatCount)
    refuse("PackedMatrix: format is %d; needs 0 to %d", format_number, kFormatCount - 1);
  const Format format = static_cast<Format>(format_number);
  const char* name = kFormatNames[format_number];
  const int64_t n_file = static_cast<int64_t>(rows.shape(0)), row_bytes = static_cast<int64_t>(rows.shape(1));
  const int64_t n = row_order ? static_cast<int64_t>(row_order->shape(0)) : n_file;
  if (packed_bytes(format, n, k) == 0)
    refuse(
        "PackedMatrix: a matrix of %lld rows of %lld columns does not fit %s; needs rows and a positive multiple of its group of columns",
        number(n), number(k), name);
  if (row_bytes != file_row_bytes(format, k))
    refuse("PackedMatrix: rows are %lld bytes; %lld columns of %s need %lld", number(row_bytes), number(k), name,
           number(file_row_bytes(format, k)));
  for (int64_t i = 0; row_order && i < n; ++i)
    if (row_order->data()[i] < 0 || row_order->data()[i] >= n_file)
      refuse("PackedMatrix: row_order[%lld] is %d; the file has %lld rows", number(i), row_order->data()[i], number(n_file));
  PackingJob job = {std::make_shared<PackedStore>(format, n, k, expand_to_f32, std::move(arena)), rows.data(), row_bytes, n_file, {}};
  if (row_order) job.row_order.assign(row_order->data(), row_order->data() + n);
  return job;
}

std::shared_ptr<PackedStore> pack(int format_number, Bytes2d rows, int64_t k, std::optional<Ids> row_order, bool expand_to_f32,
                                  std::shared_ptr<PackedArena> arena, int32_t n_threads) {
  check_threads("PackedMatrix", n_threads);
  const PackingJob job = packing_job(format_number, rows, k, row_order, expand_to_f32, std::move(arena));
  const nb::gil_scoped_release unlocked;
  job.store->pack(job.rows, job.row_bytes, job.row_order.empty() ? nullptr : job.row_order.data(), n_threads);
  return job.store;
}

// A team, and the arrays whose memory it reads.
struct Packing {
  Packing(const std::vector<nb::tuple>& py_jobs, const std::shared_ptr<PackedArena>& arena, int32_t n_threads, bool releases) {
    if (n_threads != 0) check_threads("Packing", n_threads);
    std::vector<PackingJob> jobs;
    for (const nb::tuple& job : py_jobs) {
      if (job.size() != 5)
        refuse("Packing: a job has %lld items; needs (format, rows, k, row_order or None, expand_to_f32)",
               number(static_cast<int64_t>(job.size())));
      std::optional<Ids> order;
      if (!job[3].is_none()) order = nb::cast<Ids>(job[3]);
      rows.push_back(nb::cast<Bytes2d>(job[1], false));
      jobs.push_back(packing_job(nb::cast<int>(job[0]), rows.back(), nb::cast<int64_t>(job[2]), order, nb::cast<bool>(job[4]), arena));
    }
    team = std::make_unique<PackingTeam>(std::move(jobs), n_threads, releases);
  }

  std::vector<std::shared_ptr<PackedStore>> join() {
    {
      const nb::gil_scoped_release unlocked;
      team->join();
    }
    std::vector<std::shared_ptr<PackedStore>> stores;
    for (const PackingJob& job : team->jobs()) stores.push_back(job.store);
    return stores;
  }

  std::vector<Bytes2d> rows; // outlives the team
  std::unique_ptr<PackingTeam> team;
};

void run_linear(const std::string& level, const std::vector<nb::tuple>& py_parts, Floats2d x, FloatsOut y, std::optional<Floats2d> residual,
                int32_t n_threads) {
  const KernelTable& table = table_of(level);
  check_threads("linear", n_threads);
  const int64_t m = static_cast<int64_t>(x.shape(0)), k = static_cast<int64_t>(x.shape(1));
  const int64_t ldy = static_cast<int64_t>(y.shape(1));
  if (static_cast<int64_t>(y.shape(0)) != m) refuse("linear: y has %lld rows; x has %lld", number(y.shape(0)), number(m));
  if (residual && (residual->shape(0) != y.shape(0) || residual->shape(1) != y.shape(1)))
    refuse("linear: residual is [%lld, %lld]; y is [%lld, %lld]", number(residual->shape(0)), number(residual->shape(1)), number(m),
           number(ldy));
  if (py_parts.empty()) refuse("linear: no parts; needs at least one (matrix, bias or None, y_col)");
  std::vector<LinearPart> parts;
  std::vector<Floats1d> biases; // keeps converted arrays alive
  biases.reserve(py_parts.size());
  for (const nb::tuple& part : py_parts) {
    if (part.size() != 3)
      refuse("linear: a part has %lld items; needs (matrix, bias or None, y_col)", number(static_cast<int64_t>(part.size())));
    const PackedMatrix& w = nb::cast<const PackedStore&>(part[0]).view();
    const int64_t y_col = nb::cast<int64_t>(part[2]);
    if (w.k != k) refuse("linear: x has %lld columns; the matrix has %lld", number(k), number(w.k));
    if (y_col < 0 || y_col > ldy - w.n)
      refuse("linear: columns %lld to %lld do not fit y's %lld", number(y_col), number(y_col + w.n), number(ldy));
    if (!parts.empty() && is_quantised(w.format) != is_quantised(parts[0].w->format))
      refuse("linear: parts mix float and quantised matrices; x can be only one of them");
    if (!part[1].is_none()) {
      biases.push_back(nb::cast<Floats1d>(part[1]));
      if (static_cast<int64_t>(biases.back().shape(0)) != w.n)
        refuse("linear: bias has %lld values; the matrix has %lld rows", number(biases.back().shape(0)), number(w.n));
    }
    parts.push_back({&w, part[1].is_none() ? nullptr : biases.back().data(), y_col});
  }
  const bool quantised = is_quantised(parts[0].w->format);
  const nb::gil_scoped_release unlocked;
  const int64_t stride = quant_row_bytes(k);
  const Aligned memory = aligned(quantised ? m * stride : 0);
  const QuantRows xq = {memory.get(), stride, k};
  if (quantised) run_team(n_threads, 0, [&](const ThreadCtx& ctx) { table.quantize({x.data(), k, m, &xq}, ctx); });
  const LinearArgs args = {parts.data(), static_cast<int32_t>(parts.size()),    m,  quantised ? &xq : nullptr, x.data(), k, y.data(),
                           ldy,          residual ? residual->data() : nullptr, ldy};
  run_team(n_threads, linear_thread_bytes(k, m), [&](const ThreadCtx& ctx) { table.linear(args, ctx); });
}

void run_embed(const std::string& level, const PackedStore& matrix, Ids ids, FloatsOut y, float scale, int32_t n_threads,
               const std::optional<Floats1d>& masked) {
  const KernelTable& table = table_of(level);
  check_threads("embed", n_threads);
  const PackedMatrix& w = matrix.view();
  const int64_t m = static_cast<int64_t>(ids.shape(0));
  if (static_cast<int64_t>(y.shape(0)) != m || static_cast<int64_t>(y.shape(1)) != w.k)
    refuse("embed: y is [%lld, %lld]; needs [%lld, %lld]", number(y.shape(0)), number(y.shape(1)), number(m), number(w.k));
  if (masked && static_cast<int64_t>(masked->shape(0)) != w.k)
    refuse("embed: masked has %lld values; the matrix has %lld columns", number(masked->shape(0)), number(w.k));
  for (int64_t i = 0; i < m; ++i)
    if (ids.data()[i] < (masked ? -1 : 0) || ids.data()[i] >= w.n)
      refuse("embed: ids[%lld] is %d; the matrix has %lld rows", number(i), ids.data()[i], number(w.n));
  const nb::gil_scoped_release unlocked;
  const EmbedArgs args = {&w, ids.data(), m, y.data(), w.k, scale, 0, nullptr, masked ? masked->data() : nullptr};
  run_team(n_threads, 0, [&](const ThreadCtx& ctx) { table.embed(args, ctx); });
}

// Rounds x and reads the result back through linear's own contract: q and scale of each group.
void run_quantize(const std::string& level, Floats2d x, nb::ndarray<int8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> q, FloatsOut scale,
                  int32_t n_threads) {
  const KernelTable& table = table_of(level);
  check_threads("quantize_rows", n_threads);
  const int64_t m = static_cast<int64_t>(x.shape(0)), k = static_cast<int64_t>(x.shape(1));
  if (k % 32 != 0) refuse("quantize_rows: x has %lld columns; needs a multiple of 32", number(k));
  if (q.shape(0) != x.shape(0) || q.shape(1) != x.shape(1))
    refuse("quantize_rows: q must have x's shape, [%lld, %lld]", number(m), number(k));
  if (scale.shape(0) != x.shape(0) || static_cast<int64_t>(scale.shape(1)) != k / 32)
    refuse("quantize_rows: scale must be [%lld, %lld]", number(m), number(k / 32));
  const nb::gil_scoped_release unlocked;
  const int64_t stride = quant_row_bytes(k);
  const Aligned memory = aligned(m * stride);
  const QuantRows rows = {memory.get(), stride, k};
  run_team(n_threads, 0, [&](const ThreadCtx& ctx) { table.quantize({x.data(), k, m, &rows}, ctx); });
  for (int64_t row = 0; row < m; ++row) read_quant_row(memory.get() + row * stride, k, q.data() + row * k, scale.data() + row * (k / 32));
}

using Bytes1d = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::bytes gather(const Bytes1d& from, const std::vector<std::pair<int64_t, int64_t>>& ranges) {
  int64_t n_bytes = 0;
  for (const auto& [start, n] : ranges) {
    if (start < 0 || n < 0 || n > static_cast<int64_t>(from.size()) - start)
      refuse("gather: bytes %lld to %lld; there are %lld", number(start), number(start + n), number(static_cast<int64_t>(from.size())));
    n_bytes += n;
  }
  nb::bytes found = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(n_bytes)));
  if (!found.is_valid()) nb::raise_python_error();
  char* to = PyBytes_AsString(found.ptr());
  {
    const nb::gil_scoped_release unlocked;
    for (const auto& [start, n] : ranges) {
      std::memcpy(to, from.data() + start, static_cast<size_t>(n));
      to += n;
    }
  }
  return found;
}

} // namespace

void bind_linear(nb::module_& m) {
  nb::class_<PackedArena>(m, "PackedArena", "Memory that many packed matrices share, in huge pages where the system has them.")
      .def(nb::init<>());
  nb::class_<PackedStore>(m, "PackedMatrix",
                          "A weight matrix [n, k] in the kernels' tile layout. Immutable once built; building releases the GIL.")
      .def(nb::new_(&pack), nb::arg("format"), nb::arg("rows").noconvert(), nb::arg("k"), nb::arg("row_order") = nb::none(),
           nb::arg("expand_to_f32") = false, nb::arg("arena") = nb::none(), nb::arg("n_threads") = 1)
      .def_prop_ro("n", [](const PackedStore& s) { return s.view().n; })
      .def_prop_ro("k", [](const PackedStore& s) { return s.view().k; })
      .def_prop_ro(
          "format", [](const PackedStore& s) { return static_cast<int>(s.view().format); }, "Of the packed data: F32 when expanded.")
      .def_prop_ro("nbytes", &PackedStore::n_bytes)
      .def_prop_ro("is_finite", &PackedStore::is_finite, "Whether no scale, and no element of a float format, is NaN or infinite.");
  nb::class_<Packing>(m, "Packing", "Packs many matrices on threads of its own, from its construction on; dropped, it stops early.")
      .def(nb::init<const std::vector<nb::tuple>&, const std::shared_ptr<PackedArena>&, int32_t, bool>(), nb::arg("jobs"), nb::arg("arena"),
           nb::arg("n_threads"), nb::arg("releases"),
           "jobs: (format, rows uint8 [n, row bytes], k, row_order int32 or None, expand_to_f32) each, taken in order. With `releases`, "
           "whole pages of "
           "rows that are packed are given back to the system: rows must then be a map of a file.")
      .def("join", &Packing::join, "Help until all is packed; return the matrices in the order of the jobs. Releases the GIL.");
  m.def("gather", &gather, nb::arg("buffer").noconvert(), nb::arg("ranges"),
        "The bytes of ranges (start, length), one after the other. Reads without the GIL.");
  m.def(
      "kernel_levels",
      [] {
        std::vector<std::string> names;
        for (int32_t i = 0; i < n_kernel_levels(); ++i) names.emplace_back(kernel_level(i)->level);
        return names;
      },
      "Instruction-set levels this build holds and this processor runs, weakest first.");
  m.def("linear", &run_linear, nb::arg("level"), nb::arg("parts"), nb::arg("x"), nb::arg("y").noconvert(), nb::arg("residual") = nb::none(),
        nb::arg("n_threads") = 1,
        "Test door: y[:, y_col : y_col + n] = x @ W^T (+ bias) (+ residual) for each part (matrix, bias or None, y_col).");
  m.def("embed", &run_embed, nb::arg("level"), nb::arg("matrix"), nb::arg("ids"), nb::arg("y").noconvert(), nb::arg("scale") = 1.0f,
        nb::arg("n_threads") = 1, nb::arg("masked").none() = nb::none(),
        "Test door: y[i] = row ids[i] of the matrix, or masked where that is -1, times scale.");
  m.def("quantize_rows", &run_quantize, nb::arg("level"), nb::arg("x"), nb::arg("q").noconvert(), nb::arg("scale").noconvert(),
        nb::arg("n_threads") = 1, "Test door: rounds x [M, K] to q int8 [M, K] and scale [M, K / 32].");
}

} // namespace tiercel
