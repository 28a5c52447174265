#!/usr/bin/env bash
# Install the wheel of dist/ into a new environment, try the commands, and run the conformance tests there:
# wheel.sh [PYTEST ARGUMENT...]. The environment, build/wheel, has NumPy, and PyTorch if .venv has it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly ROOT=$PWD FOLDER=$PWD/build/wheel
readonly BIN=$FOLDER/venv/bin
readonly CPU_INDEX=https://download.pytorch.org/whl/cpu

rm -rf "$FOLDER"
.venv/bin/python -m venv "$FOLDER/venv"
"$BIN/pip" install -q --no-deps --no-index --find-links dist farandole # the wheel for this Python and machine
# Install the build of PyTorch that .venv has, if any, from PyTorch's own index if need be.
torch=$(.venv/bin/pip freeze 2>/dev/null | sed -n 's/^torch==/torch===/p')
index=()
if [[ $torch == *+cpu ]] && ! "$BIN/pip" install --dry-run --no-deps -q "$torch" 2>/dev/null; then
  index=(--extra-index-url "$CPU_INDEX")
fi
"$BIN/pip" install -q -c constraints.txt "${index[@]}" ${torch:+"$torch"} "farandole[test]"

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
