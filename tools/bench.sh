#!/usr/bin/env bash
# Run benchmarks: bench.sh [--full] [NAME...]. Without names, all run: bench/native_*.cc, then bench/*.py.
# The Python benchmarks write bench/results/*.json; bench/summary.py prints one table of them at the end.
# --full runs the long form of each benchmark that also has a quick form.
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
  # Modules without a main are imported by benchmarks.
  mapfile -t names < <(find bench -maxdepth 1 -name 'native_*.cc' -printf '%f\n' | sed 's/\.cc$//' | sort &&
    grep -l '__main__' bench/*.py | xargs -n 1 basename -s .py | grep -vE '^(summary|pictures)$')
fi

# The competitors from PyPI. The benchmarks themselves report others that are missing, such as Open MPI.
if ! python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("mpi4py"))' || [[ ! -x .venv/bin/mpiexec.hydra ]]; then
  pip install -q -c constraints.txt mpi4py mpich || echo "bench: mpi4py and mpich cannot be installed; MPI is left out" >&2
fi

cmake -S . -B "$FOLDER" -DFARANDOLE_PYTHON=OFF -DFARANDOLE_BENCH=ON >/dev/null
cmake --build "$FOLDER" --parallel "$(nproc)" >/dev/null
"$FOLDER/bench/native_cores" | tee "$FOLDER/cores.txt" # each result holds it
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
    # Benchmarks that import peers.py, and a few others, have the option --full.
    ! grep -qE '^import peers|"--full"' "bench/$name.py" || command+=("${full[@]}")
  else
    command=("$FOLDER/bench/$name")
  fi
  # Go on after a failure: the table still shows the benchmarks that ran.
  "${command[@]}" || failed+=("$name")
done
mapfile -t results < <(find bench/results -name '*.json' -newer build/bench/started ! -name '*-summary.json' | sort)
if ((${#results[@]})); then
  python bench/summary.py "${results[@]}"
  python bench/pictures.py "${results[@]}"
fi
if ((${#failed[@]})); then
  echo "bench: failed: ${failed[*]}" >&2
  exit 1
fi
