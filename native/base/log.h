// Warnings as lines to one sink per process, which is standard error unless set_warning_sink() changes it.
#pragma once

#include <sstream>
#include <string>

namespace farandole {

// Runs on the thread that warns. Must be thread-safe, must not throw, and must not take a lock that such a thread may
// hold.
using WarningSink = void (*)(const char* line) noexcept;

// Sets the sink; nullptr restores standard error.
void set_warning_sink(WarningSink sink);
void warn_line(const std::string& line);

// Writes the concatenation of `parts` as one line.
template <class... Parts>
void warn(const Parts&... parts) {
  std::ostringstream line;
  (line << ... << parts);
  warn_line(line.str());
}

}  // namespace farandole
