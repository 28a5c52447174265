"""Samples of docs/guide/data.md, run by two ranks on data as small as the digits of scikit-learn."""

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")
pytest.importorskip("torch")

import pyarrow as pa

import farandole.torch as hvd
from farandole.core.context import Context
from helpers.datasets import write_rows
from helpers.ranks import run_ranks

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "data.md"
ROWS, EPOCHS = 1797, 10


def digits(first: int, rows: int) -> pa.Table:
    numbers = np.arange(first, first + rows)
    pixels = pa.array([[float(number)] * 64 for number in numbers], pa.list_(pa.float32()))
    return pa.table({"pixels": pixels, "label": numbers % 10})


def sample(start: str) -> str:
    """Return the guide's block that has `start`, on files below `url`, with steps that are collective."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if start in block]
    block = block.replace('"train/"', "url")
    assert re.search(r"\burl\b", block)
    step = "seen.append(len(batch['label'])); hvd.allreduce(batch['label'].float().sum(), name='loss')"
    assert block.count("...\n") == 1
    return block.replace("hvd.init()\n", "").replace("...\n", f"{step}\n")


@pytest.mark.parametrize("layout", [[[ROWS]], [[300] * 5 + [297]], [[599]] * 3], ids=["one group", "six", "3 files"])
@pytest.mark.parametrize("start", ["Loader(\n    ParquetSource(", "make_batch_reader("])
def test_samples_run_on_two_ranks(tmp_path: Path, start: str, layout: list[list[int]]) -> None:
    write_rows(tmp_path, layout, digits)
    program = sample(start)

    def body(context: Context) -> list[int]:
        seen: list[int] = []
        exec(program, {"hvd": hvd, "seen": seen, "url": str(tmp_path)})
        return seen

    shares = run_ranks(2, body)
    assert len(shares[0]) == len(shares[1])
    assert abs(sum(shares[0]) - sum(shares[1])) <= EPOCHS
    lost = 0 if "Loader" in start else EPOCHS * (ROWS % 200)
    assert sum(map(sum, shares)) == EPOCHS * ROWS - lost
