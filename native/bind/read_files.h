// Reading of small files at once, for loaders whose threads decode what they read.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <tuple>
#include <vector>

namespace farandole {

/// A file's path, and the range of its bytes that is wanted.
using FilePart = std::tuple<nanobind::str, uint64_t, uint64_t>;

/// Returns for each part its bytes, fewer if the file ends before, with the file's size and the time of its last change
/// in nanoseconds; or the `OSError` of reading it.
///
/// Releases the GIL once. Python's four calls per file would each release it, and then wait while others decode.
nanobind::list read_files(const std::vector<FilePart>& parts);

}  // namespace farandole
