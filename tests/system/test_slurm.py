"""A real Slurm of two nodes on this machine: programs below srun; `farandole run` and mpirun in an allocation."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.marked import wait_until_gone
from helpers.mpi_sites import INSTALLED, SURROUNDINGS
from helpers.slurm import NODES, problem_of_slurm, slurm
from system.elastic_training import training
from system.launched import parent_of

pytestmark = [
    pytest.mark.native,
    pytest.mark.slow,
    pytest.mark.timeout(300),  # Slurm's daemons wait for each other on a busy machine
    pytest.mark.skipif(bool(problem_of_slurm()), reason=f"a Slurm {problem_of_slurm()}"),
]

PROGRAM = """
import os, sys
import numpy, farandole.numpy as hvd
hvd.init()
total = hvd.allreduce(numpy.arange(2.0) + hvd.rank(), op=hvd.Sum).tolist()
sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()}: {total}\\n")
"""
# The node of this rank: its agent is a task of srun, the rank has the launcher's environment.
NODE = """
process, found = os.getpid(), ""
while process > 1 and not found:
    words = open(f"/proc/{process}/environ").read().split("\\0")
    found = next((word for word in words if word.startswith("SLURMD_NODENAME=")), "")
    process = int(open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[1])
sys.stdout.write(f"rank {hvd.rank()} is at {found}\\n")
"""
FARANDOLE = [sys.executable, "-m", "farandole.launch.cli"]


FOUR_TASKS = ["salloc", "--quiet", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]


@dataclass(frozen=True)
class Allocation:
    """A site's environment, and what its mpirun needs where two nodes are one machine."""

    env: Mapping[str, str]
    arguments: str


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    with slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def start(cluster: Mapping[str, str], *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    env = {**cluster, **variables}
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=240, check=False)


def steps_on(node: str) -> list[int]:
    """Return the processes of srun that wait for a step on `node`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            words = entry.read_bytes().split(b"\0")
            if words[0].endswith(b"srun") and f"--nodelist={node}".encode() in words:
                found.append(int(entry.parent.name))
    return found


def lines_of(size: int) -> list[str]:
    total = [float(sum(range(size))), float(sum(range(size)) + size)]
    return [f"rank {rank} of {size}: {total}" for rank in range(size)]


@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_tasks_of_srun_meet(cluster: Mapping[str, str], tmp_path: Path, mpi: str) -> None:
    words = ["srun", "--nodes=2", "--ntasks=3", f"--mpi={mpi}", sys.executable, "-c", PROGRAM]
    done = start(cluster, *words, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == lines_of(3)
    assert list((tmp_path / ".farandole").iterdir()) == []


def test_ranks_fill_the_nodes_of_an_allocation(cluster: Mapping[str, str]) -> None:
    mark = uuid.uuid4().hex
    words = [*FOUR_TASKS, *FARANDOLE, "run", "-np", "4"]
    done = start(cluster, *words, sys.executable, "-c", PROGRAM + NODE, MARK=mark)
    assert done.returncode == 0, done.stderr
    lines = sorted(line[4:] for line in done.stdout.splitlines())  # without "[0] "
    nodes = [f"rank {rank} is at SLURMD_NODENAME={NODES[rank // 2]}" for rank in range(4)]
    assert lines == sorted([*lines_of(4), *nodes])
    assert wait_until_gone(mark, 10.0) == []


def test_more_ranks_than_the_allocation_has_tasks_are_refused(cluster: Mapping[str, str]) -> None:
    done = start(cluster, "salloc", "--quiet", "--nodes=2", *FARANDOLE, "run", "-np", "3", "true")
    assert done.returncode == 2
    assert f"3 ranks need 3 slots, but {NODES[0]}:1, {NODES[1]}:1 has 2" in done.stderr


def test_a_rank_that_fails_on_a_node_ends_the_others(cluster: Mapping[str, str]) -> None:
    mark = uuid.uuid4().hex
    fails = "import time, farandole.numpy as hvd; hvd.init(); hvd.rank() == 1 and exit(7); time.sleep(100)"
    words = ["salloc", "--quiet", "--nodes=2", *FARANDOLE, "run", "-np", "2", sys.executable, "-c", fails]
    done = start(cluster, *words, MARK=mark)
    assert done.returncode == 7, done.stderr
    assert "rank 1 failed: exited with code 7" in done.stderr
    assert wait_until_gone(mark, 10.0) == []


def test_an_elastic_job_goes_on_when_a_node_is_lost(cluster: Mapping[str, str], tmp_path: Path) -> None:
    """The node's step is lost with all of its processes; the job takes the node in again once srun reaches it."""
    run = [*FOUR_TASKS, *FARANDOLE, "run", "--verbose"]
    with training(tmp_path, "-np", "4", "--min-np", "2", "--max-np", "4", run=run, env=cluster) as job:
        job.wait(lambda: len(job.pids()) == 4 and 4 in job.sizes(), "the ranks of both nodes train")
        before = job.pids()
        agent = parent_of(parent_of(before[3]))
        assert agent == parent_of(parent_of(before[2]))
        since = len(job.output)
        os.kill(parent_of(agent), signal.SIGKILL)  # the node's end of the step
        job.wait(lambda: 2 in job.sizes(since), "the other node's ranks go on")
        for process in steps_on(NODES[1]):  # which Slurm ends once it knows of the node's loss
            os.kill(process, signal.SIGKILL)
        job.wait(lambda: 4 in job.sizes(since), "the node is back")
        assert {before[0], before[1]} <= set(job.finish())


