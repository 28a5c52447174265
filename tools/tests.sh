#!/usr/bin/env bash
# Run the Python tests in parallel: tests.sh JOBS [PYTEST ARGUMENT...]. JOBS tests run at a time.
#
#   INTERPRETER=.venv/bin/python   runs them
#   AGAIN=0   if at most so many tests fail, each runs once more, alone. A test that then passes depends on the load of the
#             machine, and is listed at the end as one to fix. If more fail, the run fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${INTERPRETER:-.venv/bin/python}
PATH="$(cd "$(dirname "$python")" && pwd):$PATH"

jobs=$1 again=${AGAIN:-0}
shift
unset PYTHONDONTWRITEBYTECODE # every one of thousands of processes would compile the same modules

if ((again == 0)); then exec "$python" -m pytest -n "$jobs" --dist loadfile --no-loadscope-reorder "$@"; fi

cache=$PWD/build/tests-again # holds the failures of this run alone
rm -rf "$cache"
status=0
"$python" -m pytest -o cache_dir="$cache" -n "$jobs" --dist loadfile --no-loadscope-reorder "$@" || status=$?
if ((status != 1)); then exit "$status"; fi # 1: all tests ran and some failed
mapfile -t failed < <("$python" -c 'import json, sys; print(*json.load(sys.stdin), sep="\n")' <"$cache/v/cache/lastfailed")
if ((${#failed[@]} > again)); then
  echo "tests.sh: ${#failed[@]} tests failed" >&2
  exit 1
fi
echo "tests.sh: once more, alone: ${failed[*]}"
"$python" -m pytest -o cache_dir="$cache" -n 0 --last-failed "$@"
printf 'tests.sh: failed beside others and passed alone, to be mended: %s\n' "${failed[@]}" >&2
