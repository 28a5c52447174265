"""Settings: names, kinds, defaults, checks. An argument wins over FARANDOLE_X, HOROVOD_X and the default."""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Self, TypeAlias, cast

from farandole.errors import ConfigError
from farandole.refusals import ignored_variables

__all__ = ["FABRICS", "LOG_LEVELS", "ROUTES", "Config", "Setting"]

log = logging.getLogger(__name__)

FABRICS = ("auto", "tcp", "mpi")
LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
ROUTES = ("auto", "nccl", "host")  # of tensors on GPUs
_CHOICES: Mapping[str, Sequence[str]] = {"fabric": FABRICS, "level": LOG_LEVELS, "route": ROUTES}
# Horovod's "gloo" is its own connections, without MPI; its "mpi" for tensors on GPUs goes through host memory.
_CHOICE_OF = {("fabric", "gloo"): "tcp", ("route", "mpi"): "host"}

Value: TypeAlias = int | float | bool | str | timedelta | None

# The largest value of a setting of each kind. Larger values exceed all machines and overflow in native code.
LARGEST: Mapping[str, int] = {"bytes": 1 << 40, "count": (1 << 31) - 1}
LONGEST = timedelta(days=365)
LARGEST_OF: Mapping[str, int] = {"slot_bytes": 64 << 20, "link_chunk": 1 << 20}  # of settings with lower limits

_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(us|ms|s|m|min|h|)\s*")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_SIZE = re.compile(r"\s*([0-9]+)\s*([KMG]I?B|B|)\s*", re.IGNORECASE)
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One field of `Config` as the command line, the Spark parameters and the reference show it."""

    name: str
    topic: str  # groups settings in the reference
    kind: str  # "bytes", "count", "duration", "fabric", "flag", "level", "route" or "text"
    default: Value
    help: str
    variables: tuple[str, ...]  # environment variables in order of precedence

    def parse(self, text: str, source: str | None = None) -> Value:
        """Parse `text` like an environment variable; raises `ConfigError` naming `source`."""
        return _parse(self.kind, text, source or self.name)

    def read(self, env: Mapping[str, str]) -> Value:
        """Return the value of the first of the setting's variables that `env` has, None without one."""
        variable = next((each for each in self.variables if env.get(each, "") != ""), None)
        return None if variable is None else self.parse(env[variable], variable)

    def spell(self, value: Value) -> str:
        """Return the text of `value` for `parse`."""
        if isinstance(value, timedelta):
            return f"{value // timedelta(microseconds=1)}us"
        if isinstance(value, bool):
            return "1" if value else "0"
        return "" if value is None else str(value)


def _about(topic: str, kind: str, text: str, *horovod: str) -> dict[str, object]:
    return {"topic": topic, "kind": kind, "help": text, "horovod": horovod}


