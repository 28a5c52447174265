#!/usr/bin/env bash
# Run the Python tests in parallel: tests.sh JOBS AGAIN [PYTEST ARGUMENT...]. JOBS tests run at a time. If at most AGAIN
# tests fail, each runs once more, alone. A test that then passes depends on the machine's load and is listed at the end
# as one to fix. If more than AGAIN fail, the run fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH"

jobs=$1 again=$2
shift 2
unset PYTHONDONTWRITEBYTECODE # every one of thousands of processes would compile the same modules

status=0
failures=.pytest_cache/v/cache/lastfailed
if ((again)); then rm -f "$failures"; fi # pytest keeps failures of earlier runs in it
python -m pytest -n "$jobs" --dist loadfile --no-loadscope-reorder "$@" || status=$?
if ((status != 1 || again == 0)); then # 1: all tests ran and some failed
  exit "$status"
fi
mapfile -t failed < <(python -c 'import json, sys; print(*json.load(sys.stdin), sep="\n")' <"$failures")
if ((${#failed[@]} > again)); then
  echo "tests.sh: ${#failed[@]} tests failed" >&2
  exit 1
fi
echo "tests.sh: once more, alone: ${failed[*]}"
python -m pytest -n 0 "${failed[@]}"
printf 'tests.sh: failed beside others and passed alone, to be mended: %s\n' "${failed[@]}" >&2
