#!/usr/bin/env bash
# Build and run the native tests: native.sh plain|thread|address. A sanitizer has a build folder of its own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH" # cmake and ninja may have come with `make setup`

kind=${1:-plain}
case $kind in
  plain) sanitizer="" ;;
  thread | address) sanitizer=$kind ;;
  *)
    echo "usage: native.sh plain|thread|address" >&2
    exit 2
    ;;
esac
folder=build/native-$kind

cmake -S . -B "$folder" -DFARANDOLE_PYTHON=OFF -DFARANDOLE_TESTS=ON -DFARANDOLE_SANITIZE="$sanitizer" >/dev/null
cmake --build "$folder" --parallel "$(nproc)"
ctest --test-dir "$folder" --output-on-failure --timeout 300
