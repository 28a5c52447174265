#!/usr/bin/env bash
# Run Python tests, several at a time: tests.sh JOBS AGAIN [arguments of pytest]. At most AGAIN failed tests run once more,
# alone: a test that then passes has failed of the load, and is named at the end, to be mended. More fail for good.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH"

jobs=$1 again=$2
shift 2
python tools/spark_archive.py

status=0
failures=.pytest_cache/v/cache/lastfailed
if ((again)); then rm -f "$failures"; fi # it keeps those of earlier runs
python -m pytest -n "$jobs" --dist loadfile --no-loadscope-reorder "$@" || status=$?
if ((status != 1 || again == 0)); then # 1: all were run, and some failed
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
