"""Settings by topic: names, kinds, defaults. An argument wins over FARANDOLE_X, HOROVOD_X and the default."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Self

from farandole.errors import ConfigError
from farandole.refusals import ignored_variables
from farandole.settings import Choice, Count, Duration, Flag, Setting, Size, Text, Value, setting, settings_of

log = logging.getLogger(__name__)

FABRICS = ("auto", "tcp", "mpi")
LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
ROUTES = ("auto", "nccl", "host")  # of tensors on GPUs

_FABRIC = Choice("fabric", FABRICS, {"gloo": "tcp"})  # Horovod's "gloo" is its own connections, without MPI
_ROUTE = Choice("route", ROUTES, {"mpi": "host"})  # Horovod's "mpi" for tensors on GPUs goes through host memory


@dataclass(frozen=True, kw_only=True)
class Performance:
    """Settings of speed on one host and of fusion."""

    fusion_threshold: int = setting(
        128 << 20, Size(), "largest bucket of fused tensors; 0: no fusion", "HOROVOD_FUSION_THRESHOLD"
    )
    cache_capacity: int = setting(
        16384, Count(), "agreed requests that ranks remember; 0: negotiate each one", "HOROVOD_CACHE_CAPACITY"
    )
    spin: timedelta = setting(
        timedelta(microseconds=100), Duration(), "how long a waiting thread spins before it sleeps"
    )
    slot_bytes: int = setting(
        128 << 10,
        Size(least=4096, largest=64 << 20, unit=64),
        "chunk of a shared-memory transfer; by default up to 512 KiB where ranks outnumber cores",
    )


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """Settings of how long ranks wait for each other."""

    collective_timeout: timedelta = setting(
        timedelta(seconds=600), Duration(), "how long an operation waits for the other ranks; 0: no limit"
    )
    heartbeat: timedelta = setting(
        timedelta(seconds=3),
        Duration(),
        "longest silence of a rank on another host before it counts as lost; 0: no limit",
    )
    start_timeout: timedelta = setting(
        timedelta(seconds=120),
        Duration(positive=True),
        "how long ranks wait for others at init",
        "HOROVOD_START_TIMEOUT",
    )
    elastic_timeout: timedelta = setting(
        timedelta(seconds=600),
        Duration(),
        "how long an elastic job waits for its least number of ranks",
        "HOROVOD_ELASTIC_TIMEOUT",
    )
    stall_check_time: timedelta = setting(
        timedelta(seconds=60),
        Duration(),
        "warn when some ranks wait this long for others",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
    )
    stall_shutdown_time: timedelta = setting(
        timedelta(0),
        Duration(),
        "fail an operation that some ranks wait for this long; 0: use collective_timeout",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    )
    stall_check_disable: bool = setting(False, Flag(), "never look for stalls", "HOROVOD_STALL_CHECK_DISABLE")

    def __post_init__(self) -> None:
        if timedelta(0) < self.stall_shutdown_time < self.stall_check_time:
            problem = f"must be 0 or at least stall_check_time ({self.stall_check_time.total_seconds():g} s)"
            raise ConfigError("stall_shutdown_time", f"{problem}, got {self.stall_shutdown_time.total_seconds():g} s")

    @property
    def stall_seconds(self) -> float:
        """Seconds after which a stall is reported; 0: never."""
        return 0.0 if self.stall_check_disable else self.stall_check_time.total_seconds()

    @property
    def patience_seconds(self) -> float:
        """Seconds after which an operation fails that some ranks have not submitted; 0: never."""
        shutdown = 0.0 if self.stall_check_disable else self.stall_shutdown_time.total_seconds()
        return min((each for each in (self.collective_timeout.total_seconds(), shutdown) if each), default=0.0)


@dataclass(frozen=True, kw_only=True)
class TimelineAndLog:
    """Settings of what is written about a job."""

    timeline: str | None = setting(
        None, Text(), "file for the trace; DYNAMIC: idle until start_timeline", "HOROVOD_TIMELINE"
    )
    timeline_mark_cycles: bool = setting(False, Flag(), "mark each plan in the trace", "HOROVOD_TIMELINE_MARK_CYCLES")
    log_level: str = setting(
        "warning", Choice("level", LOG_LEVELS), f"one of {', '.join(LOG_LEVELS)}", "HOROVOD_LOG_LEVEL"
    )


def _route(operation: str, meaning: str) -> str:
    """Return the field for the route that `operation` takes on GPUs."""
    return setting("auto", _ROUTE, meaning, f"HOROVOD_GPU_{operation}", "HOROVOD_GPU_OPERATIONS")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Settings of connections, of transports, and of transfers between hosts."""

    interface: str | None = setting(
        None, Text(), "address or network interface that listeners bind, or a list", "HOROVOD_GLOO_IFACE"
    )
    fabric: str = setting(
        "auto",
        _FABRIC,
        "transport of tensors; tcp: and shared memory; mpi: of mpirun; auto: mpi if hosts have an interconnect",
        "HOROVOD_CPU_OPERATIONS",
    )
    mpi_library: str | None = setting(
        None, Text(), "file of the MPI library of mpirun, for meeting and for fabric=mpi; default: found"
    )
    gpu_allreduce: str = _route(
        "ALLREDUCE", "allreduces of tensors on GPUs; auto: NCCL where each rank has a GPU of its own, else host memory"
    )
    gpu_allgather: str = _route("ALLGATHER", "the same for allgathers")
    gpu_alltoall: str = _route("ALLTOALL", "the same for alltoalls")
    gpu_reducescatter: str = _route("REDUCESCATTER", "the same for reducescatters")
    gpu_broadcast: str = _route("BROADCAST", "the same for broadcasts")
    rendezvous_folder: str | None = setting(
        None, Text(), "folder of all hosts by which ranks of srun meet; default: ~/.farandole"
    )
    link_chunk: int = setting(
        256 << 10,
        Size(least=4096, largest=1 << 20, unit=64),
        "largest chunk of a transfer between hosts, up to 1 MiB",
    )
    link_small: int = setting(
        64 << 10, Size(), "an allreduce between hosts takes one step while each rank receives at most this"
    )
    hierarchical: bool = setting(True, Flag(), "reduce within hosts first, then between them, if all run as many ranks")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Settings of launchers."""

    as_gloo: bool = setting(False, Flag(), "what programs of torch and JAX ask of gloo is farandole's")
    torch_env: bool = setting(True, Flag(), "give ranks the variables of torchrun: RANK, WORLD_SIZE, MASTER_ADDR, ...")


@dataclass(frozen=True, kw_only=True)
class Autotune:
    """Settings of the search for good settings."""

    autotune: bool = setting(False, Flag(), "search for good settings while the job runs", "HOROVOD_AUTOTUNE")
    autotune_log: str | None = setting(
        None,
        Text(),
        "file to which rank 0 adds samples, and from whose result the next job starts",
        "HOROVOD_AUTOTUNE_LOG",
    )
    autotune_warmup_samples: int = setting(
        3, Count(), "samples that autotune leaves out at the start", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES"
    )
    autotune_steps_per_sample: int = setting(
        10, Count(least=1), "steps that autotune measures for one sample", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"
    )
    autotune_max_samples: int = setting(
        20,
        Count(least=1),
        "samples that autotune takes before it confirms the result",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    )


_SETTINGS = (
    *settings_of("performance", Performance),
    *settings_of("time limits", TimeLimits),
    *settings_of("timeline and log", TimelineAndLog),
    *settings_of("network", Network),
    *settings_of("launch", Launch),
    *settings_of("autotune", Autotune),
)


@dataclass(frozen=True, kw_only=True)
class Config(Autotune, Launch, Network, TimelineAndLog, TimeLimits, Performance):
    """All settings of one context; the constructor raises `ConfigError` for an invalid value."""

    # The names of the settings that the user has set, even to their defaults: autotune does not change them.
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for each in _SETTINGS:
            each.kind.check(each.name, getattr(self, each.name))
        super().__post_init__()

    def leaves_free(self, name: str) -> bool:
        """Return whether the setting `name` was left at its default."""
        return name not in self.given and all(
            getattr(self, name) == each.default for each in _SETTINGS if each.name == name
        )

    @classmethod
    def settings(cls) -> tuple[Setting, ...]:
        """Describe each field, for the command line and the reference."""
        return _SETTINGS

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None, **arguments: Value) -> Self:
        """Take each setting from `arguments`, else from the environment, else its default.

        An argument of None counts as not given; a text is read like an environment variable, a number for a duration is
        seconds. Raises `ConfigError` for an unknown name or an impossible value."""
        env = os.environ if env is None else env
        settings = {each.name: each for each in _SETTINGS}
        for name in arguments:
            if name not in settings:
                raise ConfigError(name, f"no such setting; the settings are {', '.join(settings)}")
        values: dict[str, Value] = {}
        for name, each in settings.items():
            given = arguments.get(name)
            value = each.read(env) if given is None else each.kind.take(name, given)
            if value is not None:
                values[name] = value
        known = {variable for each in _SETTINGS for variable in each.variables}
        if ignored := ignored_variables(env, known):
            log.warning("these environment variables have no effect: %s", "; ".join(ignored))
        # mypy cannot see through the mapping; __post_init__ checks each type.
        return cls(**values, given=frozenset(values))  # type: ignore[arg-type]

    def environment(self) -> dict[str, str]:
        """Return the settings that were given, or differ from their defaults, as variables for a child process."""
        return {
            each.variables[0]: each.spell(getattr(self, each.name))
            for each in _SETTINGS
            if not self.leaves_free(each.name)
        }


def warn_of_other_settings(given: Config, running: Config) -> None:
    """Log a warning if `given` differs from the settings of a running job, which cannot change."""
    other = [each for each in Config.settings() if getattr(given, each.name) != getattr(running, each.name)]
    if other:
        log.warning(
            "init() changes no settings, because the job is running already: %s; call shutdown() before, or give the "
            "settings to the first call of init()",
            ", ".join(f"{each.name} stays {each.kind.show(getattr(running, each.name))}" for each in other),
        )
