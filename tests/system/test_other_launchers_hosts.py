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

from helpers.kernel_files import add_port
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


OPEN_MPI = pytest.mark.skipif(shutil.which("mpirun.openmpi") is None, reason="Open MPI is not installed (openmpi-bin)")


def start_by_open_mpi(hosts: Hosts, ranks: int, program: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    net = f"{net_of(hosts.names[0])}0/24"
    words = ["mpirun.openmpi", "--mca", "plm_rsh_agent", f"ssh -F {hosts.config}", "--host", hosts.slots(ranks // 2)]
    words += ["--mca", "oob_tcp_if_include", net, "--mca", "btl_tcp_if_include", net, "--mca", "btl", "self,tcp"]
    for name, value in variables.items():
        words += ["-x", f"{name}={value}"]
    return start(*words, "-np", str(ranks), sys.executable, "-c", program, env=SURROUNDINGS)


@OPEN_MPI
@pytest.mark.parametrize(("fabric", "ranks"), [("auto", 2), ("mpi", 2), ("mpi", 4)])
def test_open_mpi_on_two_hosts(hosts: Hosts, fabric: str, ranks: int) -> None:
    """With several ranks on each host, MPI's own collectives carry the tensors; two ranks send to each other."""
    program = f"{MEET}assert hvd.mpi_enabled() == {fabric == 'mpi'}\n"
    done = start_by_open_mpi(hosts, ranks, program, FARANDOLE_FABRIC=fabric)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == LINES[ranks]


# Each host has kernel files of its own.
CHOOSE = """
import os, pathlib
from farandole.meeting.launched import interconnects
interconnects.ROOT = pathlib.Path({folder!r}, str(int(os.environ["OMPI_COMM_WORLD_RANK"]) // 2))
"""
SETS = """
across, within = (hvd.add_process_set(ranks) for ranks in ([0, 3], [0, 1]))
for each in (across, within):
    if each.included():
        assert (hvd.allreduce(numpy.ones(1 << 16), op=hvd.Sum, process_set=each) == 2).all()
"""


@OPEN_MPI
@pytest.mark.parametrize("hosts_with_it", [1, 2])
def test_mpi_is_chosen_where_every_host_has_an_interconnect(hosts: Hosts, hosts_with_it: int, tmp_path: Path) -> None:
    for host in range(hosts_with_it):
        add_port(tmp_path / str(host))
    program = f"{CHOOSE.format(folder=str(tmp_path))}{MEET}assert hvd.mpi_enabled() == {hosts_with_it == 2}\n{SETS}"
    done = start_by_open_mpi(hosts, 4, program)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == LINES[4]
    port = "InfiniBand mlx5_0 port 1 (200 Gb/sec (4X HDR))"
    said = {
        1: f"although hosts have an interconnect ({port}): not ranks 2 and 3 (no interconnect there)",
        2: f"because every host has an interconnect, rank 0's {port}; FARANDOLE_FABRIC=mpi asks for it",
    }
    assert done.stderr.count("tensors go over") == 1
    assert said[hosts_with_it] in done.stderr


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


@OPEN_MPI
def test_horovodrun_starts_ranks_on_two_hosts_by_open_mpi(hosts: Hosts, tmp_path: Path) -> None:
    """The options of ssh reach mpirun. The network is that of the device which all hosts and the launcher have."""
    (tmp_path / "mpirun").symlink_to(str(shutil.which("mpirun.openmpi")))
    words = ["farandole.compat.horovodrun", "--mpi", "-np", "4", "-H", hosts.slots(2), *hosts.options]
    words += ["--network-interface", DEVICE]
    words += [f"--mpi-args=--mca oob_tcp_if_include {net_of(hosts.names[0])}0/24 --mca btl self,tcp"]
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MINE": "carried over"}
    program = f"{MEET}import os\nassert os.environ['MINE'] == 'carried over'\n"
    line = [sys.executable, "-m", *words, sys.executable, "-c", program]
    done = start(*inside(hosts.spaces[2]), *line, env={**SURROUNDINGS, **path})
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition(">:")[2].strip() for line in done.stdout.splitlines()) == LINES[4], done.stdout


CALL = """
import horovod

def place():
    import farandole.numpy as hvd
    hvd.init()
    return hvd.rank(), hvd.size(), hvd.cross_rank()

print(horovod.run(place, num_proc=2, hosts="{hosts}", use_mpi=True, mpi_args="{words}", network_interface="{device}"))
"""


@OPEN_MPI
def test_a_function_is_called_on_two_hosts_by_open_mpi(hosts: Hosts, tmp_path: Path) -> None:
    """Values come back from hosts that the launcher knows by their names alone."""
    (tmp_path / "mpirun").symlink_to(str(shutil.which("mpirun.openmpi")))
    words = f"--mca plm_rsh_agent 'ssh -F {hosts.config}' --mca oob_tcp_if_include {net_of(hosts.names[0])}0/24"
    program = CALL.format(hosts=hosts.slots(1), words=f"{words} --mca btl self,tcp", device=DEVICE)
    line = [sys.executable, "-m", "farandole.compat", "-c", program]
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = start(*inside(hosts.spaces[2]), *line, env={**SURROUNDINGS, **path})
    assert (done.returncode, done.stdout) == (0, "[(0, 2, 0), (1, 2, 1)]\n"), done.stderr


@pytest.mark.skipif(mpich() is None, reason="MPICH is not installed (mpich)")
def test_horovodrun_starts_ranks_on_two_hosts_by_mpich(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text(f'#!/bin/sh\nexec {mpich()} "$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    words = ["farandole.compat.horovodrun", "--mpi", "-np", "4", "-H", hosts.slots(2), *hosts.options]
    line = [sys.executable, "-m", *words, f"--mpi-args=-iface {DEVICE}", sys.executable, "-c", MEET]
    done = start(*inside(hosts.spaces[2]), *line, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition("] ")[2] for line in done.stdout.splitlines()) == LINES[4], done.stdout


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
