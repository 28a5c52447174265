#include "bind/read_files.h"

#include <Python.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "base/descriptor.h"

namespace nb = nanobind;

namespace farandole {
namespace {

/// One file, with memory for its bytes.
struct Reading {
  const char* path;
  uint64_t first;
  char* data;
  size_t room;

  size_t nbytes = 0;
  int64_t size = 0, changed_ns = 0;
  int error = 0;  // errno

  void run() {
    int fd = -1;
    do fd = open(path, O_RDONLY | O_CLOEXEC);
    while (fd < 0 && errno == EINTR);
    const Descriptor file(fd);
    struct stat found{};
    if (!file.is_open() || !fill(fd) || fstat(fd, &found) != 0) {
      error = errno;
      return;
    }
    size = found.st_size;
    changed_ns = found.st_mtim.tv_sec * 1'000'000'000LL + found.st_mtim.tv_nsec;
  }

 private:
  bool fill(int fd) {
    while (nbytes < room) {  // one call reads at most 2 GiB
      const ssize_t got = pread(fd, data + nbytes, room - nbytes, static_cast<off_t>(first + nbytes));
      if (got == 0) break;
      if (got > 0) nbytes += static_cast<size_t>(got);
      else if (errno != EINTR) return false;
    }
    return true;
  }
};

nb::object checked(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

}  // namespace

nb::list read_files(const std::vector<FilePart>& parts) {
  std::vector<nb::object> paths, contents;
  std::vector<Reading> readings;
  for (const auto& [path, first, last] : parts) {
    PyObject* encoded = nullptr;
    if (PyUnicode_FSConverter(path.ptr(), &encoded) == 0) throw nb::python_error();
    paths.push_back(nb::steal(encoded));
    const size_t room = last > first ? last - first : 0;
    contents.push_back(checked(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(room))));
    readings.push_back({PyBytes_AsString(encoded), first, PyBytes_AsString(contents.back().ptr()), room});
  }
  {
    const nb::gil_scoped_release released;
    for (Reading& reading : readings) reading.run();
  }
  nb::list found;
  for (size_t place = 0; place < readings.size(); ++place) {
    const Reading& read = readings[place];
    if (read.error != 0) {
      const std::string text = std::generic_category().message(read.error);
      found.append(checked(
          PyObject_CallFunction(PyExc_OSError, "isO", read.error, text.c_str(), std::get<0>(parts[place]).ptr())));
      continue;
    }
    nb::object bytes = std::move(contents[place]);
    if (read.nbytes < read.room)  // the stable ABI cannot shorten them
      bytes = checked(PyBytes_FromStringAndSize(read.data, static_cast<Py_ssize_t>(read.nbytes)));
    found.append(nb::make_tuple(std::move(bytes), read.size, read.changed_ns));
  }
  return found;
}

}  // namespace farandole
