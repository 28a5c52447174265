#!/usr/bin/env bash
# Build the documentation site into build/docs; a warning is an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

.venv/bin/python tools/config_table.py --check
.venv/bin/python tools/documents.py
.venv/bin/python -m sphinx -W --keep-going -q -b html docs build/docs
echo "docs: build/docs/index.html"