def _route(operation: str, meaning: str) -> Any:
    """Return the field for the route that `operation` takes on GPUs."""
    about = _about("network", "route", meaning, f"HOROVOD_GPU_{operation}", "HOROVOD_GPU_OPERATIONS")
    return field(default="auto", metadata=about)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of one context; the constructor raises `ConfigError` for an invalid value."""

    fusion_threshold: int = field(
        default=128 << 20,
        metadata=_about(
            "performance", "bytes", "largest bucket of fused tensors; 0: no fusion", "HOROVOD_FUSION_THRESHOLD"
        ),
    )
    cache_capacity: int = field(
        default=16384,
        metadata=_about(
            "performance",
            "count",
            "agreed requests that ranks remember; 0: negotiate each one",
            "HOROVOD_CACHE_CAPACITY",
        ),
    )
    spin: timedelta = field(
        default=timedelta(microseconds=100),
        metadata=_about("performance", "duration", "how long a waiting thread spins before it sleeps"),
    )
    collective_timeout: timedelta = field(
        default=timedelta(seconds=600),
        metadata=_about("time limits", "duration", "how long an operation waits for the other ranks; 0: no limit"),
    )
    heartbeat: timedelta = field(
        default=timedelta(seconds=3),
        metadata=_about(
            "time limits", "duration", "longest silence of a rank on another host before it counts as lost; 0: no limit"
        ),
    )
    start_timeout: timedelta = field(
        default=timedelta(seconds=120),
        metadata=_about("time limits", "duration", "how long ranks wait for others at init", "HOROVOD_START_TIMEOUT"),
    )
    timeline: str | None = field(
        default=None,
        metadata=_about(
            "timeline and log", "text", "file for the trace; DYNAMIC: idle until start_timeline", "HOROVOD_TIMELINE"
        ),
    )
    timeline_mark_cycles: bool = field(
        default=False,
        metadata=_about("timeline and log", "flag", "mark each plan in the trace", "HOROVOD_TIMELINE_MARK_CYCLES"),
    )
    log_level: str = field(
        default="warning",
        metadata=_about("timeline and log", "level", f"one of {', '.join(LOG_LEVELS)}", "HOROVOD_LOG_LEVEL"),
    )
    stall_check_time: timedelta = field(
        default=timedelta(seconds=60),
        metadata=_about(
            "time limits",
            "duration",
            "warn when some ranks wait this long for others",
            "HOROVOD_STALL_CHECK_TIME_SECONDS",
        ),
    )
    stall_shutdown_time: timedelta = field(
        default=timedelta(0),
        metadata=_about(
            "time limits",
            "duration",
            "fail an operation that some ranks wait for this long; 0: use collective_timeout",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        ),
    )
    stall_check_disable: bool = field(
        default=False, metadata=_about("time limits", "flag", "never look for stalls", "HOROVOD_STALL_CHECK_DISABLE")
    )
    interface: str | None = field(
        default=None,
        metadata=_about(
            "network", "text", "address or network interface that listeners bind, or a list", "HOROVOD_GLOO_IFACE"
        ),
    )
    fabric: str = field(
        default="auto",
        metadata=_about(
            "network",
            "fabric",
            "transport of tensors; tcp: and shared memory; mpi: of mpirun; auto: mpi if hosts have an interconnect",
            "HOROVOD_CPU_OPERATIONS",
        ),
    )
    mpi_library: str | None = field(
        default=None,
        metadata=_about(
            "network", "text", "file of the MPI library of mpirun, for meeting and for fabric=mpi; default: found"
        ),
    )
    gpu_allreduce: str = _route(
        "ALLREDUCE", "allreduces of tensors on GPUs; auto: NCCL where each rank has a GPU of its own, else host memory"
    )
    gpu_allgather: str = _route("ALLGATHER", "the same for allgathers")
    gpu_alltoall: str = _route("ALLTOALL", "the same for alltoalls")
    gpu_reducescatter: str = _route("REDUCESCATTER", "the same for reducescatters")
    gpu_broadcast: str = _route("BROADCAST", "the same for broadcasts")
    rendezvous_folder: str | None = field(
        default=None,
        metadata=_about("network", "text", "folder of all hosts by which ranks of srun meet; default: ~/.farandole"),
    )
    slot_bytes: int = field(
        default=128 << 10, metadata=_about("performance", "bytes", "chunk of a shared-memory transfer")
    )
    link_chunk: int = field(
        default=256 << 10, metadata=_about("network", "bytes", "largest chunk of a transfer between hosts, up to 1 MiB")
    )
    link_small: int = field(
        default=64 << 10,
        metadata=_about(
            "network", "bytes", "an allreduce between hosts takes one step while each rank receives at most this"
        ),
    )
    hierarchical: bool = field(
        default=True,
        metadata=_about("network", "flag", "reduce within hosts first, then between them, if all run as many ranks"),
    )
    torch_env: bool = field(
        default=True,
        metadata=_about("launch", "flag", "give ranks the variables of torchrun: RANK, WORLD_SIZE, MASTER_ADDR, ..."),
    )
    autotune: bool = field(
        default=False,
        metadata=_about("autotune", "flag", "search for good settings while the job runs", "HOROVOD_AUTOTUNE"),
    )
    autotune_log: str | None = field(
        default=None,
        metadata=_about(
            "autotune",
            "text",
            "file to which rank 0 adds samples, and from whose result the next job starts",
            "HOROVOD_AUTOTUNE_LOG",
        ),
    )
    autotune_warmup_samples: int = field(
        default=3,
        metadata=_about(
            "autotune", "count", "samples that autotune leaves out at the start", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES"
        ),
    )
    autotune_steps_per_sample: int = field(
        default=10,
        metadata=_about(
            "autotune", "count", "steps that autotune measures for one sample", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"
        ),
    )
    autotune_max_samples: int = field(
        default=20,
        metadata=_about(
            "autotune",
            "count",
            "samples that autotune takes before it confirms the result",
            "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        ),
    )
    # The names of the settings that the user has set, even to their defaults: autotune does not change them.
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for setting in self.settings():
            _check_type(setting, getattr(self, setting.name))
        if self.start_timeout <= timedelta(0):
            raise ConfigError("start_timeout", f"must be > 0, got {self.start_timeout.total_seconds():g} s")
        for name in ("slot_bytes", "link_chunk"):
            size = getattr(self, name)
            if size < 4096 or size % 64:
                raise ConfigError(name, f"must be at least 4096 and a multiple of 64, got {size}")
        for name in ("autotune_steps_per_sample", "autotune_max_samples"):
            if getattr(self, name) < 1:
                raise ConfigError(name, "must be >= 1, got 0")
        if timedelta(0) < self.stall_shutdown_time < self.stall_check_time:
            problem = f"must be 0 or at least stall_check_time ({self.stall_check_time.total_seconds():g} s)"
            raise ConfigError("stall_shutdown_time", f"{problem}, got {self.stall_shutdown_time.total_seconds():g} s")

    def leaves_free(self, name: str) -> bool:
        """Return whether the setting `name` was left at its default."""
        return name not in self.given and all(
            getattr(self, name) == setting.default for setting in self.settings() if setting.name == name
        )

    @property
    def stall_seconds(self) -> float:
        """Seconds after which a stall is reported; 0: never."""
        return 0.0 if self.stall_check_disable else self.stall_check_time.total_seconds()

    @property
    def patience_seconds(self) -> float:
        """Seconds after which an operation fails that some ranks have not submitted; 0: never."""
        shutdown = 0.0 if self.stall_check_disable else self.stall_shutdown_time.total_seconds()
        return min((each for each in (self.collective_timeout.total_seconds(), shutdown) if each), default=0.0)

    @classmethod
    def settings(cls) -> tuple[Setting, ...]:
        """Describe each field, for the command line and the reference."""
        return tuple(
            Setting(
                name=each.name,
                topic=each.metadata["topic"],
                kind=each.metadata["kind"],
                default=cast(Value, each.default),
                help=each.metadata["help"],
                variables=(f"FARANDOLE_{each.name.upper()}", *each.metadata["horovod"]),
            )
            for each in fields(cls)
            if each.metadata
        )

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None, **arguments: Value) -> Self:
        """Take each setting from `arguments`, else from the environment, else its default.

        An argument of None counts as not given; a text is read like an environment variable, a number for a duration is
        seconds. Raises `ConfigError` for an unknown name or an impossible value."""
        env = os.environ if env is None else env
        settings = {setting.name: setting for setting in cls.settings()}
        for name in arguments:
            if name not in settings:
                raise ConfigError(name, f"no such setting; the settings are {', '.join(settings)}")
        values: dict[str, Value] = {}
        for name, setting in settings.items():
            given = arguments.get(name)
            value = setting.read(env) if given is None else _from_argument(setting, given)
            if value is not None:
                values[name] = value
        known = {variable for setting in settings.values() for variable in setting.variables}
        if ignored := ignored_variables(env, known):
            log.warning("these environment variables have no effect: %s", "; ".join(ignored))
        # mypy cannot see through the mapping; __post_init__ checks each type.
        return cls(**values, given=frozenset(values))  # type: ignore[arg-type]

    def environment(self) -> dict[str, str]:
        """Return the settings that were given, or differ from their defaults, as variables for a child process."""
        return {
            setting.variables[0]: setting.spell(getattr(self, setting.name))
            for setting in self.settings()
            if not self.leaves_free(setting.name)
        }


def _parse(kind: str, text: str, source: str) -> Value:
    word = text.strip().lower()
    if kind == "text":
        return text
    if kind in _CHOICES:
        word = _CHOICE_OF.get((kind, word), word)
        if word not in _CHOICES[kind]:
            raise ConfigError(source, f"unknown {kind} {text!r}; use one of {', '.join(_CHOICES[kind])}")
        return word
    if kind == "flag":
        if word not in _YES + _NO:
            raise ConfigError(source, f"{text!r} is neither yes ({', '.join(_YES)}) nor no ({', '.join(_NO)})")
        return word in _YES
    if kind == "duration":
        match = _DURATION.fullmatch(word)
        if match is None:
            raise ConfigError(source, f"{text!r} is no duration; write seconds, or a number with us, ms, s, m or h")
        return _seconds(float(match[1]) * _SECONDS[match[2]], source)
    match = _SIZE.fullmatch(word)
    if match is None or (kind == "count" and match[2]):
        units = "" if kind == "count" else ", alone or with KB, MB, GB, KiB, MiB or GiB"
        raise ConfigError(source, f"{text!r} is no {kind}; write a whole number >= 0{units}")
    if len(match[1]) > 20:
        raise ConfigError(source, f"{text[:20]!r}... has {len(match[1])} digits, more than any setting can have")
    return int(match[1]) * _BYTES[match[2]]


def _seconds(number: float, source: str) -> timedelta:
    try:
        return timedelta(seconds=number)
    except (OverflowError, ValueError) as error:
        raise ConfigError(source, f"{number} s is no duration: {error}") from error


def _from_argument(setting: Setting, given: Value) -> Value:
    if isinstance(given, str):
        return setting.parse(given)
    if setting.kind == "duration" and isinstance(given, (int, float)) and not isinstance(given, bool):
        return _seconds(given, setting.name)
    return given


def _check_type(setting: Setting, value: object) -> None:
    kind, name = setting.kind, setting.name
    if kind in ("bytes", "count"):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(name, f"must be a whole number, got {value!r}")
        if value < 0:
            raise ConfigError(name, f"must be >= 0, got {value}")
        largest = LARGEST_OF.get(name, LARGEST[kind])
        if value > largest:
            raise ConfigError(name, f"must be at most {largest}, got {value}")
    elif kind == "duration":
        if not isinstance(value, timedelta):
            raise ConfigError(name, f"must be a timedelta, got {value!r}")
        if value < timedelta(0):
            raise ConfigError(name, f"must be >= 0, got {value.total_seconds():g} s")
        if value > LONGEST:
            raise ConfigError(name, f"must be at most {LONGEST.days} days, got {value.total_seconds():g} s")
    elif kind == "flag":
        if not isinstance(value, bool):
            raise ConfigError(name, f"must be True or False, got {value!r}")
    elif kind == "text":
        if value is not None and (not isinstance(value, str) or not value or "\0" in value):
            raise ConfigError(name, f"must be a non-empty text or None, got {value!r}")
    elif not isinstance(value, str):
        raise ConfigError(name, f"must be a text, got {value!r}")
    elif value not in _CHOICES[kind]:
        raise ConfigError(name, f"unknown {kind} {value!r}; use one of {', '.join(_CHOICES[kind])}")
