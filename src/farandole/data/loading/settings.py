"""Checks of loaders' settings, before any work starts."""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import get_args

from farandole.data.formats.source import Source
from farandole.data.loading.plans import Policy
from farandole.errors import ConfigError


def check_count(setting: str, value: object, least: int) -> None:
    """Raise `ConfigError` unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(setting, f"must be an integer, got {value!r}")
    if int(value) < least:
        raise ConfigError(setting, f"must be >= {least}, got {value}")


def check_seconds(setting: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is a number above 0."""
    if not isinstance(value, Real) or not float(value) > 0:
        raise ConfigError(setting, f"must be > 0 seconds, got {value!r}")


def check_source(source: object) -> None:
    """Raise `ConfigError` unless `source` is a `Source`."""
    if not isinstance(source, Source):
        problem = f"must be a Source, such as ParquetSource(url) or your own class derived from it, got {source!r}"
        raise ConfigError("source", problem)


def check_loader(
    batch_size: object,
    policy: object,
    columns: Sequence[str] | None,
    rank: object,
    size: object,
    of_all_ranks: bool = False,
) -> None:
    """Raise `ConfigError` for an invalid argument of a loader."""
    check_count("batch_size", batch_size, 1)
    if of_all_ranks and policy != "join":
        raise ConfigError("policy", f"must be 'join' with of_all_ranks=True, as ranks share unevenly; got {policy!r}")
    if policy not in get_args(Policy):
        raise ConfigError("policy", f"must be one of {', '.join(get_args(Policy))}, got {policy!r}")
    if isinstance(columns, str) or not all(isinstance(name, str) for name in columns or ()):
        raise ConfigError("columns", f"must be a list of names, got {columns!r}")
    check_count("size", size, 1)
    check_count("rank", rank, 0)
    if not rank < size:  # type: ignore[operator]
        raise ConfigError("rank", f"must be in 0..{size - 1}, got {rank}")  # type: ignore[operator]
