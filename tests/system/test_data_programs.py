"""Programs that read Parquet: resumed with other numbers of ranks; without Spark; from S3."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow.parquet as pq

from helpers import programs
from helpers.datasets import RAGGED, write_rows
from helpers.installed import require, require_imports_of
from system.launched import PATIENCE, farandole

EXAMPLE = Path(__file__).parents[2] / "examples" / "data_parquet.py"

# The example, killed after it has written a part of the rows.
KILLED = """
import os, runpy, sys
import pyarrow.parquet as pq

write_table = pq.write_table

def write_and_die(*args, **options):
    write_table(*args, **options)
    os._exit(9)

pq.write_table = write_and_die
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# An interpreter in which pyspark is not installed.
WITHOUT_SPARK = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pyspark", "py4j"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
READ = """
from farandole.data import make_batch_reader
from farandole.torch.data import BatchedDataLoader

with BatchedDataLoader(make_batch_reader(sys.argv[1]), batch_size=7) as loader:
    print(sorted(int(row) for batch in loader for row in batch["row"]) == list(range(int(sys.argv[2]))))
"""


@pytest.mark.timeout(300)
def test_the_example_goes_on_with_4_then_2_then_3_ranks(tmp_path: Path) -> None:
    require_imports_of(EXAMPLE)
    seen = 0
    for size, steps in ((4, ["--steps", "5"]), (2, ["--steps", "5"]), (3, [])):
        options = ("--folder", str(tmp_path / "digits"), "--state", str(tmp_path / "state.json"), *steps)
        done = farandole("run", "-np", str(size), sys.executable, str(EXAMPLE), *options, framework="torch")
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.search(r"(\d+) steps, (\d+) rows on (\d+) ranks", done.stdout)
        assert found is not None and int(found[3]) == size
        seen += int(found[2])
    assert seen == 2 * 1797
    state = json.loads((tmp_path / "state.json").read_text())
    assert (state["epoch"], state["visited"]) == (2, 0)


def test_the_example_writes_its_files_again_if_it_was_killed_while_writing(tmp_path: Path) -> None:
    require_imports_of(EXAMPLE)
    options = ["--folder", str(tmp_path / "digits"), "--state", str(tmp_path / "state.json"), "--steps", "1"]
    killed = programs.run([sys.executable, "-c", KILLED, str(EXAMPLE), *options])
    assert killed.returncode == 9, killed.stderr
    done = programs.run([sys.executable, str(EXAMPLE), *options])
    assert done.returncode == 0, done.stderr
    assert pq.read_table(tmp_path / "digits").num_rows == 1797


def test_data_is_read_where_spark_is_not_installed(tmp_path: Path) -> None:
    require("torch")
    rows = write_rows(tmp_path / "data", RAGGED["ragged"])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SPARK + READ, str(tmp_path / "data"), str(rows)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.stdout == "True\n", done.stderr
