"""MPI as the fabric, below Open MPI's mpirun and MPICH's mpiexec: conformance, lost ranks, what is refused.

With FARANDOLE_TEST_MPI=1 also below newer ones and Intel MPI's, and over the standard ABI."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.mpi_sites import INSTALLED, ON_DEMAND, SITES, Launcher
from system.launched import command

TESTS = Path(__file__).parent.parent
FABRIC = {
    "FARANDOLE_FABRIC": "mpi",
    "FARANDOLE_HEARTBEAT": "30",
    "PYTHONPATH": str(TESTS),
    "UCX_TLS": "^cma",  # UCX, below MPICH, ends a process that copies from the memory of a killed one
}
# Ranks of these wait for each other by events of one process.
OF_THREADS = "barrier_before_all_have_come or a_set_that_waits or held_up_in_another or join_ends_when"
FEW = "test_every_dtype_and_op or factors or nothing or groups or every_operation_in_a_set or two_halves or min_and_max"

WHICH_WAY = """
import json, os, sys, numpy
import farandole.numpy as hvd
from farandole.config import Config
hvd.init(config=Config.from_environment(timeline=sys.argv[1]))
for dtype in ("float32", "float16"):
    result = hvd.allreduce(numpy.full(100_000, hvd.rank() + 1, dtype), op=hvd.Sum)
    assert (result == 3).all(), result
hvd.broadcast(numpy.ones(3), 1)
hvd.shutdown()
if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", 0))) == 0:
    text = open(sys.argv[1]).read()
    sys.stdout.write(" ".join(sorted({word for word in ("mpi allreduce", "mpi shares", "shm slots") if word in text})))
"""
# The launcher's own children wait for the ranks: hydra ends all others when a child of its own dies, in milliseconds.
DIE = """
import os, pathlib, signal, sys, threading, time
reports = pathlib.Path(sys.argv[1])
if rank := os.fork():
    os.waitpid(rank, 0)
    (reports / f"process {rank} has ended").touch()
    end = time.monotonic() + 60
    while len(list(reports.glob("process *"))) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    os._exit(0)
import numpy
import farandole.numpy as hvd
from farandole.errors import PeerLost
hvd.init()
tensor = numpy.ones(1 << 23, numpy.float32)
hvd.allreduce_(tensor, name="large")
if hvd.rank() == 1:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()  # within one of the operations
try:
    while True:
        hvd.allreduce_(tensor, name="large")
except PeerLost as error:
    (reports / f"rank {hvd.rank()}: lost {error.rank}").touch()
"""
ALONE = """
import os
os.environ["FARANDOLE_FABRIC"] = "mpi"
import farandole.numpy as hvd
hvd.init()
"""
UNLIKE = """
import os
if "1" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
    del os.environ["FARANDOLE_FABRIC"]
import farandole.numpy as hvd
hvd.init()
"""


@pytest.fixture(params=SITES)
def launcher(request: pytest.FixtureRequest) -> Launcher:
    return SITES[request.param]()


@pytest.fixture(params=INSTALLED)
def installed(request: pytest.FixtureRequest) -> Launcher:
    return INSTALLED[request.param]()


def start(launcher: Launcher, ranks: int, *words: str, limit: float = 170) -> tuple[int, str, str]:
    """Run `words` as `ranks` processes; return the launcher's exit code, output and errors."""
    done = launcher.run(ranks, sys.executable, *words, env=FABRIC, limit=limit)
    return done.returncode, done.stdout, done.stderr


def conform(launcher: Launcher, ranks: int, choice: str, least: int, *, limit: float = 170) -> None:
    """Run the chosen tests of the conformance suite; at least `least` of them must have run, and all succeed."""
    words = [str(TESTS / "helpers" / "mpi_session.py"), str(TESTS / "conformance"), "-k", choice]
    code, out, errors = start(launcher, ranks, *words, limit=limit)
    passed = [int(each) for each in re.findall(r"(\d+) passed", out)]
    assert code == 0, out + errors
    assert len(passed) == ranks
    assert min(passed) >= least, out


def test_conformance_of_numpy(launcher: Launcher) -> None:
    conform(launcher, 2, f"({FEW}) and numpy and not ({OF_THREADS})", 10)


@pytest.mark.skipif(not ON_DEMAND, reason="10 minutes: FARANDOLE_TEST_MPI=1 asks for it")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 3])
def test_conformance_of_all_bindings(installed: Launcher, ranks: int) -> None:
    conform(installed, ranks, f"not ({OF_THREADS})", 150, limit=880)


def test_tensors_go_over_mpi(launcher: Launcher, tmp_path: Path) -> None:
    code, out, errors = start(launcher, 2, "-c", WHICH_WAY, str(tmp_path / "timeline.json"))
    assert code == 0, errors
    assert out == "mpi shares"  # a few ranks of one host send to each other


def test_a_killed_rank_is_named_and_nobody_hangs(launcher: Launcher, tmp_path: Path) -> None:
    _, out, errors = start(launcher, 3, "-c", DIE, str(tmp_path), limit=90)
    # Intel MPI ends a rank that is copying from the memory of the killed one; another rank may notice that first.
    ended = set(re.findall(r"cma_read_nbytes == size[^$]*?Abort\(1\) on node (\d)", out + errors))
    reports = dict(each.name.split(": lost ") for each in tmp_path.glob("rank *"))
    assert reports.keys() | {f"rank {rank}" for rank in ended} == {"rank 0", "rank 2"}, out + errors
    assert set(reports.values()) <= {"1", *ended}, reports


def test_ranks_that_mpi_does_not_connect_are_refused() -> None:
    """As below torchrun: each process is alone in its MPI."""
    if not any(map(shutil.which, ("mpirun.openmpi", "mpiexec.hydra"))):
        pytest.skip("there is no MPI (apt-get install openmpi-bin mpich)")
    words = command("run", "-np", "2", sys.executable, "-c", ALONE)
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode != 0
    assert re.search("fabric: is mpi, but .* sees 1 of the 2 ranks. Start them with: mpirun -n 2", done.stderr), (
        done.stderr
    )


def test_a_fabric_that_not_all_ranks_have_is_refused(launcher: Launcher) -> None:
    code, _, errors = start(launcher, 2, "-c", UNLIKE)
    assert code != 0
    assert "fabric: is mpi, but not on rank 1; set it alike on all ranks" in errors
