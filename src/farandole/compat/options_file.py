"""Reader of Horovod's options file: YAML with two levels, sections and settings, as command line options."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias, TypeVar

from farandole.errors import ConfigError

T = TypeVar("T")
Option: TypeAlias = str | tuple[str, str]

# By section and key: an option that takes the value, or the two options for true and false.
SECTIONS: Mapping[str, Mapping[str, Option]] = {
    "params": {
        "fusion_threshold_mb": "--fusion-threshold-mb",
        "cycle_time_ms": "--cycle-time-ms",
        "cache_capacity": "--cache-capacity",
        "hierarchical_allreduce": ("--hierarchical-allreduce", "--no-hierarchical-allreduce"),
        "hierarchical_allgather": ("--hierarchical-allgather", "--no-hierarchical-allgather"),
        "torus_allreduce": ("--torus-allreduce", "--no-torus-allreduce"),
    },
    "autotune": {
        "enabled": ("--autotune", "--no-autotune"),
        "log_file": "--autotune-log-file",
        "warmup_samples": "--autotune-warmup-samples",
        "steps_per_sample": "--autotune-steps-per-sample",
        "bayes_opt_max_samples": "--autotune-bayes-opt-max-samples",
        "gaussian_process_noise": "--autotune-gaussian-process-noise",
    },
    "timeline": {
        "filename": "--timeline-filename",
        "mark_cycles": ("--timeline-mark-cycles", "--no-timeline-mark-cycles"),
    },
    "stall_check": {
        "enabled": ("--stall-check", "--no-stall-check"),
        "warning_time_seconds": "--stall-check-warning-time-seconds",
        "shutdown_time_seconds": "--stall-check-shutdown-time-seconds",
    },
    "library_options": {
        "mpi_threads_disable": ("--mpi-threads-disable", "--no-mpi-threads-disable"),
        "num_nccl_streams": "--num-nccl-streams",
        "thread_affinity": "--thread-affinity",
        "ccl_bgt_affinity": "--thread-affinity",
        "gloo_timeout_seconds": "--gloo-timeout-seconds",
    },
    "logging": {
        "level": "--log-level",
        "with_timestamp": ("--log-with-timestamp", "--log-without-timestamp"),
        "hide_timestamp": ("--log-hide-timestamp", "--no-log-hide-timestamp"),
    },
}
CONTROLLERS = {"gloo": "--gloo", "mpi": "--mpi", "jsrun": "--jsrun"}

_LINE = re.compile(r"( *)([A-Za-z_][A-Za-z0-9_]*):(?:\s+(\S.*))?")
_QUOTED = re.compile(r"""'([^']*)'|"([^"\\]*)\"""")
_COMMENT = re.compile(r"(^|\s+)#.*$")
_YES, _NO, _NULL = ("true", "yes", "on"), ("false", "no", "off"), ("null", "~")


def read_options(path: Path) -> list[str]:
    """Return the file's options. Raises `ConfigError` naming the line that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError("config_file", f"cannot read {path}: {error.strerror}") from error
    return parse_options(text, str(path))


def parse_options(text: str, source: str) -> list[str]:
    """Return the options of `text`. `source` names the text in errors."""
    words: list[str] = []
    section, depth = "", 0
    for place, indent, key, value in _entries(text, source):
        if indent == 0:
            section, depth = key if value is None else "", 0
            if key == "controller" and value is not None:
                words.append(_one_of(CONTROLLERS, _scalar(value, place), place))
            elif key not in SECTIONS or value is not None:
                known = ", ".join(["controller", *SECTIONS])
                raise ConfigError("config_file", f"{place}: {key!r} is no section; there are {known}")
            continue
        depth = depth or indent
        if not section or indent != depth:
            raise ConfigError("config_file", f"{place}: {key!r} belongs to no section; sections have settings only")
        words += _options(_one_of(SECTIONS[section], key, place), value, f"{place}: {section}.{key}")
    return words


def _entries(text: str, source: str) -> Iterator[tuple[str, int, str, str | None]]:
    for number, line in enumerate(text.splitlines(), 1):
        # A # within quotes does not begin a comment.
        bare = line.rstrip() if re.search(r"""['"].*#.*['"]\s*$""", line) else _COMMENT.sub("", line).rstrip()
        if not bare or bare in ("---", "..."):
            continue
        match = _LINE.fullmatch(bare)
        place = f"{source}, line {number}"
        if match is None:
            raise ConfigError("config_file", f"{place}: {line.strip()!r} cannot be read; write 'key: value' lines")
        yield place, len(match[1]), match[2], match[3]


def _options(option: Option, value: str | None, place: str) -> list[str]:
    text = "null" if value is None else _scalar(value, place)
    if value is None or (text.lower() in _NULL and text == value):
        return []
    if isinstance(option, str):
        return [f"{option}={text}"]  # one word, so that a negative number is not parsed as an option
    if text.lower() not in _YES + _NO:
        raise ConfigError("config_file", f"{place} is {text!r}; write true or false")
    return [option[0] if text.lower() in _YES else option[1]]


def _scalar(value: str, place: str) -> str:
    quoted = _QUOTED.fullmatch(value)
    if quoted is not None:
        return quoted[1] if quoted[1] is not None else quoted[2]
    if value[0] in "'\"[]{}|>&*!%@`,?-" and not re.fullmatch(r"-[\d.].*", value):
        raise ConfigError("config_file", f"{place}: {value!r} cannot be read; write a plain or a quoted value")
    return value


def _one_of(table: Mapping[str, T], key: str, place: str) -> T:
    if key not in table:
        raise ConfigError("config_file", f"{place}: there is no {key!r}; there are {', '.join(table)}")
    return table[key]
