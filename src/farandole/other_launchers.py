"""Launchers of other projects, one row each, recognized by the environment variables that they set for each process."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from farandole.errors import ConfigError

OUTER = "FARANDOLE_OUTER_LAUNCHES"

_SPECIAL_STEPS = 0xFFFFFFF0  # slurm.h: larger numbers are batch scripts and interactive shells, not srun's steps


def _always(env: Mapping[str, str]) -> bool:
    return True


def _in_step_of_srun(env: Mapping[str, str]) -> bool:
    """Return whether srun, whose variable with the number of tasks is absent, has started this process."""
    if "SLURM_STEP_NUM_TASKS" in env:
        return False
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    if step.isascii() and step.isdigit():
        return int(step) < _SPECIAL_STEPS
    return _number(env, "SLURM_PROCID") > 0  # a batch script is always process 0


def _has_port_of_pmi(env: Mapping[str, str]) -> bool:
    """Return whether `mpiexec -pmi-port` has started this process: it gives the number of processes only on request."""
    return bool(env.get("PMI_ID") and env.get("PMI_PORT")) and "PMI_SIZE" not in env


def _is_rank_in_pod(env: Mapping[str, str]) -> bool:
    """Return whether this process is the rank of a pod in an Indexed Job whose pods train together."""
    return bool(env.get("JOB_COMPLETION_INDEX") and env.get("FARANDOLE_SIZE")) and not env.get("FARANDOLE_RANK")


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher: the variables of its processes, and how these meet."""

    title: str  # in messages
    size: str  # the variable with the number of processes; "": the launcher tells each process only its rank
    rank: str  # the variable with the number of this process
    program: str = ""  # its command, for reports on a machine
    _: KW_ONLY
    least: int = 2  # the smallest value of that variable, or of `rank` without it, that shows a launch
    when: Callable[[Mapping[str, str]], bool] = _always  # a further sign of it
    innermost: str = ""  # the variable that shows that no other launcher is within this one
    local: str = ""  # the variable with the number of this process on its host
    ours: bool = False  # farandole's launchers set these variables, too
    meet: str = ""  # "module:function" of type `meeting.launched.Meet`; "": its processes cannot meet
    needs: Sequence[str] = ()  # variables without which they cannot meet
    mpi: Sequence[str] = ()  # names of the library's files if the processes meet by MPI

    @property
    def sign(self) -> str:
        """The variable that shows a launch of several processes."""
        return self.size or self.rank


_MPI = "farandole.meeting.launched.mpi:meet_by_mpi"
_FOLDER = "farandole.meeting.launched.slurm:meet_by_folder"
_OPEN_MPI = ("libmpi.so.40",)
_HYDRA = "MPI_LOCALRANKID"
_MPICH = ("libmpi.so.12", "libmpich.so.12", "libmpi_abi.so.1", "libmpi_abi.so.0")

