// The door to files.hpp, for a disk tier. Each call lets go of the interpreter's lock once, for all it does.
#include "tiercel/files.hpp"

#include "bind.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiercel {

namespace {

template <class T>
using Bytes = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
constexpr size_t kAlign = 4096;

} // namespace

void bind_files(nb::module_& m) {
  m.def(
      "read_file",
      [](const char* path, Bytes<uint8_t> buffer, bool past_cache) {
        if (reinterpret_cast<uintptr_t>(buffer.data()) % kAlign != 0 || buffer.size() % kAlign != 0)
          throw nb::value_error("buffer: needs to begin at a multiple of 4096 bytes, and to be as long as one");
        int64_t n_bytes;
        {
          nb::gil_scoped_release release;
          n_bytes = read_file(path, {buffer.data(), buffer.size()}, past_cache);
        }
        if (n_bytes < 0) {
          errno = static_cast<int>(-n_bytes);
          PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
          throw nb::python_error();
        }
        return n_bytes;
      },
      "path"_a, "buffer"_a.noconvert(), "past_cache"_a);
  m.def(
      "crc32",
      [](Bytes<const uint8_t> data, uint32_t crc) {
        nb::gil_scoped_release release;
        return crc32(crc, {data.data(), data.size()});
      },
      "data"_a, "crc"_a = 0);
}

} // namespace tiercel
