#!/usr/bin/env bash
# Build and run the native tests: native.sh plain|thread|address|aarch64. `thread` and `address` build core and tests with
# that sanitizer, in a build folder of their own; `plain` links the tests to the core that `make setup` has built;
# `aarch64` builds with the compiler of the release and runs the tests by qemu-user.
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
    # The benchmarks are built too, so that they stay fit to run.
    choices=(-DFARANDOLE_CORE="$PWD/${core#* }" -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DFARANDOLE_BENCH=ON)
    ;;
  thread | address) choices=(-DFARANDOLE_SANITIZE="$kind" -DCMAKE_CXX_FLAGS_RELEASE=-O1) ;; # -O3 takes twice as long to build
  aarch64)
    .venv/bin/python tools/release.py --compilers
    for needed in qemu-aarch64 /usr/aarch64-linux-gnu/lib/libc.so.6; do
      command -v "$needed" >/dev/null || [[ -e $needed ]] || {
        echo "native.sh: there is no $needed: install qemu-user and libc6-arm64-cross (make packages)" >&2
        exit 1
      }
    done
    choices=(-G Ninja -DCMAKE_CXX_COMPILER="$PWD/build/release/zig-aarch64/c++" -DCMAKE_CXX_FLAGS_RELEASE=-O1
      -DCMAKE_AR="$PWD/build/release/zig-aarch64/ar" -DCMAKE_RANLIB="$PWD/build/release/zig-aarch64/ranlib"
      -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DFARANDOLE_WERROR=OFF
      "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/aarch64-linux-gnu")
    ;;
  *)
    echo "usage: native.sh plain|thread|address|aarch64" >&2
    exit 2
    ;;
esac
folder=build/native-$kind
limits=(--timeout 300)
# qemu-user has neither robust mutexes, which show that a rank's thread is gone, nor limits on the address space.
if [[ $kind == aarch64 ]]; then limits=(--timeout 1500 --exclude-regex '^(test_arena|test_failure_detector)$'); fi

cmake -S . -B "$folder" -DFARANDOLE_PYTHON=OFF -DFARANDOLE_TESTS=ON "${choices[@]}" >/dev/null
cmake --build "$folder" --parallel "$(nproc)"
repeat=$((${AGAIN:-0} ? 2 : 1)) # ctest also lists the tests that failed at first
# More than there are processors, because tests wait for half of their time.
ctest --test-dir "$folder" --parallel "$((2 * $(nproc)))" --output-on-failure "${limits[@]}" --repeat "until-pass:$repeat"
