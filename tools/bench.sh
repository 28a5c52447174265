#!/usr/bin/env bash
# Run the measurements: bench.sh [name ...], by default all: bench/native_*.cc, then bench/*.py.
# Python ones write bench/results/*.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH"

readonly FOLDER=build/bench
names=("$@")
if ((${#names[@]} == 0)); then
  # What other measurements import is no measurement: it has no main.
  mapfile -t names < <(find bench -maxdepth 1 -name 'native_*.cc' -printf '%f\n' | sed 's/\.cc$//' | sort &&
    grep -l '__main__' bench/*.py | xargs -n 1 basename -s .py)
fi

cmake -S . -B "$FOLDER" -DFARANDOLE_PYTHON=OFF -DFARANDOLE_BENCH=ON >/dev/null
cmake --build "$FOLDER" --parallel "$(nproc)" >/dev/null
for name in "${names[@]}"; do
  echo "== $name"
  if [[ -f bench/$name.py ]]; then
    python "bench/$name.py"
  else
    "$FOLDER/bench/$name"
  fi
done
