#pragma once

#include <Python.h>

#include "engine/engine.h"

namespace farandole {

/// Releases the GIL for a call into an engine, which counts such threads. Shutdown waits for them: a thread that
/// returned to a finalized interpreter would be terminated within this frame, and the process with it (Python before
/// 3.14).
class Released {
 public:
  explicit Released(Engine& engine) : engine_(engine) {
    engine_.count_callers(1);
    state_ = PyEval_SaveThread();
  }
  ~Released() {
    PyEval_RestoreThread(state_);
    engine_.count_callers(-1);
  }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

 private:
  Engine& engine_;
  PyThreadState* state_;
};

}  // namespace farandole
