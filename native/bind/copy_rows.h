// Copying of rows that lie anywhere in memory to the memory of a batch.
#pragma once

#include <nanobind/nanobind.h>

namespace farandole {

/// Copies C-contiguous buffers to `target`, one after the other. Raises `ValueError` if they are not as long as it, and
/// the exporter's error for other buffers.
///
/// Releases the GIL once for all of them; NumPy would release it for each, and then wait while other threads decode.
void copy_rows(nanobind::handle target, nanobind::list rows);

}  // namespace farandole
