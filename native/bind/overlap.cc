#include "bind/overlap.h"

#include <algorithm>

#include "base/error.h"
#include "bind/capture.h"

namespace nb = nanobind;

namespace farandole {

bool overlap(Spans spans) {
  std::erase_if(spans, [](const auto& span) { return span.second == 0; });
  std::ranges::sort(spans);
  const auto next = std::ranges::adjacent_find(
      spans, [](const auto& one, const auto& other) { return one.first + one.second > other.first; });
  return next != spans.end();
}

bool share_memory(nb::handle tensors) {
  Spans spans;
  try {  // each framework refuses tensors in its own way
    for (const nb::handle tensor : nb::tuple(tensors)) {
      const Captured captured = capture(tensor, {});
      spans.emplace_back(captured.data, captured.bytes());
    }
  } catch (const Error&) {
    return false;
  } catch (const nb::python_error&) {
    return false;
  }
  return overlap(std::move(spans));
}

}  // namespace farandole
