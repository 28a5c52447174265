#!/usr/bin/env bash
# All checks that run nothing of farandole. Each runs even if one before it has found something.
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

mapfile -t cxx < <(find native tests/native bench -name '*.cc' -o -name '*.h')
check "ruff" ruff check --quiet
check "ruff format" ruff format --check --quiet
check "clang-format" clang-format --dry-run --Werror "${cxx[@]}"
check "mypy" mypy
check "layers" lint-imports --no-logo
check "spelling" codespell
check "docs" tools/docs.sh
check "shell scripts" shellcheck tools/*.sh .ci/run
check "house rules" python tools/house_rules.py

if ((${#failed[@]})); then
  echo "lint: FAILED: ${failed[*]}" >&2
  exit 1
fi
echo "lint: all is well"
