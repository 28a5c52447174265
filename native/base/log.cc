#include "base/log.h"

#include <atomic>
#include <cstdio>

namespace farandole {
namespace {

void write_to_stderr(const char* line) noexcept {
  // One call, so that lines of several ranks do not interleave on a terminal.
  std::fprintf(stderr, "[farandole] warning: %s\n", line);
}

std::atomic<WarningSink> the_sink{&write_to_stderr};

}  // namespace

void set_warning_sink(WarningSink sink) {
  the_sink.store(sink != nullptr ? sink : &write_to_stderr, std::memory_order_release);
}

void warn_line(const std::string& line) { the_sink.load(std::memory_order_acquire)(line.c_str()); }

}  // namespace farandole