# A function on each rank gives its place.
PLACES = """
import sys
import horovod

def place():
    import os
    import farandole.numpy as hvd
    hvd.init()
    return hvd.rank(), hvd.size(), os.environ["SLURMD_NODENAME"]

if __name__ == "__main__":
    print(horovod.run(place, num_proc=4, use_mpi=True, mpi_args=sys.argv[1]))
"""
# Both nodes are this machine: Open MPI's files in shared memory would clash.
NO_SHARED_MEMORY = {"Open MPI": "--mca btl self,tcp", "MPICH": ""}


@pytest.fixture(params=INSTALLED)
def allocation(request: pytest.FixtureRequest, cluster: Mapping[str, str], tmp_path: Path) -> Allocation:
    """An allocation of a site whose `mpirun` is that of one MPI."""
    program = shutil.which(INSTALLED[request.param]().program)
    (tmp_path / "mpirun").write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    env = {**cluster, **SURROUNDINGS, "PATH": f"{tmp_path}:{cluster['PATH']}"}
    return Allocation(env, NO_SHARED_MEMORY[request.param])


def test_mpirun_starts_ranks_on_the_nodes_of_an_allocation(allocation: Allocation) -> None:
    """It finds the nodes itself, as below Horovod's command; nothing of its ranks stays."""
    mark = uuid.uuid4().hex
    words = [*FARANDOLE, "run", "--mpi", "-np", "4", f"--mpi-args={allocation.arguments}", sys.executable, "-c"]
    done = start(allocation.env, *FOUR_TASKS, *words, PROGRAM + NODE, MARK=mark)
    assert done.returncode == 0, done.stderr
    nodes = [f"rank {rank} is at SLURMD_NODENAME={NODES[rank // 2]}" for rank in range(4)]
    lines = [line for line in done.stdout.splitlines() if line]
    assert sorted(re.sub(r"^\[.*?\](<stdout>:)? ?", "", line) for line in lines) == sorted([*lines_of(4), *nodes])
    assert wait_until_gone(mark, 10.0) == []


@pytest.mark.parametrize("allocation", ["MPICH"], indirect=True)
def test_a_function_is_called_by_mpirun_on_the_nodes_of_an_allocation(allocation: Allocation, tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    (tmp_path / "places.py").write_text(PLACES)
    words = [sys.executable, "-m", "farandole.compat", str(tmp_path / "places.py"), allocation.arguments]
    done = start(allocation.env, *FOUR_TASKS, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[(rank, 4, NODES[rank // 2]) for rank in range(4)]}\n"
