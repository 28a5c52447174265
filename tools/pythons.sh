#!/usr/bin/env bash
# Build farandole with every CPython of this machine from 3.11 on, and run the core suite with each:
# pythons.sh [PYTHON...]. Without names, the version of .venv is skipped: `make test` runs with it.
# Each version gets an environment below build/ with NumPy and Arrow, without frameworks. It is kept for the next run.
#
#   CXX=g++-11   the compiler
#   NEWEST=1     only with the newest of these Pythons
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH" # `make setup` may have installed cmake and ninja there

# The core suite: the tests that depend on the Python version and take seconds.
readonly SUITE=(
  tests/unit
  tests/conformance
)
readonly NATIVE=build/pythons-native # one folder for all: only the binding depends on Python

# Print the paths of interpreters: commands first, then pyenv's versions.
candidates() {
  compgen -c | grep -xE 'python3\.[0-9]+' | sort -uV || true
  printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3
}

# Print "VERSION PATH" for each interpreter given that can build farandole; the first of each version.
usable() {
  local each
  for each in "$@"; do
    "$each" - 2>/dev/null <<'EOF' || true
import ensurepip, sys, sysconfig

released = sys.version_info >= (3, 11) and sys.version_info.releaselevel == "final"
if released and sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED"):
    print("{}.{}".format(*sys.version_info), sys._base_executable)
EOF
  done | sort -usV -k1,1
}

test_with() {
  local version=$1 base=$2 folder=build/python-$1
  local python=$folder/bin/python
  echo "pythons: $("$base" --version) ($base)"
  [[ -x $python ]] || "$base" -m venv "$folder"
  "$python" -m pip install -q -c constraints.txt scikit-build-core nanobind
  rm -f "$NATIVE/CMakeCache.txt" # it refers to the previous Python
  "$python" -m pip install -q -c constraints.txt --no-build-isolation -C build-dir="$NATIVE" \
    -C cmake.define.FARANDOLE_WERROR=ON -C cmake.define.CMAKE_CXX_FLAGS_RELEASE=-O1 ".[test]"
  INTERPRETER=$python tools/tests.sh 2 -q -m "not slow and not spark" "${SUITE[@]}"
}

if (($# > 0)); then
  mapfile -t found < <(usable "$@")
else
  tested=$(.venv/bin/python -c 'import sys; print("{}.{}".format(*sys.version_info))')
  mapfile -t asked < <(candidates)
  mapfile -t found < <(usable "${asked[@]}" | grep -v "^${tested//./\\.} ")
fi
if ((${#found[@]} == 0)); then
  echo "pythons: no CPython from 3.11 on${tested:+ but $tested, the one of .venv}" >&2
  (($# == 0)) # fail if a Python was named
  exit
fi
if [[ ${NEWEST:-} ]]; then found=("${found[-1]}"); fi
for each in "${found[@]}"; do
  read -r version path <<<"$each"
  test_with "$version" "$path"
done
echo "pythons: all is well with ${#found[@]}: $(printf '%s\n' "${found[@]}" | cut -d' ' -f1 | paste -sd' ')"