# The first launch of several processes counts: a process that `mpirun` starts within a Slurm job has the variables of
# both. torchrun is the innermost launcher where it shows itself: mpirun and srun start it once per host.
LAUNCHERS = (
    Launcher(
        *("mpirun of Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "mpirun"),
        local="OMPI_COMM_WORLD_LOCAL_RANK",
        meet=_MPI,
        mpi=_OPEN_MPI,
    ),
    Launcher("mpirun of MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "mpirun", meet=_MPI, mpi=_MPICH),
    Launcher("mpirun of MVAPICH", "MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_RANK", "mpirun", meet=_MPI, mpi=_MPICH),
    Launcher("mpiexec of MPICH or Intel MPI", "PMI_SIZE", "PMI_RANK", "mpiexec", local=_HYDRA, meet=_MPI, mpi=_MPICH),
    Launcher(
        "mpiexec of MPICH or Intel MPI", "MPI_LOCALNRANKS", "PMI_RANK", "mpiexec", local=_HYDRA, meet=_MPI, mpi=_MPICH
    ),
    Launcher(
        *("mpiexec of MPICH or Intel MPI", "", "PMI_ID", "mpiexec"),
        least=0,
        when=_has_port_of_pmi,
        local=_HYDRA,
        meet=_MPI,
        mpi=_MPICH,
    ),
    Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun", local="SLURM_LOCALID", meet=_FOLDER),
    Launcher("a launcher of Horovod", "HOROVOD_SIZE", "HOROVOD_RANK", ours=True),
    Launcher(
        *("torchrun, or a launcher like it,", "WORLD_SIZE", "RANK", "torchrun"),
        innermost="TORCHELASTIC_RUN_ID",
        local="LOCAL_RANK",
        ours=True,
        meet="farandole.torch.distributed.exchange:meet_by_store",
        needs=("RANK", "MASTER_ADDR", "MASTER_PORT"),
    ),
    Launcher(
        *("srun", "SLURM_NTASKS", "SLURM_PROCID", "srun"), local="SLURM_LOCALID", when=_in_step_of_srun, meet=_FOLDER
    ),
    Launcher("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),  # with Spectrum MPI the first row counts
    Launcher("a launcher with PMIx", "", "PMIX_RANK", least=1),
)
PROGRAMS = tuple(dict.fromkeys(row.program for row in LAUNCHERS if row.program))
# Clusters whose processes are ranks if they call `init`, and may as well start jobs of their own.
CLUSTERS = (
    Launcher(
        *("an Indexed Job", "FARANDOLE_SIZE", "JOB_COMPLETION_INDEX"),
        least=0,  # `meet` refuses a size that is no number
        when=_is_rank_in_pod,
        meet="farandole.meeting.launched.indexed_job:meet_in_indexed_job",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherLaunch:
    """A launch of several processes: its launcher, the value of the variable that shows it, and their number."""

    launcher: Launcher
    value: int
    size: int | None  # None: the launcher tells each process only its rank

    @property
    def variable(self) -> str:
        """The variable that shows the launch."""
        return self.launcher.sign

    @property
    def by_mpi(self) -> bool:
        """Return whether the processes meet by MPI."""
        return bool(self.launcher.mpi)

    def local_rank(self, env: Mapping[str, str]) -> int | None:
        """Return the number of this process on its host, as its launcher counts; None if the launcher does not say."""
        return _number(env, self.launcher.local) if env.get(self.launcher.local) else None

    def __str__(self) -> str:
        if self.size is None:
            return f"{self.launcher.title} started this process as rank {self.value} of several"
        return f"{self.launcher.title} started {self.size} processes"


def find_other_launch(
    env: Mapping[str, str] | None = None, among: Sequence[Launcher] = LAUNCHERS
) -> OtherLaunch | None:
    """Return the launch of several processes that `env` (default: `os.environ`) describes; None for a single process.

    A Slurm batch script is a single process, however many tasks its job may start."""
    return next(_launches(os.environ if env is None else env, among), None)


def note_launches(env: Mapping[str, str]) -> dict[str, str]:
    """Return a variable that lists the launches around a rank's own launcher, so that the rank ignores them."""
    return {OUTER: " ".join(f"{each.variable}={each.value}" for each in _launches(env))}


def refuse_other_launch(env: Mapping[str, str] | None = None, *, rank: int = 0, size: int = 1) -> None:
    """Raise `ConfigError` when another launcher has started several processes as rank `rank` of `size`.

    Each process would run as that rank, in a separate job."""
    env = os.environ if env is None else env
    known = env.get(OUTER, "").split()
    # Another launcher within a rank changes the size of our variables, or the rank.
    ours = (row for row in LAUNCHERS if row.ours and env.get(row.rank, str(rank)) == str(rank))
    known += [f"{row.size}={size}" for row in ours]
    _refuse([each for each in _launches(env) if f"{each.variable}={each.value}" not in known])


def refuse_launch_below_member(env: Mapping[str, str]) -> None:
    """Raise `ConfigError` when another launcher has started several processes as one member of an elastic job.

    The member's launcher, and programs for other libraries, set variables of Horovod and of torch."""
    known = env.get(OUTER, "").split()
    theirs = (each for each in _launches(env) if not each.launcher.ours or each.launcher.innermost in env)
    _refuse([each for each in theirs if f"{each.variable}={each.value}" not in known])


def _refuse(found_launches: Sequence[OtherLaunch]) -> None:
    for found in found_launches:
        raise ConfigError(
            found.variable,
            f"is {found.value}: {found}, which cannot meet here, and each would train alone. Start the ranks "
            f"with: farandole run -np {found.size or 'N'} python train.py. To train alone on purpose, "
            f"unset {found.variable}",
        )


def _launches(env: Mapping[str, str], among: Sequence[Launcher] = LAUNCHERS) -> Iterator[OtherLaunch]:
    for row in sorted(among, key=lambda row: row.innermost not in env):
        value = _number(env, row.sign)
        if value >= row.least and row.when(env):
            yield OtherLaunch(launcher=_with_its_meeting(row, env), value=value, size=value if row.size else None)


def _with_its_meeting(row: Launcher, env: Mapping[str, str]) -> Launcher:
    """Return `row` with the meeting that its processes can have in `env`."""
    # srun with a plug-in for PMI sets the variables of MPICH, too.
    same = (("SLURM_STEP_NUM_TASKS", "PMI_SIZE"), ("SLURM_PROCID", "PMI_RANK"))
    if row.mpi and all(theirs in env and env.get(slurms) == env[theirs] for slurms, theirs in same):
        return replace(row, meet=_FOLDER, mpi=())
    return row if all(env.get(name) for name in row.needs) else replace(row, meet="")


def _number(env: Mapping[str, str], variable: str) -> int:
    text = env.get(variable, "").strip()  # a script may pad numbers, and other readers accept that
    return int(text) if text.isascii() and text.isdigit() else 0
