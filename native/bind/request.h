#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "engine/operation.h"

namespace farandole {

/// The text of a Python string, valid as long as the string. Throws a Python TypeError for another object.
[[nodiscard]] std::string_view text_of(nanobind::handle name);

/// A `farandole.core.operations.request.Request`, read once.
class ReadRequest {
 public:
  /// `name` is the operation's name on the wire, and must outlive this object. Throws Error (Invalid).
  ReadRequest(nanobind::handle request, std::string_view name);

  [[nodiscard]] const RequestView& view() const { return view_; }

 private:
  RequestView view_;
  std::vector<int64_t> splits_;
};

}  // namespace farandole
