"""Launcher for ranks on the nodes of a Slurm allocation: one srun per node, instead of ssh, starts an agent."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Self

from farandole.errors import ConfigError
from farandole.launch.backend import Host, Shell, Site
from farandole.launch.hosts import is_local

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
    """The remote shell of an allocation's nodes; `groups` has the component of each node of a heterogeneous job."""

    command: str = "srun"
    groups: Mapping[str, int] = field(default_factory=dict)

    def words(self, host: str, program: str) -> list[str]:
        """Return the command that runs `program` on the node `host`, beside the job's other steps."""
        unset = [word for name in _NOT_FOR_ONE_TASK for word in ("-u", name)]
        options = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--mpi=none", "--cpu-bind=none"]
        if host in self.groups:  # srun finds nodes in the first component only
            options.append(f"--het-group={self.groups[host]}")
        return ["env", *unset, self.command, *options, "--unbuffered", "sh", "-c", program]


@dataclass(frozen=True, slots=True)
class Component:
    """Nodes of an allocation, and the tasks of each, as Slurm writes them."""

    nodes: str
    counts: str
    suffix: str = ""  # of the variables that name them


@dataclass(frozen=True, slots=True)
class Allocation(Site):
    """The allocation of this process: one component, or several in a heterogeneous job."""

    components: Sequence[Component]
    env: Mapping[str, str] = field(repr=False)

    @classmethod
    def read(cls, env: Mapping[str, str]) -> Self | None:
        """Return the allocation, if there is one."""
        # In a heterogeneous job the variables without a suffix are missing, or name the first component only.
        size = env.get("SLURM_HET_SIZE", "")
        suffixes = [f"_HET_GROUP_{group}" for group in range(int(size))] if size.isascii() and size.isdigit() else [""]
        found = [
            Component(env.get(f"SLURM_JOB_NODELIST{each}", ""), env.get(f"SLURM_TASKS_PER_NODE{each}", ""), each)
            for each in suffixes
        ]
        return cls(found, env) if all(each.nodes and each.counts for each in found) else None

    def wait_for_hosts(self, num_proc: int | None, timeout: timedelta) -> tuple[Host, ...]:
        """Return the nodes, or this machine with a slot for each rank if it is the only one.

        Raises `ConfigError` if Slurm does not list the nodes."""
        nodes = self.hosts()
        return (Host("localhost", num_proc),) if num_proc and all(is_local(node.name) for node in nodes) else nodes

    def hosts(self) -> tuple[Host, ...]:
        """Return the nodes, each with its tasks as slots; raises `ConfigError` if Slurm does not list them."""
        return tuple(host for component in self.components for host in self._hosts_of(component))

    def shell(self, ssh: Shell, start_timeout: timedelta) -> Shell:
        """Return srun, which reaches the nodes without keys."""
        groups: dict[str, int] = {}
        if len(self.components) > 1:
            for group, component in enumerate(self.components):
                for host in self._hosts_of(component):
                    groups.setdefault(host.name, group)
        return Srun(groups=groups)

    def _hosts_of(self, component: Component) -> tuple[Host, ...]:
        variable = f"SLURM_JOB_NODELIST{component.suffix}"
        scontrol = shutil.which("scontrol", path=self.env.get("PATH"))
        if scontrol is None or shutil.which("srun", path=self.env.get("PATH")) is None:
            problem = f"is {component.nodes}, but srun or scontrol is not on PATH; name hosts with -H"
            raise ConfigError(variable, problem)
        words = [scontrol, "show", "hostnames", component.nodes]
        done = subprocess.run(words, env=dict(self.env), capture_output=True, text=True, timeout=SECONDS, check=False)
        names, slots = done.stdout.split(), read_counts(component.counts)
        if done.returncode != 0 or len(names) != len(slots):
            counts = f"SLURM_TASKS_PER_NODE{component.suffix} is {component.counts}"
            raise ConfigError(
                variable, f"is {component.nodes}: {done.stderr.strip() or f'{len(names)} nodes, but {counts}'}"
            )
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
