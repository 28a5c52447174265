"""A program written for Horovod, unchanged: by every way to start it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.compat.answers import IMPORTABLE
from helpers.programs import run
from system.launched import farandole

pytest.importorskip("torch")

# Each rank imports torch.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "horovod_unchanged.py"


def horovodrun(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "farandole.compat.horovodrun", *words]
    return run(command, cwd=cwd)


def epochs(output: str) -> dict[int, tuple[float, float]]:
    """Loss and accuracy by epoch, of the one rank that prints them."""
    line = r"^\[0\](?:<stdout>:| )Epoch: (\d+) average loss: ([\d.]+), accuracy: ([\d.]+)%$"
    found = re.findall(line, output, re.MULTILINE)
    assert len(found) == len(output.splitlines()), output
    return {int(epoch): (float(loss), float(accuracy)) for epoch, loss, accuracy in found}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, tuple[float, float]]]:
    """Two epochs under `horovodrun`."""
    folder = tmp_path_factory.mktemp("trained")
    done = horovodrun("-np", "2", sys.executable, str(EXAMPLE), "--epochs", "2", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return folder, epochs(done.stdout)


def test_horovodrun(trained: tuple[Path, dict[int, tuple[float, float]]]) -> None:
    folder, seen = trained
    assert list(seen) == [0, 1]
    assert seen[1][0] < seen[0][0] and seen[1][1] > 90
    assert sorted(each.name for each in folder.iterdir()) == ["checkpoint-1.pth.tar", "checkpoint-2.pth.tar"]


def test_farandole_run_gives_the_same_and_goes_on_from_the_checkpoint(
    trained: tuple[Path, dict[int, tuple[float, float]]], tmp_path: Path
) -> None:
    def run(last: int) -> dict[int, tuple[float, float]]:
        options = ["--epochs", str(last), "--checkpoint-format", str(tmp_path / "{epoch}")]
        program = [sys.executable, "-m", "farandole.compat", str(EXAMPLE), *options]
        done = farandole("run", "-np", "2", *program, framework="torch")
        assert (done.returncode, done.stderr) == (0, "")
        return epochs(done.stdout)

    assert run(1) == {0: trained[1][0]}
    # The second epoch begins with the first one's weights and momentum, so that it is the one of a single run.
    assert run(2) == {1: trained[1][1]}


def test_with_compression(tmp_path: Path) -> None:
    options = ("--epochs", "2", "--fp16-allreduce", "--gradient-predivide-factor", "2.0")
    done = horovodrun("-np", "3", sys.executable, str(EXAMPLE), *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert epochs(done.stdout)[1][1] > 90


RUNNING = """
import horovod
import horovod.torch as at_the_top


def train(factor, more=0):
    import os
    import torch
    import horovod.torch as hvd

    hvd.init()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} & os.environ.keys()
    places = [int(os.environ[f"HOROVOD_{name}"]) for name in
              ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")]
    total = at_the_top.allreduce(torch.tensor(float(factor * hvd.rank() + more)), op=hvd.Sum, name="total")
    return places, total.item()


if __name__ == "__main__":
    print(horovod.run(train, args=(10,), kwargs={"more": 1}, np=2))
"""


def test_horovod_run(tmp_path: Path) -> None:
    program = tmp_path / "running.py"
    program.write_text(RUNNING)
    command = [sys.executable, "-W", "ignore", "-m", "farandole.compat", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout.replace("(", "[").replace(")", "]")) == [
        [[0, 2, 0, 2, 0, 1], 12.0],
        [[1, 2, 1, 2, 0, 1], 12.0],
    ]


def test_horovod_run_after_install_alone(tmp_path: Path) -> None:
    """Its ranks take the path over from this process, and find the answers there."""
    program = tmp_path / "running.py"
    program.write_text(f"import farandole.compat\nfarandole.compat.install()\n{RUNNING}")
    done = subprocess.run([sys.executable, "-W", "ignore", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "[1, 2, 1, 2, 0, 1]" in done.stdout


FAILING = """
import horovod.torch as hvd
import torch

hvd.init()
if hvd.rank() == 1:
    raise ValueError("bad luck")
try:
    hvd.allreduce(torch.ones(1), name="w")
except hvd.HorovodInternalError as error:
    assert str(error).startswith("Horovod has been shut down.")
    raise
"""


def test_the_rank_that_failed_is_reported(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    done = horovodrun("-np", "2", sys.executable, "failing.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "rank 1 failed" in done.stderr
    assert "ValueError: bad luck" in done.stderr


def test_horovodruns_ranks_do_not_touch_a_real_horovod_in_their_way(tmp_path: Path) -> None:
    (tmp_path / "site" / "horovod").mkdir(parents=True)
    (tmp_path / "site" / "horovod" / "__init__.py").write_text("raise ImportError('built for another torch')")
    (tmp_path / "program.py").write_text("import horovod\nprint(horovod.__version__)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-m", "farandole.compat.horovodrun", "-np", "1", sys.executable, "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
    assert done.returncode == 0
    assert done.stdout == "[0]<stdout>:0.28.1\n"  # no ImportError of the other
    assert "horovod is installed" in done.stderr and "but hidden" in done.stderr
    assert IMPORTABLE.is_dir()
