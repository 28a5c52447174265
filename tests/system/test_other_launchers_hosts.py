"""Launchers of other projects on two hosts: the ranks find an address of rank 0 that all of them reach."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from namespaces import DEVICE, inside

from helpers.mpi_sites import SURROUNDINGS
from helpers.ssh_hosts import Hosts, net_of, problem, serving_hosts
from system.test_other_launchers import mpich

pytestmark = [
    pytest.mark.native,
    pytest.mark.slow,
    pytest.mark.skipif(bool(problem()), reason=problem() or "hosts"),
]

MEET = """
import sys
import numpy, farandole.numpy as hvd
hvd.init()
total = hvd.allreduce(numpy.arange(2.0) + hvd.rank(), op=hvd.Sum).tolist()
assert (hvd.allreduce(numpy.ones(1 << 16), op=hvd.Sum) == hvd.size()).all()
sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()} on host {hvd.cross_rank()} of {hvd.cross_size()}: {total}\\n")
"""
LINES = {
    2: [f"rank {rank} of 2 on host {rank} of 2: [1.0, 3.0]" for rank in range(2)],
    4: [f"rank {rank} of 4 on host {rank // 2} of 2: [6.0, 10.0]" for rank in range(4)],
}  # by the number of ranks


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with serving_hosts(tmp_path_factory.mktemp("ssh")) as hosts:
        yield hosts


def start(*words: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        words, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.skipif(shutil.which("mpirun.openmpi") is None, reason="Open MPI is not installed (openmpi-bin)")
@pytest.mark.parametrize(("fabric", "ranks"), [("auto", 2), ("mpi", 2), ("mpi", 4)])
def test_open_mpi_on_two_hosts(hosts: Hosts, fabric: str, ranks: int) -> None:
    """With several ranks on each host, MPI's own collectives carry the tensors; two ranks send to each other."""
    net = f"{net_of(hosts.names[0])}0/24"
    words = ["mpirun.openmpi", "--mca", "plm_rsh_agent", f"ssh -F {hosts.config}", "--host", hosts.slots(ranks // 2)]
    words += ["--mca", "oob_tcp_if_include", net, "--mca", "btl_tcp_if_include", net, "--mca", "btl", "self,tcp"]
    words += ["-x", f"FARANDOLE_FABRIC={fabric}", "-np", str(ranks)]
    program = f"{MEET}assert hvd.mpi_enabled() == {fabric == 'mpi'}\n"
    done = start(*words, sys.executable, "-c", program, env=SURROUNDINGS)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == LINES[ranks]


@pytest.mark.skipif(mpich() is None, reason="MPICH is not installed (mpich)")
def test_mpich_on_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "ssh"
    script.write_text(f'#!/bin/sh\nexec ssh -F {hosts.config} "$@"\n')
    script.chmod(0o755)
    words = [str(mpich()), "-launcher", "ssh", "-launcher-exec", str(script), "-hosts", ",".join(hosts.names)]
    words += ["-iface", DEVICE, "-n", "2", "-ppn", "1"]
    done = start(*inside(hosts.spaces[2]), *words, sys.executable, "-c", MEET)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == LINES[2]


def start_on_each(hosts: Hosts, command: Callable[[int], Sequence[str]], env: Callable[[int], dict[str, str]]) -> str:
    """Run a command on both hosts at once, made from the host's number; return the output of both."""
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(start, *inside(space), *command(number), env=env(number))
            for number, space in enumerate(hosts.spaces[:2])
        ]
    for each in runs:
        assert each.result().returncode == 0, each.result().stderr
    return "".join(each.result().stdout for each in runs)


def test_tasks_of_srun_on_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "HOME": str(tmp_path)}
    out = start_on_each(
        hosts, lambda _: [sys.executable, "-c", MEET], lambda number: {**env, "SLURM_PROCID": str(number)}
    )
    assert sorted(out.splitlines()) == LINES[2]


def test_torchrun_on_two_hosts(hosts: Hosts) -> None:
    pytest.importorskip("torch")
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--no-python"]
    words += ["--master-addr", hosts.names[0], "--master-port", "29511"]
    out = start_on_each(
        hosts, lambda number: [*words, "--node-rank", str(number), sys.executable, "-c", MEET], lambda _: {}
    )
    assert sorted(out.splitlines()) == LINES[4]
