#!/usr/bin/env bash
# Build and run the native tests: native.sh plain|thread|address. `thread` and `address` build core and tests with that
# sanitizer, in a build folder of their own; `plain` links the tests to the core that `make setup` has built.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH" # `make setup` may have installed cmake and ninja there

kind=${1:-plain}
case $kind in
  plain)
    core=$(find build -path 'build/cp*/native/libfarandole_core.a' -printf '%T@ %p\n' | sort -n | tail -n 1)
    [[ $core ]] || {
      echo "native.sh: make setup has not built the core yet" >&2
      exit 1
    }
    choices=(-DFARANDOLE_CORE="$PWD/${core#* }" -DCMAKE_CXX_FLAGS_RELEASE=-O1)
    ;;
  thread | address) choices=(-DFARANDOLE_SANITIZE="$kind" -DCMAKE_CXX_FLAGS_RELEASE=-O1) ;; # -O3 takes twice as long to build
  *)
    echo "usage: native.sh plain|thread|address" >&2
    exit 2
    ;;
esac
folder=build/native-$kind

cmake -S . -B "$folder" -DFARANDOLE_PYTHON=OFF -DFARANDOLE_TESTS=ON "${choices[@]}" >/dev/null
cmake --build "$folder" --parallel "$(nproc)"
repeat=$((${AGAIN:-0} ? 2 : 1)) # ctest also lists the tests that failed at first
# More than there are processors, because tests wait for half of their time.
ctest --test-dir "$folder" --parallel "$((2 * $(nproc)))" --output-on-failure --timeout 300 --repeat "until-pass:$repeat"
