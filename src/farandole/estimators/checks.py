"""Checks of estimators' parameters. Each returns the value in its final type, or raises `ConfigError`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from pyspark.resource import ResourceProfile

from farandole.errors import ConfigError
from farandole.estimators.backend import Backend
from farandole.estimators.data_module import DataModule
from farandole.estimators.store import FilesystemStore


def at_least(name: str, least: int) -> Callable[[object], int]:
    """Return a check for whole numbers."""

    def check(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(name, f"must be a whole number >= {least}, got {value!r}")
        return value

    return check


def names_of_columns(name: str) -> Callable[[object], list[str]]:
    """Return a check for lists of column names."""

    def check(value: object) -> list[str]:
        names = list(value) if isinstance(value, (list, tuple)) else []
        if not names or not all(isinstance(each, str) for each in names):
            raise ConfigError(name, f"must be a list of column names, got {value!r}")
        return names

    return check


def flag(name: str) -> Callable[[object], bool]:
    """Return a check for True and False."""

    def check(value: object) -> bool:
        if not isinstance(value, bool):
            raise ConfigError(name, f"must be True or False, got {value!r}")
        return value

    return check


def text(name: str) -> Callable[[object], str]:
    """Return a check for strings."""

    def check(value: object) -> str:
        if not isinstance(value, str):
            raise ConfigError(name, f"must be a text, got {value!r}")
        return value

    return check


def data_module(value: object) -> Callable[..., Any]:
    """Check a subclass of `DataModule`."""
    if not isinstance(value, type) or not issubclass(value, DataModule):
        raise ConfigError("data_module", f"must be a subclass of farandole.spark.data_module.DataModule, got {value!r}")
    return value


def loggers(value: object) -> list[Any]:
    """Check a list of objects with `log_epoch`; one object counts as a list of one."""
    given = list(value) if isinstance(value, (list, tuple)) else [value]
    for each in given:
        if not callable(getattr(each, "log_epoch", None)) or isinstance(each, type):
            raise ConfigError("loggers", f"must be objects with a method log_epoch, got {each!r}")
    return given


def objects(name: str) -> Callable[[object], list[Any]]:
    """Return a check for lists; one object counts as a list of one."""

    def check(value: object) -> list[Any]:
        return list(value) if isinstance(value, (list, tuple)) else [value]

    return check


def mapping(name: str) -> Callable[[object], dict[str, Any]]:
    """Return a check for dicts with texts as keys."""

    def check(value: object) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
            raise ConfigError(name, f"must be a dict with names as keys, got {value!r}")
        return dict(value)

    return check


def functions(name: str, arguments: str) -> Callable[[object], list[Callable[..., Any]]]:
    """Return a check for functions of `arguments`, one or a list."""

    def check(value: object) -> list[Callable[..., Any]]:
        given = objects(name)(value)
        if not all(callable(each) for each in given):
            raise ConfigError(name, f"must be a function of {arguments}, or a list of them, got {value!r}")
        return given

    return check


def transformation(value: object) -> Callable[[dict[str, Any]], Any]:
    """Check a function of one row."""
    if not callable(value):
        raise ConfigError("transformation_fn", f"must be a function of a row, which is a dict, got {value!r}")
    return value


def edit_fields(value: object) -> list[tuple[Any, ...]]:
    """Check the columns that `transformation_fn` changes or adds: tuples, or fields of Petastorm."""
    fields = [tuple(each) for each in value] if isinstance(value, (list, tuple)) and _are_fields(value) else []
    if not fields or not all(_is_field(each) for each in fields):
        raise ConfigError(
            "transformation_edit_fields", f"must be a list of (name, NumPy type, shape, nullable), got {value!r}"
        )
    return fields


def _are_fields(value: Sequence[object]) -> bool:
    return all(isinstance(each, (list, tuple)) and len(each) >= 3 for each in value)


def _is_field(field: tuple[Any, ...]) -> bool:
    try:
        np.dtype(field[1])
    except TypeError:
        return False
    sizes = isinstance(field[2], (list, tuple)) and all(each is None or isinstance(each, int) for each in field[2])
    return isinstance(field[0], str) and sizes


def weights(value: object) -> list[float]:
    """Check the weights of losses."""
    given = list(value) if isinstance(value, (list, tuple)) else []
    if not given or not all(isinstance(each, (int, float)) and each >= 0 for each in given):
        raise ConfigError("loss_weights", f"must be a list of numbers >= 0, got {value!r}")
    return [float(each) for each in given]


def shapes(name: str, of: str) -> Callable[[object], list[tuple[int, ...]]]:
    """Return a check for a list of shapes, one per `of`. It adds a missing -1 in front of a shape."""

    def check(value: object) -> list[tuple[int, ...]]:
        given = [tuple(each) for each in value] if isinstance(value, (list, tuple)) else []
        whole = [shape if shape[:1] == (-1,) else (-1, *shape) for shape in given if shape]
        if not given or len(whole) < len(given) or any(min(shape[1:], default=1) <= 0 for shape in whole):
            raise ConfigError(name, f"must be one shape per {of}, -1 first, got {value!r}")
        return whole

    return check


def backend(value: object) -> Backend:
    """Check a backend: an object with the methods of `Backend`."""
    if isinstance(value, type) or not all(callable(getattr(value, each, None)) for each in ("run", "num_processes")):
        raise ConfigError(
            "backend", f"must be a SparkBackend, or an object with the methods run and num_processes, got {value!r}"
        )
    return cast(Backend, value)


def profile(name: str) -> Callable[[object], ResourceProfile]:
    """Return a check for resource profiles."""

    def check(value: object) -> ResourceProfile:
        if not isinstance(value, ResourceProfile):
            raise ConfigError(name, f"must be what ResourceProfileBuilder().build gives, got {value!r}")
        return value

    return check


def validation(value: object) -> float | str:
    """Check a fraction, which becomes a float, or the name of a column."""
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1:
        return float(value)
    raise ConfigError("validation", f"must be a fraction in [0, 1) or the name of a column, got {value!r}")


def store(value: object) -> FilesystemStore:
    """Check a store."""
    if not isinstance(value, FilesystemStore):
        raise ConfigError("store", f"must be what Store.create(...) returns, got {value!r}")
    return value


def verbose(value: object) -> int:
    """Check a level of output."""
    if value not in (0, 1, 2) or isinstance(value, bool):
        raise ConfigError("verbose", f"must be 0 (quiet), 1 (progress) or 2 (all output of the ranks), got {value!r}")
    return at_least("verbose", 0)(value)
