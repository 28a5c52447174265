// Leveled log lines for one process-wide sink; the binding may route them to Python's logging.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

namespace farandole {

enum class LogLevel : uint8_t { Trace, Debug, Info, Warning, Error, Off };

[[nodiscard]] const char* name_of(LogLevel level);

// Runs on the thread that logs: must be thread-safe, must not throw, must not take a lock that is held while logging.
using LogSink = void (*)(LogLevel level, const char* line) noexcept;

// nullptr restores the default sink, standard error.
void set_log_sink(LogSink sink);
// Lines below `level` are not formatted. The default is Warning.
void set_log_level(LogLevel level);
[[nodiscard]] bool logs(LogLevel level);
void log_line(LogLevel level, const std::string& line);

// Writes `parts` side by side as one line.
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
