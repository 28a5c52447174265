"""Time until all ranks of two hosts are initialized, started over ssh.

    python bench/start.py [--rounds 5] [--local 2]

Hosts are network namespaces with a real sshd each, and have `--local` ranks each. `farandole run` (one ssh connection
per host) is compared with mpirun of Open MPI (one daemon per host, over ssh) and with one ssh connection per rank. All
start the same program, which imports only NumPy. The target is at most 1.5 times mpirun's time. Needs root and sshd;
writes bench/results/*-start.json."""

import argparse
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from launch import until_initialized
from race import race, record, spread

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from farandole.meeting.handshake import new_secret
from farandole.meeting.server import RendezvousServer
from helpers.ssh_hosts import Hosts, net_of, problem, serving_hosts

PROGRAM = """
import farandole.numpy as hvd
hvd.init()
rank = hvd.rank()
"""
MUST = 1.5  # greatest ratio of our time to mpirun's
OURS, MPIRUN, PER_RANK = "farandole run", "mpirun", "one ssh per rank"
# Open MPI as root.
SURROUNDINGS = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")


def by_farandole(hosts: Hosts, local: int) -> float:
    """Return the seconds of `farandole run`."""
    size = local * len(hosts.names)
    words = [sys.executable, "-m", "farandole.launch.cli", "run", "-np", str(size), "-H", hosts.slots(local)]
    return until_initialized([*words, *hosts.options, sys.executable], PROGRAM, size)


def by_mpirun(hosts: Hosts, local: int) -> float:
    """Return the seconds of Open MPI's mpirun."""
    size = local * len(hosts.names)
    net = f"{net_of(hosts.names[0])}0/24"
    words = [*OPEN_MPI, "--mca", "plm_rsh_agent", f"ssh -F {hosts.config}", "--host", hosts.slots(local)]
    words += ["--mca", "oob_tcp_if_include", net, "--mca", "btl_tcp_if_include", net, "--mca", "btl", "self,tcp"]
    return until_initialized([*words, "-np", str(size), sys.executable], PROGRAM, size)


def by_ssh_per_rank(hosts: Hosts, local: int) -> float:
    """Return the seconds with one ssh connection per rank and the rendezvous of `farandole run`."""
    size = local * len(hosts.names)
    secret = new_secret()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((hosts.names[0], 9))
        here = probe.getsockname()[0]
    with RendezvousServer(size, secret, host=here) as server, tempfile.TemporaryDirectory() as folder:
        starter = Path(folder, "start.sh")
        lines = ["#!/bin/sh"]
        for rank in range(size):
            variables = f"FARANDOLE_RANK={rank} FARANDOLE_SIZE={size} FARANDOLE_RENDEZVOUS={server.address}"
            variables += f" FARANDOLE_SECRET={secret.hex()}"
            remote = f"env {variables} {sys.executable} $1 $2"
            lines.append(f'ssh -F {hosts.config} {hosts.names[rank // local]} "{remote}" < /dev/null &')
        starter.write_text("\n".join([*lines, "wait"]), encoding="utf-8")
        return until_initialized(["sh", str(starter)], PROGRAM, size)


def main() -> None:
    """Measure, print a line per contender, and record the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--local", type=int, default=2, help="ranks of a host")
    given = parser.parse_args()
    os.environ.update(SURROUNDINGS)
    if problem():
        raise SystemExit(f"start.py: {problem()}")
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder, serving_hosts(Path(folder)) as hosts:
        contenders = {OURS: lambda: by_farandole(hosts, given.local)}
        if shutil.which(OPEN_MPI[0]) is not None:
            contenders[MPIRUN] = lambda: by_mpirun(hosts, given.local)
        contenders[PER_RANK] = lambda: by_ssh_per_rank(hosts, given.local)
        done = race(contenders, given.rounds)
    sys.stdout.write(f"start until init returned, 2 hosts x {given.local} (min / median / max)\n{done.report()}\n")
    if MPIRUN in contenders and spread(done.ratios(OURS)[MPIRUN]).median < 1 / MUST:
        sys.stdout.write(f"above {MUST} of mpirun\n")
    sys.stdout.write(f"{record('start', {'2 hosts': done}, ('farandole', 'numpy'))}\n")


if __name__ == "__main__":
    main()
