"""Real launchers of other projects: their processes meet, a single one is a job of one rank, mixtures are refused."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from farandole.compat.as_horovod import install
from helpers.mpi_sites import SITES, SURROUNDINGS
from system.launched import command

PROGRAM = """
import sys
import {module} as hvd
hvd.init()
sys.stdout.write(f"rank {{hvd.rank()}} of {{hvd.size()}}\\n")
"""
# Meets twice, as a notebook's cell that runs again does.
MEET_TWICE = """
import sys
import numpy, farandole.numpy as hvd
for _ in range(2):
    hvd.init()
    total = hvd.allreduce(numpy.arange(2.0) + hvd.rank(), op=hvd.Sum).tolist()
    sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()}, {hvd.local_rank()} here: {total}\\n")
    sys.stdout.flush()
    hvd.shutdown()
"""
FAIL = """
import farandole.numpy as hvd
hvd.init()
if hvd.rank() == 1:
    raise LookupError("no such thing")
hvd.barrier()
"""


def open_mpi() -> str | None:
    return shutil.which("mpirun.openmpi")


def mpich() -> str | None:
    """PyPI's MPICH, in the extra `bench`, or the distribution's."""
    return shutil.which("mpiexec.hydra", path=f"{Path(sys.prefix, 'bin')}:{os.environ['PATH']}")


@pytest.fixture(params=[name for name in SITES if "standard ABI" not in name])
def mpirun(request: pytest.FixtureRequest) -> str:
    return SITES[request.param]().program


def start(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        env={**os.environ, **SURROUNDINGS, **(env or {})},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def program(module: str = "farandole.numpy") -> Sequence[str]:
    return sys.executable, "-c", PROGRAM.format(module=module)


def lines_of(size: int) -> list[str]:
    total = [float(sum(range(size))), float(sum(range(size)) + size)]
    return sorted(2 * [f"rank {rank} of {size}, {rank} here: {total}" for rank in range(size)])


def test_processes_of_mpirun_meet(mpirun: str) -> None:
    """A shell between launcher and program hides neither."""
    done = start(mpirun, "-n", "2", "sh", "-c", f"{sys.executable} -c '{MEET_TWICE}'; exit $?")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == lines_of(2)


def test_a_rank_of_mpirun_that_fails_ends_the_others(mpirun: str) -> None:
    done = start(mpirun, "-n", "2", sys.executable, "-c", FAIL)
    assert done.returncode != 0
    assert "LookupError: no such thing" in done.stderr


def test_programs_of_horovod_meet_below_mpirun(mpirun: str) -> None:
    pytest.importorskip("torch")
    program = PROGRAM.format(module="horovod.torch")
    done = start(mpirun, "-n", "2", sys.executable, "-m", "farandole.compat", "-c", program)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def test_programs_of_horovod_meet_where_as_horovod_is_installed(mpirun: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    install(tmp_path, ["horovod"])
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = start(mpirun, "-n", "2", *program("horovod.torch"), env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.skipif(open_mpi() is None or mpich() is None, reason="Open MPI or MPICH is not installed")
def test_a_library_of_another_mpi_is_refused() -> None:
    """Open MPI's library below MPICH's launcher sees each process alone."""
    done = start(str(mpich()), "-n", "2", *program(), env={"FARANDOLE_MPI_LIBRARY": "libmpi.so.40"})
    assert done.returncode != 0
    assert "rank 0 of" not in done.stdout
    assert (
        "PMI_SIZE: is 2: mpiexec of MPICH or Intel MPI started 2 processes, but libmpi.so.40 (Open MPI) sees only 1"
        in (done.stderr)
    )


def test_a_library_that_is_not_there_is_refused(mpirun: str) -> None:
    done = start(mpirun, "-n", "2", *program(), env={"FARANDOLE_MPI_LIBRARY": "/nowhere/libmpi.so"})
    assert done.returncode != 0
    assert "mpi_library: /nowhere/libmpi.so cannot be loaded" in done.stderr


def test_processes_below_torchs_variables_alone_meet() -> None:
    """As the training operator of Kubernetes starts them: rank 0 serves torch's store meanwhile."""
    pytest.importorskip("torch")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    assert start_together([{**env, "RANK": str(rank)} for rank in range(2)]) == lines_of(2)


def test_tasks_of_srun_meet(tmp_path: Path) -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "HOME": str(tmp_path)}
    assert start_together([{**env, "SLURM_PROCID": str(rank)} for rank in range(2)]) == lines_of(2)
    assert list((tmp_path / ".farandole").iterdir()) == []


def start_together(envs: Sequence[Mapping[str, str]]) -> list[str]:
    """Run MEET_TWICE once with each environment, at the same time; return the sorted lines of all."""
    with ThreadPoolExecutor(len(envs)) as pool:
        runs = [pool.submit(start, sys.executable, "-c", MEET_TWICE, env=dict(env)) for env in envs]
    for each in runs:
        assert each.result().returncode == 0, each.result().stderr
    return sorted(line for each in runs for line in each.result().stdout.splitlines())


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


