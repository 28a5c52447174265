#!/usr/bin/env bash
# Make .venv and build farandole in it. A step runs again only if its inputs have changed, so every other target of the
# Makefile runs this script first.
#
#   PYTHON=python3.12      the interpreter to make .venv with (3.11 or newer)
#   TORCH=cpu              install PyTorch's CPU build, and fail if no index offers it for this Python
#   TORCH=cuda             install the build of pip's own index, which comes with CUDA
#   TORCH=none             install no PyTorch; tests that need it are skipped
#
# Without TORCH, a choice made earlier for this .venv applies. Else Linux gets the CPU build, or no PyTorch if no index
# offers it for this Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
readonly BIN=$VENV/bin
readonly LOG=build/setup.log
readonly CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { echo "setup: $*"; }
die() {
  echo "setup: $*" >&2
  exit 1
}

# Run a command with its output in the log; if it fails, show the end of the log and exit.
quietly() {
  if ! "$@" >>"$LOG" 2>&1; then
    tail -n 40 "$LOG" >&2
    die "failed: $* (all of it: $LOG)"
  fi
}

find_python() {
  local each names=(python3 python3.13 python3.12 python3.11)
  [[ -z ${PYTHON:-} ]] || names=("$PYTHON")
  for each in "${names[@]}"; do
    if "$each" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$each"
      return
    fi
  done
  die "Python 3.11 or newer is needed (looked for: ${names[*]}): install it, or name it: make setup PYTHON=/path/to/python3"
}

make_venv() {
  local python
  if [[ -x $BIN/python ]]; then
    check_version
    return
  fi
  python=$(find_python)
  if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    die "$python cannot make virtual environments: install its venv module (Debian, Ubuntu: apt-get install python3-venv)"
  fi
  say "$VENV with $("$python" --version)"
  quietly "$python" -m venv "$VENV"
}

# Exit with an error if PYTHON names another version than that of .venv.
check_version() {
  local python asked found version='import sys; print("%d.%d" % sys.version_info[:2])'
  [[ -n ${PYTHON:-} ]] || return 0
  python=$(find_python)
  asked=$("$python" -c "$version")
  found=$("$BIN/python" -c "$version")
  [[ $asked == "$found" ]] ||
    die "$VENV has Python $found, and PYTHON=$PYTHON is $asked: remove $VENV (rm -r $VENV), then run make setup again"
}

check_compiler() {
  local cxx=${CXX:-c++}
  if ! command -v "$cxx" >/dev/null; then
    die "there is no C++ compiler ($cxx): install one (Debian, Ubuntu: apt-get install g++), or name it in CXX"
  fi
  local probe='#include <barrier>
#include <span>
#include <stop_token>
int main() { std::stop_source stop; return stop.stop_requested() ? 1 : 0; }'
  if ! "$cxx" -std=c++20 -fsyntax-only -x c++ - <<<"$probe" 2>>"$LOG"; then
    die "$cxx does not know C++20: install GCC 11 or Clang 16 or newer, or name one in CXX"
  fi
}

# Print the build tools that the system lacks or has in too old a version; PyPI has them.
missing_build_tools() {
  local major=0 minor=0 oldest=26
  read -r major minor < <(cmake --version 2>/dev/null | sed -n 's/^cmake version \([0-9]*\)\.\([0-9]*\).*/\1 \2/p') || true
  # CMake finds the stable ABI of Python 3.12 and newer from 3.26 on.
  "$BIN/python" -c 'import sys; sys.exit(sys.version_info >= (3, 12))' && oldest=22
  ((major > 3 || (major == 3 && minor >= oldest))) || echo cmake
  command -v ninja >/dev/null || echo ninja
}

# Install PyTorch. Return 1 if no index has this version for this Python.
install_torch() {
  local version found installed index=''
  version=$(sed -n 's/^torch==//p' constraints.txt)
  if [[ $TORCH != cuda && $(uname -s) == Linux ]]; then
    # PyPI's build comes with gigabytes of CUDA. pip's configured index may offer a CPU build; else use PyTorch's index.
    found=$("$BIN/pip" install --dry-run --no-deps --ignore-installed -q --report - "torch==$version" 2>>"$LOG") || true
    [[ $found == *"$version+cpu"* ]] || index=$CPU_INDEX
  fi
  say "torch $version${TORCH:+ ($TORCH)}${index:+ from $index}"
  local torch=(-c constraints.txt ${index:+--extra-index-url "$index"} "torch==$version")
  if [[ $TORCH == cuda ]]; then
    torch=(-c constraints.txt "torch===$version") # === excludes $version+cpu, which a configured index may offer
  fi
  "$BIN/pip" install --dry-run --no-deps -q "${torch[@]}" >>"$LOG" 2>&1 || return 1
  # pip treats an installed CPU build and CUDA build of one version as the same.
  installed=$("$BIN/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>>"$LOG") || true
  if [[ ($TORCH == cuda && $installed == *+cpu) || ($TORCH == cpu && $installed == "$version") ]]; then
    quietly "$BIN/pip" uninstall -y torch
  fi
  quietly "$BIN/pip" install "${torch[@]}"
}

install_all() {
  local tools extras=demo,dev,lightning
  if [[ $TORCH == none ]]; then
    extras=dev,spark,tensorboard
  elif ! install_torch; then
    [[ -z $TORCH ]] || die "no index offers torch to $("$BIN/python" --version): see $LOG"
    say "no index offers that torch to $("$BIN/python" --version) (see $LOG): going on without it, as TORCH=none does"
    extras=dev,spark,tensorboard
  fi
  mapfile -t tools < <(missing_build_tools)
  say "the other dependencies${tools[*]:+, ${tools[*]} among them}"
  # pyspark's build needs setuptools, which new environments of Python 3.12 and later lack.
  quietly "$BIN/pip" install -c constraints.txt scikit-build-core nanobind setuptools "${tools[@]}"
  quietly "$BIN/pip" install -c constraints.txt --no-build-isolation -e ".[$extras]"
  # tf_keras depends on tensorflow, the build with CUDA; tensorflow-cpu is enough.
  quietly "$BIN/pip" install -c constraints.txt --no-deps tf_keras
}

# Print one checksum of all files in the given paths.
state_of() {
  find "$@" -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum
}

TORCH=${TORCH:-$(cat "$VENV/torch" 2>/dev/null || true)}
[[ ${TORCH:-cpu} =~ ^(cpu|cuda|none)$ ]] || die "TORCH=$TORCH is unknown: TORCH may be cpu, cuda or none"
mkdir -p build
exec 9>build/setup.lock
flock 9 # one setup at a time
: >"$LOG"
make_venv
dependencies="$(state_of pyproject.toml constraints.txt tools/setup.sh) $TORCH"
sources="$(state_of native CMakeLists.txt pyproject.toml)"
readonly dependencies sources
if [[ $(cat "$VENV/dependencies.stamp" 2>/dev/null) != "$dependencies" ]]; then
  check_compiler
  install_all
  echo "$TORCH" >"$VENV/torch"
  echo "$dependencies" >"$VENV/dependencies.stamp"
  echo "$sources" >"$VENV/sources.stamp"
elif [[ $(cat "$VENV/sources.stamp" 2>/dev/null) != "$sources" ]]; then
  check_compiler
  say "native code has changed: building it"
  quietly "$BIN/pip" install --no-deps --no-build-isolation -e .
  echo "$sources" >"$VENV/sources.stamp"
fi
if tools/check_java.sh; then
  "$BIN/python" tools/spark_archive.py # for the tests
else
  say "everything but Spark works without Java"
fi
