#include "engine/trace_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

namespace farandole {
namespace {

constexpr size_t kPage = 4096;
constexpr std::string_view kBegin = "[\n";
constexpr std::string_view kBetween = ",\n";
constexpr std::string_view kEnd = "\n]\n";

/// Bytes of `events` for one write of `room` bytes: whole events, at least one.
size_t piece_of(std::string_view events, size_t room) {
  if (events.size() <= room) return events.size();
  size_t cut = events.rfind(kBetween, room);
  if (cut == std::string_view::npos) cut = events.find(kBetween);
  return cut == std::string_view::npos ? events.size() : cut;
}

void cut_off(int fd, uint64_t end) {
  struct stat about{};
  // Only a regular file can be truncated, not a pipe or /dev/null.
  if (fstat(fd, &about) == 0 && S_ISREG(about.st_mode)) static_cast<void>(!ftruncate(fd, static_cast<off_t>(end)));
}

}  // namespace

TraceFileState append_events(int fd, uint64_t end, std::string_view events,
                             ssize_t (*write)(int, const void*, size_t, off_t)) {
  std::string body;
  while (!events.empty()) {
    if (end == 0) cut_off(fd, 0);
    const std::string_view before = end == 0 ? kBegin : kBetween;
    const size_t page_left = kPage - end % kPage;
    const size_t frame = before.size() + kEnd.size();
    const size_t size = piece_of(events, page_left > frame ? page_left - frame : 0);
    // One write replaces the bracket by the events and a new bracket.
    body.assign(before).append(events.substr(0, size)).append(kEnd);
    for (size_t done = 0; done < body.size();) {
      const ssize_t written = write(fd, body.data() + done, body.size() - done, static_cast<off_t>(end + done));
      if (written >= 0) {
        done += static_cast<size_t>(written);
      } else if (errno != EINTR) {
        const int error = errno;
        cut_off(fd, end);
        // The disk is probably full. The truncation has made room for the closing bracket.
        if (end > 0) static_cast<void>(!write(fd, kEnd.data(), kEnd.size(), static_cast<off_t>(end)));
        return {end, error};
      }
    }
    end += body.size() - kEnd.size();
    events.remove_prefix(size);
    if (events.starts_with(kBetween)) events.remove_prefix(kBetween.size());
  }
  return {end, 0};
}

}  // namespace farandole
