// The door to files.hpp, for a disk tier. Each call lets go of the interpreter's lock once, for all it does.
#include "tiercel/files.hpp"

#include "bind.hpp"
#include "tiercel/background.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiercel {

namespace {

template <class T>
using Bytes = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
constexpr size_t kAlign = 4096;

// Raise the system's error if `result` is one.
int64_t checked(int64_t result, const char* path) {
  if (result >= 0) return result;
  errno = static_cast<int>(-result);
  if (path)
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
  else
    PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

template <class Call>
int64_t run(Background& background, const char* path, const Call& call) {
  int64_t result;
  {
    nb::gil_scoped_release release;
    result = background.run(call);
  }
  return checked(result, path);
}

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
        return checked(n_bytes, path);
      },
      "path"_a, "buffer"_a.noconvert(), "past_cache"_a);
  m.def(
      "crc32",
      [](Bytes<const uint8_t> data, uint32_t crc) {
        nb::gil_scoped_release release;
        return crc32(crc, {data.data(), data.size()});
      },
      "data"_a, "crc"_a = 0);
  nb::class_<Background>(m, "Background", "A thread that gives way to every other; who calls waits for it, without the interpreter's lock.")
      .def(nb::init<>())
      .def("cpu_s", &Background::cpu_s, "Seconds that a processor has worked for it.")
      .def(
          "create", [](Background& b, const char* path) { return run(b, path, [&] { return create_locked(path); }); }, "path"_a,
          "Make a file that was not there, for its owner only, and lock it; return its descriptor.")
      .def(
          "write",
          [](Background& b, int fd, Bytes<const uint8_t> data) {
            return run(b, nullptr, [&] { return write_some(fd, {data.data(), data.size()}); });
          },
          "fd"_a, "data"_a, "Write some of the data; return how many bytes.")
      .def(
          "rename", [](Background& b, const char* path, const char* to) { run(b, path, [&] { return rename_file(path, to); }); }, "path"_a,
          "to"_a, "Give a file its name, in place of another of that name.");
}

} // namespace tiercel
