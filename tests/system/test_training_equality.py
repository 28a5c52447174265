"""Ranks that train together end where one process ends that takes all their batches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.installed import require_imports_of
from system.launched import farandole

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_digits.py"
BATCH, RATE = 96, 0.06  # of all ranks together

# Each rank imports torch and scikit-learn.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def train(folder: Path, size: int, *, launched: bool = True) -> dict[str, object]:
    file = folder / "losses.json"
    options = ["--epochs", "2", "--batch-size", str(BATCH // size), "--lr", str(RATE / size), "--loss-file", str(file)]
    if launched:
        done = farandole(
            "run", "-np", str(size), sys.executable, str(EXAMPLE), *options, timeout=150, framework="torch"
        )
    else:
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), *options], capture_output=True, text=True, timeout=150, check=False
        )
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(file.read_text())
    return result


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Return the result of one process that no launcher has started."""
    require_imports_of(EXAMPLE)
    return train(tmp_path_factory.mktemp("alone"), 1, launched=False)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_losses_do_not_depend_on_the_number_of_ranks(tmp_path: Path, size: int, alone: dict[str, object]) -> None:
    together = train(tmp_path, size)
    assert len(together["losses"]) == 2 * (1500 // BATCH)
    assert together["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert together["losses"][-1] < 0.8 * together["losses"][0]
    assert together["accuracy"] == pytest.approx(alone["accuracy"], abs=0.01)
