"""Launcher for ranks on the nodes of a Slurm allocation: one srun per node, instead of ssh, starts an agent."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from farandole.errors import ConfigError
from farandole.launch.backend import Host
from farandole.other_launchers import find_other_launch

__all__ = ["Srun", "allocated_hosts", "read_counts"]

SECONDS = 30  # for scontrol
# Variables of the allocation that srun reads as options, and that would request more than one task.
_NOT_FOR_ONE_TASK = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_TASKS_PER_NODE"),
    *("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_SOCKET", "SLURM_CPUS_PER_TASK"),
    *("SLURM_DISTRIBUTION", "SLURM_HOSTFILE"),
)
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


@dataclass(frozen=True, slots=True)
class Srun:
    """The remote shell of an allocation's nodes."""

    command: str = "srun"

    def words(self, host: str, program: str) -> list[str]:
        """Return the command that runs `program` on the node `host`, beside the job's other steps."""
        unset = [word for name in _NOT_FOR_ONE_TASK for word in ("-u", name)]
        options = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--mpi=none", "--cpu-bind=none"]
        return ["env", *unset, self.command, *options, "--unbuffered", "sh", "-c", program]


def allocated_hosts(env: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the nodes of the allocation that this process may fill with ranks; none outside of an allocation.

    Within a rank or one of several tasks there are none: these start ranks on their own machine. Raises `ConfigError`
    if Slurm does not list the nodes."""
    nodes, counts = env.get("SLURM_JOB_NODELIST", ""), env.get("SLURM_TASKS_PER_NODE", "")
    if not nodes or not counts or "FARANDOLE_RANK" in env or find_other_launch(env) is not None:
        return ()
    scontrol = shutil.which("scontrol", path=env.get("PATH"))
    if scontrol is None or shutil.which("srun", path=env.get("PATH")) is None:
        raise ConfigError("SLURM_JOB_NODELIST", f"is {nodes}, but srun or scontrol is not on PATH; name hosts with -H")
    words = [scontrol, "show", "hostnames", nodes]
    done = subprocess.run(words, env=dict(env), capture_output=True, text=True, timeout=SECONDS, check=False)
    names, slots = done.stdout.split(), read_counts(counts)
    if done.returncode != 0 or len(names) != len(slots):
        problem = done.stderr.strip() or f"{len(names)} nodes, but SLURM_TASKS_PER_NODE is {counts}"
        raise ConfigError("SLURM_JOB_NODELIST", f"is {nodes}: {problem}")
    return tuple(Host(name, count) for name, count in zip(names, slots, strict=True))


def read_counts(text: str) -> Sequence[int]:
    """Read Slurm's "2(x3),1" as 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ConfigError("SLURM_TASKS_PER_NODE", f"{text!r} is no list of counts")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
