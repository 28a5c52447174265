#pragma once

#include <memory>
#include <utility>

#include "base/keep.h"
#include "collectives/world.h"

namespace farandole {

/// A value in memory that operations of a world use. After a failed operation the transport may still write to it, so
/// the value then stays until the process ends.
template <class T>
class Lent {
 public:
  template <class... Arguments>
  explicit Lent(const World& world, Arguments&&... arguments)
      : world_(world), value_(std::make_shared<T>(std::forward<Arguments>(arguments)...)) {}
  ~Lent() {
    if (world_.has_abandoned()) keep_for_ever(std::move(value_));
  }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

  T& operator*() const { return *value_; }
  T* operator->() const { return value_.get(); }

 private:
  const World& world_;
  std::shared_ptr<T> value_;
};

}  // namespace farandole
