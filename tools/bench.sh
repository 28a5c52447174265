#!/usr/bin/env bash
# Run the measurements: bench.sh [--full] [name ...], by default all: bench/native_*.cc, then bench/*.py.
# Python ones write bench/results/*.json, of which one table is made in the end; --full is for those with a quick form.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PWD/.venv/bin:$PATH"

readonly FOLDER=build/bench
full=()
if [[ ${1:-} == --full ]]; then
  full=(--full)
  shift
fi
names=("$@")
if ((${#names[@]} == 0)); then
  # What other measurements import is no measurement: it has no main.
  mapfile -t names < <(find bench -maxdepth 1 -name 'native_*.cc' -printf '%f\n' | sed 's/\.cc$//' | sort &&
    grep -l '__main__' bench/*.py | xargs -n 1 basename -s .py | grep -v '^summary$')
fi

# The peers from PyPI; what else is missing (Open MPI) the measurements name themselves.
if ! python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("mpi4py"))' || [[ ! -x .venv/bin/mpiexec.hydra ]]; then
  pip install -q -c constraints.txt mpi4py mpich || echo "bench: mpi4py and mpich cannot be installed; MPI is left out" >&2
fi

cmake -S . -B "$FOLDER" -DFARANDOLE_PYTHON=OFF -DFARANDOLE_BENCH=ON >/dev/null
cmake --build "$FOLDER" --parallel "$(nproc)" >/dev/null
mkdir -p bench/results
touch build/bench/started
failed=()
for name in "${names[@]}"; do
  echo "== $name"
  if [[ $name =~ ^(feed|launch_spark|spark_fit|spark_limits|transform)$ ]] && ! tools/check_java.sh; then
    echo "$name is left out: it needs Java."
    continue
  fi
  if [[ -f bench/$name.py ]]; then
    command=(python "bench/$name.py")
    # Those built on peers.py, among others, have a quick form and a full one.
    ! grep -qE '^import peers|"--full"' "bench/$name.py" || command+=("${full[@]}")
  else
    command=("$FOLDER/bench/$name")
  fi
  # What has been measured is worth a table, whatever fails after it.
  "${command[@]}" || failed+=("$name")
done
mapfile -t results < <(find bench/results -name '*.json' -newer build/bench/started ! -name '*-summary.json' | sort)
((${#results[@]} == 0)) || python bench/summary.py "${results[@]}"
if ((${#failed[@]})); then
  echo "bench: failed: ${failed[*]}" >&2
  exit 1
fi
