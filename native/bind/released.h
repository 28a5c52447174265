#pragma once

#include <Python.h>

#include "engine/engine.h"

namespace farandole {

/// Lets go of the GIL for a call into an engine, which counts who is away. Whoever shuts the engine down waits for
/// them: a thread that came back to an interpreter that has ended would be torn out of this frame, and the process
/// with it (Python before 3.14).
class Released {
 public:
  explicit Released(Engine& engine) : engine_(engine) {
    engine_.visit(1);
    state_ = PyEval_SaveThread();
  }
  ~Released() {
    PyEval_RestoreThread(state_);
    engine_.visit(-1);
  }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

 private:
  Engine& engine_;
  PyThreadState* state_;
};

}  // namespace farandole
