#!/usr/bin/env bash
# Build the documentation site into build/docs; a warning is an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

.venv/bin/python tools/config_table.py --check
.venv/bin/python tools/documents.py
# -E: a docstring that has changed does not make its page older.
.venv/bin/python -m sphinx -E -W --keep-going -q -b html docs build/docs
.venv/bin/python tools/public_names.py
echo "docs: build/docs/index.html"
