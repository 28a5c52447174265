"""Launchers of other projects, recognized by the environment variables that they set for each process."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from farandole.errors import ConfigError

__all__ = ["OtherLaunch", "Way", "find_other_launch", "note_launches", "refuse_other_launch"]

OUTER = "FARANDOLE_OUTER_LAUNCHES"

# How the processes of a launch can exchange bytes; "": not at all.
Way: TypeAlias = Literal["mpi", "slurm", "torch", ""]

# Each variable holds the number of processes of one launch. The first above 1 names the launcher: a process that
# `mpirun` starts within a Slurm job has the variables of both.
_SIZES = {
    "OMPI_COMM_WORLD_SIZE": "mpirun of Open MPI",
    "MV2_COMM_WORLD_SIZE": "mpirun of MVAPICH",
    "PMI_SIZE": "mpiexec of MPICH or Intel MPI",
    "MPI_LOCALNRANKS": "mpiexec of MPICH or Intel MPI",
    "SLURM_STEP_NUM_TASKS": "srun",
    "HOROVOD_SIZE": "a launcher of Horovod",
    "WORLD_SIZE": "torchrun, or a launcher like it,",
}
_MPI = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS")
_OURS = {"HOROVOD_": "HOROVOD_RANK", "WORLD_": "RANK"}  # prefix of the size's variable: the rank's variable
_SPECIAL_STEPS = 0xFFFFFFF0  # slurm.h: larger numbers are batch scripts and interactive shells, not srun's steps


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherLaunch:
    """A launch of several processes: the launcher, the variable that shows it, and how the processes can meet."""

    launcher: str
    variable: str
    value: int
    size: int | None  # None: the launcher tells each process only its rank
    way: Way = ""

    def __str__(self) -> str:
        if self.size is None:
            return f"{self.launcher} started this process as rank {self.value} of several"
        return f"{self.launcher} started {self.size} processes"


def find_other_launch(env: Mapping[str, str] | None = None) -> OtherLaunch | None:
    """Return the launch of several processes that `env` (default: `os.environ`) describes; None for a single process.

    A Slurm batch script is a single process, however many tasks its job may start."""
    return next(_launches(os.environ if env is None else env), None)


def note_launches(env: Mapping[str, str]) -> dict[str, str]:
    """Return a variable that lists the launches around a rank's own launcher, so that the rank ignores them."""
    return {OUTER: " ".join(f"{each.variable}={each.value}" for each in _launches(env))}


def refuse_other_launch(env: Mapping[str, str] | None = None, *, rank: int = 0, size: int = 1) -> None:
    """Raise `ConfigError` when another launcher has started several processes as rank `rank` of `size`.

    Each process would run as that rank, in a separate job."""
    env = os.environ if env is None else env
    known = env.get(OUTER, "").split()
    # Farandole's launchers set these, too. Another launcher within a rank changes the size, or the rank.
    known += [f"{prefix}SIZE={size}" for prefix, name in _OURS.items() if env.get(name, str(rank)) == str(rank)]
    found = next((each for each in _launches(env) if f"{each.variable}={each.value}" not in known), None)
    if found is not None:
        raise ConfigError(
            found.variable,
            f"is {found.value}: {found}, which cannot meet here, and each would train alone. Start the ranks "
            f"with: farandole run -np {found.size or 'N'} python train.py. To train alone on purpose, "
            f"unset {found.variable}",
        )


def _launches(env: Mapping[str, str]) -> Iterator[OtherLaunch]:
    sizes = dict(_SIZES)
    if "TORCHELASTIC_RUN_ID" in env:  # torchrun is the innermost launcher: mpirun and srun start it once per host
        sizes = {"WORLD_SIZE": sizes["WORLD_SIZE"], **sizes}
    if "SLURM_STEP_NUM_TASKS" not in env and _in_step_of_srun(env):
        sizes["SLURM_NTASKS"] = "srun"
    for variable, launcher in sizes.items():
        if (size := _number(env, variable)) > 1:
            yield OtherLaunch(launcher=launcher, variable=variable, value=size, size=size, way=_way(variable, env))
    if (rank := _number(env, "PMIX_RANK")) > 0:
        yield OtherLaunch(launcher="a launcher with PMIx", variable="PMIX_RANK", value=rank, size=None)


def _way(variable: str, env: Mapping[str, str]) -> Way:
    if variable.startswith("SLURM_"):
        return "slurm"
    if variable in _MPI:
        # srun with a plug-in for PMI sets the variables of MPICH, too.
        same = (("SLURM_STEP_NUM_TASKS", "PMI_SIZE"), ("SLURM_PROCID", "PMI_RANK"))
        by_srun = all(theirs in env and env.get(slurms) == env[theirs] for slurms, theirs in same)
        return "slurm" if by_srun else "mpi"
    if variable == "WORLD_SIZE" and all(env.get(name) for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")):
        return "torch"
    return ""


def _in_step_of_srun(env: Mapping[str, str]) -> bool:
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    if step.isascii() and step.isdigit():
        return int(step) < _SPECIAL_STEPS
    return _number(env, "SLURM_PROCID") > 0  # a batch script is always process 0


def _number(env: Mapping[str, str], variable: str) -> int:
    text = env.get(variable, "")
    return int(text) if text.isascii() and text.isdigit() else 0
