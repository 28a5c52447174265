#pragma once

#include <exception>

namespace farandole {

/// Sets Python's error for an exception of the engine or of the system; rethrows any other exception. nanobind calls it
/// for each exception that leaves a bound function. The second argument is nanobind's, and not used.
void translate(const std::exception_ptr& raised, void* unused);

}  // namespace farandole
