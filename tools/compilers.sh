#!/usr/bin/env bash
# Build the core, its tests and the extension with the oldest compilers that README names, with warnings as errors, and
# run the native tests: compilers.sh [CXX...]. A compiler that is not installed is skipped with a message.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$PWD/.venv/bin/python
PATH="$PWD/.venv/bin:$PATH" # `make setup` may have installed cmake and ninja there

(($#)) || set -- g++-11 clang++-16
for compiler in "$@"; do
  if ! command -v "$compiler" >/dev/null; then
    echo "compilers: $compiler is not installed: not tried (Debian, Ubuntu: apt-get install ${compiler/clang++/clang})" >&2
    continue
  fi
  echo "compilers: $("$compiler" --version | head -n 1)"
  folder=build/compiler-$compiler
  # -O1 gives the same warnings and compiles in two thirds of the time. Without precompiled headers a missing #include
  # is an error.
  cmake -S . -B "$folder" -G Ninja -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_CXX_FLAGS_RELEASE=-O1 \
    -DPython_EXECUTABLE="$python" -DFARANDOLE_TESTS=ON -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON >/dev/null
  cmake --build "$folder" --parallel "$(nproc)"
  ctest --test-dir "$folder" --parallel "$((2 * $(nproc)))" --output-on-failure --timeout 300 # as tools/native.sh does
done
