#!/usr/bin/env bash
# Run the Python tests, then the native ones: suite.sh JOBS AGAIN [PYTEST ARGUMENT...]. The native tests are built while
# the Python tests run, with the processor time that these leave: they wait for a third of theirs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

log=build/native-plain.log
setsid nice -n 19 tools/native.sh plain build >"$log" 2>&1 &
builder=$!
trap 'kill -- "-$builder" 2>/dev/null || true' EXIT # it is a session of its own, which no Ctrl-C reaches

status=0
tools/tests.sh "$@" || status=$?
((status <= 1)) || exit "$status" # 1: all tests ran and some failed; more: interrupted, or no test was found
if ! wait "$builder"; then
  cat "$log" >&2
  echo "suite.sh: the native tests cannot be built" >&2
  exit 1
fi
tools/native.sh plain || status=$?
exit "$status"
