#!/usr/bin/env bash
# Run the tests of TensorFlow's operations with other TensorFlows than the pinned one, all with one wheel:
# tensorflow.sh VERSION... Each gets a virtual environment below build/, which is kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

(($# > 0)) || {
  echo "usage: tensorflow.sh VERSION...  (such as 2.16.2 2.19.1)" >&2
  exit 2
}

wheels=build/tensorflow-wheel
rm -rf "$wheels"
.venv/bin/python -m pip wheel -q --no-build-isolation --no-deps -C build-dir=build/tensorflow-native -w "$wheels" .

for version in "$@"; do
  folder=build/tensorflow-$version
  [[ -x $folder/bin/python ]] || .venv/bin/python -m venv "$folder"
  "$folder/bin/python" -m pip install -q "tensorflow-cpu==$version" pytest pytest-timeout
  "$folder/bin/python" -m pip install -q --force-reinstall --no-deps "$wheels"/*.whl
  "$folder/bin/python" -m pip install -q cloudpickle rich
  # Without what the other tests need; and old versions warn of what was new after them.
  "$folder/bin/python" -m pytest --noconftest -W default -q -p no:cacheprovider \
    tests/ranks/test_tensorflow_{ops,graphs,gradients}.py
done
