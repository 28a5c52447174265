#include "bind/fabrics.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <vector>

#include "collectives/mpi_fabric.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace farandole {

void define_fabrics(nb::module_& m) {
  nb::class_<Fabric>(m, "Fabric");

  nb::class_<MpiFabric, Fabric>(m, "MpiFabric")
      .def(
          "__init__",
          [](MpiFabric* self, uintptr_t library, const std::vector<int>& ranks) {
            new (self) MpiFabric(reinterpret_cast<void*>(library), ranks);
          },
          "library"_a, "ranks"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_static("has_abandoned", &MpiComm::has_abandoned);
}

}  // namespace farandole
