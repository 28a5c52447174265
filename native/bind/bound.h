#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "bind/calls.h"
#include "bind/capture.h"
#include "bind/request.h"

namespace farandole {

/// An allreduce of one tensor in place, prepared once for repeated calls. Used under the GIL.
///
/// It belongs to one engine at a time. An engine that shuts down releases it, and the next call asks `find` for another
/// one: that of the next generation of an elastic job, or the error of a job that has ended.
class Bound {
 public:
  /// `find` returns the Engine. `changed` is None, or is called with a list of the tensor before each reduction.
  /// `request` and `name` are as for Calls::run(). Throws as capture() does, and if the tensor is read-only.
  Bound(nanobind::object find, nanobind::object changed, nanobind::object request, nanobind::str name,
        nanobind::object tensor);
  ~Bound();
  Bound(const Bound&) = delete;
  Bound& operator=(const Bound&) = delete;

  /// Reduces the tensor and returns it. Blocks and throws as Calls::run() does.
  nanobind::object reduce();

  /// Drops the engine, which shuts down.
  void release();

  /// Visits Python's objects for the garbage collector, and drops them.
  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  void attach();
  void detach();
  [[nodiscard]] Captured memory() const;

  nanobind::object find_, tensor_, changed_, request_, name_;
  nanobind::object changed_argument_;
  ReadRequest read_;
  std::optional<Captured> kept_;  // the memory, if the tensor lends it for as long as this object lives
  nanobind::object engine_;       // of `calls_`
  Calls* calls_ = nullptr;        // null: `find_` must be asked
  Calls::Entry entry_;
  bool stale_ = false;  // the entry is of an earlier engine
};

void define_bound(nanobind::module_& m);

}  // namespace farandole
