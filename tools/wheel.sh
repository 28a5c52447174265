#!/usr/bin/env bash
# Build the wheel, install it into a new environment, try the commands, and run the conformance tests there:
# wheel.sh [PYTEST ARGUMENT...]. The environment has NumPy, and PyTorch if .venv has it.
# Wheel and environment are in build/wheel; each run makes both again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly ROOT=$PWD FOLDER=$PWD/build/wheel
readonly BIN=$FOLDER/venv/bin
readonly CPU_INDEX=https://download.pytorch.org/whl/cpu

rm -rf "$FOLDER"
# `make setup` may have installed cmake and ninja in .venv.
PATH="$ROOT/.venv/bin:$PATH" .venv/bin/pip wheel -q --no-deps --no-build-isolation --wheel-dir "$FOLDER" .
wheels=("$FOLDER"/farandole-*.whl)
echo "wheel: ${wheels[0]}, $(du -k "${wheels[0]}" | cut -f1) KiB"
.venv/bin/python -m venv "$FOLDER/venv"
# Install the build of PyTorch that .venv has, if any, from PyTorch's own index if need be.
torch=$(.venv/bin/pip freeze 2>/dev/null | sed -n 's/^torch==/torch===/p')
index=()
if [[ $torch == *+cpu ]] && ! "$BIN/pip" install --dry-run --no-deps -q "$torch" 2>/dev/null; then
  index=(--extra-index-url "$CPU_INDEX")
fi
"$BIN/pip" install -q -c constraints.txt "${index[@]}" ${torch:+"$torch"} "farandole[test] @ file://${wheels[0]}"

# Another folder and no .venv on PATH: Python must find the installed wheel, not the source tree.
cd "$FOLDER"
export PATH=$BIN:/usr/bin:/bin
python - "$FOLDER/venv/" <<'EOF'
import sys

import farandole
import farandole._native as native

for each in (farandole, native):
    if not each.__file__.startswith(sys.argv[1]):
        sys.exit(f"wheel: {each.__name__} comes from {each.__file__}")
EOF
farandole --version
farandole run -np 2 python -c '
import farandole.numpy as hvd, numpy
hvd.init()
assert hvd.allreduce(numpy.ones(1), op=hvd.Sum)[0] == 2'
horovodrun -np 2 python -c '
import horovod
from horovod.common.util import gloo_built
assert gloo_built() and "farandole" in horovod.__version__'
cd "$ROOT"
(($# > 0)) || set -- tests/conformance
exec "$BIN/python" -m pytest -q -p no:cacheprovider "$@"
