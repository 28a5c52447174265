"""The programs of MXNet learn, on two ranks, unchanged: `make test-mxnet` runs them."""

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from helpers.installed import require
from system.launched import farandole

require("mxnet")

EXAMPLES = Path(__file__).parents[3] / "examples"

pytestmark = pytest.mark.timeout(200)


@pytest.mark.skipif(version("mxnet") >= "2", reason="they are programs of MXNet 1")
@pytest.mark.parametrize(
    "words",
    [
        "mxnet_gluon.py",
        "mxnet_gluon.py --fp16-allreduce --gradient-predivide-factor 2",
        "mxnet_module.py --num-groups 1",
        "mxnet_images.py --fp16-allreduce",
    ],
)
def test_it_learns(words: str, tmp_path: Path) -> None:
    program, *options = words.split()
    command = [sys.executable, "-m", "farandole.compat", str(EXAMPLES / program), *options]
    done = farandole("run", "-np", "2", *command, cwd=tmp_path, timeout=150)
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"accuracy: ([0-9.]+)", done.stdout)[-1]) > 0.9
