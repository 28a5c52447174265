#pragma once

#include <nanobind/nanobind.h>

namespace farandole {

/// Defines the class `Fabric` of the module, and a class with a constructor for each fabric.
void define_fabrics(nanobind::module_& m);

}  // namespace farandole
