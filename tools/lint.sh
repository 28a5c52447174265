#!/usr/bin/env bash
# Run all static checks. Each check runs even if one before it fails.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
PATH="$PWD/.venv/bin:$PATH"

failed=()
check() {
  local name=$1
  shift
  echo "lint: $name"
  "$@" || failed+=("$name")
}

# Compare the stub of the native module with the one that nanobind generates.
stub() {
  local made
  made=$(mktemp -d)
  python -m nanobind.stubgen -q -m farandole._native -p tools/native_stubs.txt -o "$made/_native.pyi" &&
    ruff format --quiet --config pyproject.toml "$made/_native.pyi" &&
    diff -u src/farandole/_native.pyi "$made/_native.pyi"
  local found=$?
  rm -rf "$made"
  return "$found"
}

mapfile -t cxx < <(find native tests/native bench -name '*.cc' -o -name '*.h')
check "ruff" ruff check --quiet
check "ruff format" ruff format --check --quiet
check "clang-format" clang-format --dry-run --Werror "${cxx[@]}"
check "mypy" mypy
check "native stub" stub
check "layers" lint-imports --no-logo
check "spelling" codespell
check "docs" tools/docs.sh
check "shell scripts" shellcheck tools/*.sh .ci/run deploy/image/mpirun deploy/image/spark_entrypoint
check "house rules" python tools/house_rules.py

if ((${#failed[@]})); then
  echo "lint: FAILED: ${failed[*]}" >&2
  exit 1
fi
echo "lint: all is well"
