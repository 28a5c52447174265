"""The notebooks of examples/, each cell run by IPython in order."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted(Path(__file__).parents[3].joinpath("examples", "notebooks").glob("*.ipynb"))

RUN = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        assert not cell["outputs"], "clear the outputs: they would be those of another run"
        shell.run_cell("".join(cell["source"])).raise_error()
"""


@pytest.mark.native
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_run_in_order(notebook: Path, tmp_path: Path) -> None:
    lacking = [name for name in ("IPython", "torch", "pyspark", "sklearn") if importlib.util.find_spec(name) is None]
    if lacking:
        pytest.skip(f"{', '.join(lacking)} not installed")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(notebook)], cwd=tmp_path, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loss on Spark: " in done.stdout
