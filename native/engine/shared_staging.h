#pragma once

#include <memory>
#include <mutex>
#include <utility>

#include "engine/staging.h"

namespace farandole {

/// The staging of one engine, made at its first use by any of its users. Thread-safe.
class SharedStaging {
 public:
  explicit SharedStaging(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}

  /// Returns the staging, made now if there is none.
  [[nodiscard]] std::shared_ptr<Staging> get() {
    const std::lock_guard lock(mu_);
    if (made_ == nullptr) made_ = std::make_shared<Staging>(engine_);
    return made_;
  }

  /// Returns the staging, or null before its first use.
  [[nodiscard]] std::shared_ptr<Staging> used() {
    const std::lock_guard lock(mu_);
    return made_;
  }

 private:
  const std::shared_ptr<Engine> engine_;
  std::mutex mu_;
  std::shared_ptr<Staging> made_;
};

}  // namespace farandole
