#include "base/log.h"

#include <atomic>
#include <cstdio>

namespace farandole {
namespace {

void write_to_stderr(LogLevel level, const char* line) noexcept {
  // One call, so that lines of several ranks do not interleave on a terminal.
  std::fprintf(stderr, "[farandole] %s: %s\n", name_of(level), line);
}

std::atomic<LogSink> the_sink{&write_to_stderr};
std::atomic<LogLevel> the_level{LogLevel::Warning};

}  // namespace

const char* name_of(LogLevel level) {
  switch (level) {
    case LogLevel::Trace: return "trace";
    case LogLevel::Debug: return "debug";
    case LogLevel::Info: return "info";
    case LogLevel::Warning: return "warning";
    case LogLevel::Error: return "error";
    case LogLevel::Off: return "off";
  }
  return "unknown";
}

void set_log_sink(LogSink sink) {
  the_sink.store(sink != nullptr ? sink : &write_to_stderr, std::memory_order_release);
}

void set_log_level(LogLevel level) { the_level.store(level, std::memory_order_relaxed); }

bool logs(LogLevel level) { return level != LogLevel::Off && level >= the_level.load(std::memory_order_relaxed); }

void log_line(LogLevel level, const std::string& line) {
  if (logs(level)) {
    the_sink.load(std::memory_order_acquire)(level, line.c_str());
  }
}

}  // namespace farandole