@pytest.fixture
def site(mpirun: str, tmp_path: Path) -> dict[str, str]:
    """Variables of a site whose `mpirun` this one is, and whose programs write whole lines."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "mpirun").write_text(f'#!/bin/sh\nexec {shutil.which(mpirun)} "$@"\n')
    (folder / "mpirun").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONUNBUFFERED": ""}


# Programs pass mpi4py's communicators: the job is that of the communicator, or the sets are.
COMMUNICATORS = """
import sys
import numpy, farandole.numpy as hvd
from mpi4py import MPI
world = MPI.COMM_WORLD
half = world.Split(world.rank % 2, -world.rank)
alone = world.Split(0 if world.rank == 1 else MPI.UNDEFINED)
hvd.init(comm=half)
assert (hvd.rank(), hvd.size()) == (half.rank, 2)
total = hvd.allreduce(numpy.ones(1) * world.rank, op=hvd.Sum)[0]
hvd.shutdown()
some = hvd.ProcessSet(half)
hvd.init(comm=world, process_sets=[some])
hvd.init(comm=world)
assert (hvd.rank(), hvd.size(), some.mpi_comm) == (world.rank, 4, half)
assert some.ranks == [world.rank % 2, world.rank % 2 + 2]
one = hvd.add_process_set(alone)
assert (one.ranks, one.included()) == ([1], world.rank == 1)
again = hvd.allreduce(numpy.ones(1) * world.rank, op=hvd.Sum, process_set=some)[0]
sys.stdout.write(f"rank {hvd.rank()}: {total} {again}\\n")
"""


def test_communicators_of_mpi4py() -> None:
    pytest.importorskip("mpi4py")
    open_mpi = {"MPI4PY_MPIABI": "openmpi"}  # also where MPICH is installed beside it
    done = SITES["Open MPI"]().run(4, sys.executable, "-c", COMMUNICATORS, env=open_mpi)
    assert done.returncode == 0, done.stderr
    totals = [2.0, 4.0, 2.0, 4.0]  # of ranks 0 and 2, or 1 and 3
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}: {each} {each}" for rank, each in enumerate(totals)]


SETTINGS = """
import os
import horovod.torch as hvd
hvd.init()
assert hvd.mpi_built() and hvd.mpi_threads_supported()
print("rank", hvd.rank(), "of", f"{hvd.size()}:", os.environ["FARANDOLE_CACHE_CAPACITY"], os.environ["MINE"])
"""


def test_horovodrun_starts_ranks_by_mpirun(site: dict[str, str]) -> None:
    """Each line says which rank wrote it, in the way of the site's mpirun."""
    pytest.importorskip("torch")
    words = [sys.executable, "-m", "farandole.compat.horovodrun", "--mpi", "-np", "2", "-H", "localhost:2"]
    done = start(*words, "--cache-capacity", "9", sys.executable, "-c", SETTINGS, env={**site, "MINE": "a b"})
    assert done.returncode == 0, done.stderr
    lines = sorted(line.rpartition("rank ")[1:] for line in done.stdout.splitlines() if "rank" in line)
    assert lines == [("rank ", f"{rank} of 2: 9 a b") for rank in range(2)], done.stdout
    assert not any(line.startswith("rank") for line in done.stdout.splitlines())


CALL = """
import horovod

def place(base):
    import numpy, farandole.numpy as hvd
    hvd.init()
    if base is None and hvd.rank() == 1:
        raise LookupError("no such thing")
    return hvd.rank(), base + float(hvd.allreduce(numpy.ones(1), op=hvd.Sum)[0])

assert horovod.run(place, (5,), num_proc=2, use_mpi=True) == [(0, 7.0), (1, 7.0)]
try:
    horovod.run(place, (None,), num_proc=2, use_mpi=True)
except RuntimeError as error:
    assert isinstance(error.__cause__, LookupError), error
    print("rank 1" in str(error))
"""


def test_a_function_is_called_on_ranks_that_mpirun_starts(site: dict[str, str]) -> None:
    pytest.importorskip("cloudpickle")
    done = start(sys.executable, "-m", "farandole.compat", "-c", CALL, env=site)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "True", done.stdout + done.stderr


def test_a_rank_that_fails_is_told_by_mpiruns_exit_code(site: dict[str, str]) -> None:
    done = start(*command("run", "--mpi", "-np", "2", sys.executable, "-c", FAIL), env=site)
    assert done.returncode != 0
    assert "LookupError: no such thing" in done.stdout + done.stderr


def test_tensors_go_over_the_mpi_that_starts_the_ranks(site: dict[str, str]) -> None:
    program = f"{PROGRAM.format(module='farandole.numpy')}assert hvd.mpi_enabled()\n"
    done = start(*command("run", "--mpi", "--fabric", "mpi", "-np", "2", sys.executable, "-c", program), env=site)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of 2") == 2


@pytest.mark.parametrize("size", [1, 2])
def test_several_processes_of_one_rank_are_refused(mpirun: str, size: int) -> None:
    done = start(*command("run", "-np", str(size), mpirun, "-n", "2", *program()))
    assert done.returncode != 0
    assert "rank 0 of" not in done.stdout
    assert "started 2 processes, which cannot meet here" in done.stdout + done.stderr


def test_a_batch_script_of_slurm_runs_our_launcher() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    done = start(*command("run", "-np", "2", *program()), env=slurm)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]


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
