"""The demo as a newcomer runs it, but for the import of PyTorch, which its processes have."""

import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("torch")
pytest.importorskip("sklearn")
if importlib.util.find_spec("farandole._native") is None:
    pytest.skip("the native core is not built", allow_module_level=True)

from helpers.programs import run, warm_spark

pytestmark = pytest.mark.spark

ROOT = Path(__file__).parents[3]
LIMIT = 180  # seconds; what the demo may take on two cores


@pytest.mark.timeout(LIMIT + 20)
def test_the_demo_trains_twice_and_says_where_things_are(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    command = [sys.executable, "-m", "examples.demo", "--quick", "--out", str(folder)]
    done = run(command, cwd=ROOT, env={**os.environ, **warm_spark("torch")}, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    out = done.stdout
    for name in ("HorovodRunner", "TorchEstimator"):
        (accuracy,) = re.findall(rf"^{name} +([\d.]+) +[\d.]+$", out, re.MULTILINE)
        assert float(accuracy) > 0.95
    for rank in (0, 1):
        assert re.search(rf"^\[{rank}\] epoch 1/8 step 22/22 loss [\d.]+ [\d,]+ rows/s", out, re.MULTILINE)
    assert "[1] 718 rows, 22 steps per epoch" in out  # a rank's own output
    for file in ("runner/checkpoint.pt", "runs/estimator/checkpoint", "timeline.json"):
        assert str(folder / file) in out
        assert (folder / file).stat().st_size > 0
    (logs,) = re.findall(r"tensorboard --logdir (.*)", out)
    assert shlex.split(logs) == [str(folder)]
    assert len(list(folder.rglob("*tfevents*"))) == 2
    noise = [line for line in (out + done.stderr).splitlines() if re.match(r"\s+at [\w.$]+\(|.*(WARN|Exception)", line)]
    assert noise == []
