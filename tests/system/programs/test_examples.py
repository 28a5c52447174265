"""The examples do what they say, on two ranks."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import programs
from helpers.installed import require, require_imports_of
from system.launched import farandole

EXAMPLES = Path(__file__).parents[3] / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("mxnet"))

# How the programs are run; those that are not named here, as they are.
RUNS = {
    "data_parquet.py": [],  # test_data_programs
    "horovod_unchanged.py": [],  # test_compat_programs
    "keras_digits.py": ["--epochs 4"],
    "spark_horovod_estimator.py": [],  # test_spark_model_fn
    "tensorflow_embeddings.py": ["--steps 200"],
    "tensorflow_tape.py": ["--steps 150"],
    "tensorflow_v1_session.py": [],  # below
    "torch_ddp.py": [],  # test_torch_distributed
    "torch_digits.py": [],  # test_training_equality
    "torch_resume.py": [],  # below
    "torch_mixed_precision.py": ["--epochs 3", "--epochs 3 --dtype float16"],
    "torch_accumulation.py": ["--epochs 5"],
    "torch_join.py": ["--epochs 3"],
    "torch_sparse_embeddings.py": ["--steps 300"],
}
ALL = [(program, options) for program in PROGRAMS for options in RUNS.get(program, [""])]

pytestmark = pytest.mark.timeout(400)


def framework_of(program: str) -> str:
    return "torch" if "torch" in program else "tensorflow"


def run(program: str, *options: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run an example on two ranks, in an empty folder."""
    command = ["run", "-np", "2", sys.executable, str(EXAMPLES / program), *options]
    return farandole(*command, cwd=cwd, timeout=200, framework=framework_of(program))


def accuracies(output: str) -> list[float]:
    """What a program says that it has reached: in the end for training, and once on each rank that says so."""
    return [float(each) for each in re.findall(r"accuracy[^:\n]*: ([0-9.]+)", output)]


@pytest.mark.parametrize(("program", "options"), ALL)
def test_it_learns(program: str, options: str, tmp_path: Path) -> None:
    require_imports_of(EXAMPLES / program)
    done = run(program, *options.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert accuracies(done.stdout)[-1] > 0.8


def test_a_job_that_resumes_ends_as_if_it_had_not_been_killed(tmp_path: Path) -> None:
    require_imports_of(EXAMPLES / "torch_resume.py")
    import torch

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


def test_a_program_of_tensorflow_1_runs_unchanged(tmp_path: Path) -> None:
    require_imports_of(EXAMPLES / "tensorflow_v1_session.py")
    program = [sys.executable, str(EXAMPLES / "tensorflow_v1_session.py"), "--steps", "200", "--checkpoint-dir", "kept"]
    command = [sys.executable, "-m", "farandole.compat.horovodrun", "-np", "2", *program]

    def train() -> "subprocess.CompletedProcess[str]":
        return programs.run(command, framework="tensorflow", cwd=tmp_path, timeout=200)

    done = train()
    assert done.returncode == 0, done.stderr
    one, other = accuracies(done.stdout)
    assert one == other > 0.8
    assert (tmp_path / "kept" / "model.ckpt-100.index").exists()  # of 200 steps each rank makes half
    # The checkpoint of rank 0 says that nothing is left to do, and no rank waits for another.
    assert train().returncode == 0


@pytest.mark.spark
def test_a_program_of_tensorflow_1_runs_in_tasks_of_spark(tmp_path: Path) -> None:
    require("pyspark")
    require_imports_of(EXAMPLES / "tensorflow_v1_session.py")
    program = [str(EXAMPLES / "tensorflow_v1_session.py"), "--steps", "200", "--runner", "2"]
    command = [sys.executable, "-m", "farandole.compat", *program]
    environment = {**os.environ, **programs.warm_spark("tensorflow"), "SPARK_CONF_DIR": str(tmp_path)}
    (tmp_path / "spark-defaults.conf").write_text("spark.master local[2]\nspark.ui.enabled false\n")
    done = programs.run(command, framework="tensorflow", cwd=tmp_path, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    (accuracy,) = accuracies(done.stdout)
    assert accuracy > 0.8


def test_the_index_has_each_example() -> None:
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))
