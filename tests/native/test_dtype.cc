#include <set>
#include <string>

#include "base/dtype.h"
#include "check.h"

using namespace farandole;

int main() {
  std::set<std::string> names;
  for (int value = 0; value < kDTypes; ++value) {
    const DType dtype = static_cast<DType>(value);
    CHECK(is_dtype(static_cast<uint8_t>(value)));
    CHECK(reducible(dtype));
    names.insert(name_of(dtype));
    // The name carries the width, except for the one-byte bool.
    const std::string name = name_of(dtype);
    const size_t digits = name.find_first_of("0123456789", name.starts_with("bfloat") ? 6 : 0);
    check::equal(size_of(dtype) * 8, dtype == DType::Bool ? 8 : std::stoul(name.substr(digits)), name);
    check::equal(is_floating(dtype), name.find("float") != std::string::npos, name);
  }
  CHECK_EQ(names.size(), static_cast<size_t>(kDTypes));

  // Values of a hostile byte.
  for (int value = kDTypes; value < 256; ++value) {
    const DType dtype = static_cast<DType>(value);
    CHECK(!is_dtype(static_cast<uint8_t>(value)));
    CHECK(!reducible(dtype));
    CHECK_EQ(size_of(dtype), 0U);
    CHECK_EQ(std::string(name_of(dtype)), "unknown");
  }
  return check::report();
}
