"""Real launchers of other projects: several processes of one are refused, a single one is a job of one rank."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from system.launched import command

PROGRAM = """
import sys
import {module} as hvd
hvd.init()
sys.stdout.write(f"rank {{hvd.rank()}} of {{hvd.size()}}\\n")
"""
# As root, and with more processes than cores; Open MPI refuses both unless asked.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def open_mpi() -> str | None:
    return shutil.which("mpirun.openmpi")


def mpich() -> str | None:
    """PyPI's MPICH, in the extra `bench`, or the distribution's."""
    return shutil.which("mpiexec.hydra", path=f"{Path(sys.prefix, 'bin')}:{os.environ['PATH']}")


@pytest.fixture(params=[open_mpi, mpich], ids=["Open MPI", "MPICH"])
def mpirun(request: pytest.FixtureRequest) -> str:
    found: str | None = request.param()
    if found is None:
        pytest.skip(f"{request.param.__name__} is not installed (apt-get install openmpi-bin mpich)")
    return found


def start(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, env={**os.environ, **OPEN_MPI, **(env or {})}, capture_output=True, text=True, timeout=150, check=False
    )


def program(module: str = "farandole.numpy") -> Sequence[str]:
    return sys.executable, "-c", PROGRAM.format(module=module)


@pytest.mark.parametrize("module", ["farandole.numpy", "farandole.torch"])
def test_several_processes_are_refused(mpirun: str, module: str) -> None:
    pytest.importorskip(module.removeprefix("farandole."))
    done = start(mpirun, "-n", "2", *program(module))
    assert done.returncode != 0
    assert "rank 0 of" not in done.stdout
    assert "started 2 processes. farandole cannot connect them" in done.stderr
    assert "farandole run -np 2 python train.py" in done.stderr


def test_horovods_name_is_refused_too(mpirun: str) -> None:
    pytest.importorskip("torch")
    done = start(
        mpirun, "-n", "2", sys.executable, "-m", "farandole.compat", "-c", PROGRAM.format(module="horovod.torch")
    )
    assert done.returncode != 0
    assert "rank 0 of" not in done.stdout
    assert "started 2 processes. farandole cannot connect them" in done.stderr


def test_a_single_process_is_met(mpirun: str) -> None:
    done = start(mpirun, "-n", "1", *program())
    assert (done.returncode, done.stdout) == (0, "rank 0 of 1\n"), done.stderr


def test_our_launcher_below_a_single_process(mpirun: str) -> None:
    done = start(mpirun, "-n", "1", *command("run", "-np", "2", *program()))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]
    assert "a job of its own" not in done.stderr


def test_our_launcher_below_several_says_that_the_jobs_are_separate(mpirun: str) -> None:
    done = start(mpirun, "-n", "2", *command("run", "-np", "2", *program()))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == 2 * ["[0] rank 0 of 2"] + 2 * ["[1] rank 1 of 2"]
    assert done.stderr.count("started 2 processes; each of them starts a job of its own") == 2


@pytest.mark.parametrize("size", [1, 2])
def test_several_processes_of_one_rank_are_refused(mpirun: str, size: int) -> None:
    done = start(*command("run", "-np", str(size), mpirun, "-n", "2", *program()))
    assert done.returncode != 0
    assert "rank 0 of" not in done.stdout
    assert "started 2 processes. farandole cannot connect them" in done.stdout + done.stderr


def test_a_batch_script_of_slurm_runs_our_launcher() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    done = start(*command("run", "-np", "2", *program()), env=slurm)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]


def test_tasks_of_srun_are_refused() -> None:
    done = start(*program(), env={"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"})
    assert done.returncode != 0
    assert "SLURM_STEP_NUM_TASKS: is 2: srun started 2 processes" in done.stderr


NESTED = """
import os, subprocess, sys
import farandole, farandole.numpy as hvd
def place():
    hvd.init()
    return hvd.rank(), hvd.size()
if __name__ == "__main__":
    hvd.init()
    inner = farandole.run(place, num_proc=2) if hvd.rank() == 0 else []
    sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()}: {inner}\\n")
"""


def test_a_rank_that_starts_ranks(tmp_path: Path) -> None:
    (tmp_path / "nested.py").write_text(NESTED)
    done = start(*command("run", "-np", "2", sys.executable, str(tmp_path / "nested.py")))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] rank 0 of 2: [(0, 2), (1, 2)]", "[1] rank 1 of 2: []"]
