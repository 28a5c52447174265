# The list of what the wheel's binaries contain, with licenses, in the wheel's .dist-info (PEP 770, CycloneDX).
# FARANDOLE_ZIG is the version of Zig's compiler, whose C++ library is linked in; empty with another compiler.
set(FARANDOLE_ZIG "" CACHE STRING "Version of the package ziglang that compiles a release")
if(NOT SKBUILD_METADATA_DIR)
  return()
endif()

set(components "")
macro(component name version purl license)
  string(APPEND components ",
    {\"type\": \"library\", \"name\": \"${name}\", \"version\": \"${version}\", \"purl\": \"${purl}\",
     \"licenses\": [{\"expression\": \"${license}\"}]}")
endmacro()
component(nanobind "${nanobind_VERSION}" "pkg:pypi/nanobind@${nanobind_VERSION}" "BSD-3-Clause")
component(robin-map "of nanobind ${nanobind_VERSION}" "pkg:github/Tessil/robin-map" "MIT")
if(FARANDOLE_ZIG)
  foreach(part libcxx libcxxabi libunwind compiler_rt)
    component(${part} "${CMAKE_CXX_COMPILER_VERSION}" "pkg:pypi/ziglang@${FARANDOLE_ZIG}#${part}"
      "Apache-2.0 WITH LLVM-exception")
  endforeach()
endif()
string(SUBSTRING "${components}" 1 -1 components)
configure_file(bill_of_materials.json.in "${CMAKE_CURRENT_BINARY_DIR}/farandole.cdx.json" @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/farandole.cdx.json" DESTINATION "${SKBUILD_METADATA_DIR}/sboms")
