"""The examples do what they say, on two ranks."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from system.launched import farandole

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))

# How the programs are run; those that are not named here, as they are.
RUNS = {
    "data_parquet.py": [],  # test_data_programs
    "horovod_unchanged.py": [],  # test_compat_programs
    "torch_ddp.py": [],  # test_torch_distributed
    "torch_digits.py": [],  # test_training_equality
    "torch_resume.py": [],  # below
    "torch_mixed_precision.py": ["--epochs 3", "--epochs 3 --dtype float16"],
    "torch_accumulation.py": ["--epochs 5"],
    "torch_join.py": ["--epochs 3"],
    "torch_sparse_embeddings.py": ["--steps 100"],
}
ALL = [(program, options) for program in PROGRAMS for options in RUNS.get(program, [""])]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def run(program: str, *options: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run an example on two ranks, in an empty folder."""
    return farandole("run", "-np", "2", sys.executable, str(EXAMPLES / program), *options, cwd=cwd, timeout=200)


@pytest.mark.parametrize(("program", "options"), ALL)
def test_it_learns(program: str, options: str, tmp_path: Path) -> None:
    done = run(program, *options.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    # Each says in the end what it has reached.
    *_, accuracy = re.findall(r"accuracy[^:\n]*: ([0-9.]+)", done.stdout)
    assert float(accuracy) > 0.8


def test_a_job_that_resumes_ends_as_if_it_had_not_been_killed(tmp_path: Path) -> None:
    killed = run("torch_resume.py", "--folder", "killed", "--epochs", "3", "--kill-in-epoch", "1", cwd=tmp_path)
    assert killed.returncode == 128 + signal.SIGKILL
    assert "PeerLost" in killed.stderr and "epoch 0: saved" in killed.stdout and "epoch 1" not in killed.stdout
    resumed = run("torch_resume.py", "--folder", "killed", "--epochs", "3", cwd=tmp_path)
    assert "epoch 0" not in resumed.stdout and "epoch 1: saved" in resumed.stdout, resumed.stderr
    whole = run("torch_resume.py", "--folder", "whole", "--epochs", "3", cwd=tmp_path)
    assert "epoch 0: saved" in whole.stdout, whole.stderr
    ends = [torch.load(tmp_path / folder / "checkpoint.pt") for folder in ("killed", "whole")]
    assert ends[0]["epoch"] == ends[1]["epoch"] == 2
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


def test_the_index_has_each_example() -> None:
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == PROGRAMS
