// Leveled log lines to one sink per process, which is standard error unless set_log_sink() changes it.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

namespace farandole {

enum class LogLevel : uint8_t { Trace, Debug, Info, Warning, Error, Off };

[[nodiscard]] const char* name_of(LogLevel level);

// Runs on the thread that logs. Must be thread-safe, must not throw, and must not take a lock that a logging thread may
// hold.
using LogSink = void (*)(LogLevel level, const char* line) noexcept;

// Sets the sink; nullptr restores standard error.
void set_log_sink(LogSink sink);
// Drops lines below `level` before they are formatted. The default is Warning.
void set_log_level(LogLevel level);
[[nodiscard]] bool logs(LogLevel level);
void log_line(LogLevel level, const std::string& line);

// Logs the concatenation of `parts` as one line.
template <class... Parts>
void log(LogLevel level, const Parts&... parts) {
  if (!logs(level)) {
    return;
  }
  std::ostringstream line;
  (line << ... << parts);
  log_line(level, line.str());
}

}  // namespace farandole
