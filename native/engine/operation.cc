#include "engine/operation.h"

#include <algorithm>
#include <new>

namespace farandole {

ResultBuffer::ResultBuffer(size_t bytes) {
  const size_t rounded = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  data_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded)));
  if (!data_) throw std::bad_alloc();
}

}  // namespace farandole
