#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace farandole {

/// State of a trace file: `end` is the offset of its closing bracket, 0 before the first write.
struct TraceFileState {
  uint64_t end = 0;
  int error = 0;  // errno of a failed write; the file is complete up to `end`
};

/// Appends `events`, JSON objects separated by a comma and a newline, to the array in the file `fd`. The file is
/// complete after each write, even if the writer is killed. The kernel writes page by page and may stop between two
/// pages, so each write stays within one page, except for a single event that does not fit. Blocks as the file does.
/// `write` is pwrite(2), except in tests.
TraceFileState append_events(int fd, uint64_t end, std::string_view events,
                             ssize_t (*write)(int, const void*, size_t, off_t));

}  // namespace farandole
