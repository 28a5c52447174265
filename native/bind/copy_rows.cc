#include "bind/copy_rows.h"

#include <cstring>
#include <vector>

#include "bind/capture.h"

namespace nb = nanobind;

namespace farandole {

void copy_rows(nb::handle target, nb::list rows) {
  const LentBuffer whole(target, PyBUF_WRITABLE);
  std::vector<LentBuffer> lent;
  lent.reserve(rows.size());
  Py_ssize_t total = 0;
  for (const nb::handle row : rows) total += lent.emplace_back(row, PyBUF_SIMPLE).view().len;
  if (total != whole.view().len) throw nb::value_error("the rows are not as long as the target");
  const nb::gil_scoped_release released;
  auto* place = static_cast<std::byte*>(whole.view().buf);
  for (const LentBuffer& row : lent) {
    const auto nbytes = static_cast<size_t>(row.view().len);
    if (nbytes != 0) std::memcpy(place, row.view().buf, nbytes);
    place += nbytes;
  }
}

}  // namespace farandole
