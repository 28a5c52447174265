#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace farandole {

/// Where a trace file stands: `end` is the place of its closing bracket, 0 before anything was written.
struct TraceFileState {
  uint64_t end = 0;
  int error = 0;  // errno of a write that failed; what `end` tells of is there
};

/// Adds `events`, JSON objects with a comma and a line's end between two, to the array in the file `fd`, which is
/// complete again after each write, and so also when the writer has been killed. The kernel takes a write page by page
/// and may end a killed writer's between two of them; so no write goes on into a second page, but for the one event in
/// a page that would not fit. Blocks as the file does. `write` is pwrite(2), but in tests.
TraceFileState append_events(int fd, uint64_t end, std::string_view events,
                             ssize_t (*write)(int, const void*, size_t, off_t));

}  // namespace farandole
