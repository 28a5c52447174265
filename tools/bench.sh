#!/usr/bin/env bash
# Run the measurements: bench.sh [--full] [name ...], by default all: bench/native_*.cc, then bench/*.py.
# Python ones write bench/results/*.json; --full is for those that have a quick form.
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
    grep -l '__main__' bench/*.py | xargs -n 1 basename -s .py)
fi

# The peers from PyPI; what else is missing (Open MPI) the measurements name themselves.
if ! python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("mpi4py"))' || [[ ! -x .venv/bin/mpiexec.hydra ]]; then
  pip install -q -c constraints.txt mpi4py mpich || echo "bench: mpi4py and mpich cannot be installed; MPI is left out" >&2
fi

cmake -S . -B "$FOLDER" -DFARANDOLE_PYTHON=OFF -DFARANDOLE_BENCH=ON >/dev/null
cmake --build "$FOLDER" --parallel "$(nproc)" >/dev/null
for name in "${names[@]}"; do
  echo "== $name"
  if [[ -f bench/$name.py ]]; then
    # Those built on peers.py have a quick form and a full one.
    if grep -q '^import peers' "bench/$name.py"; then
      python "bench/$name.py" "${full[@]}"
    else
      python "bench/$name.py"
    fi
  else
    "$FOLDER/bench/$name"
  fi
done
