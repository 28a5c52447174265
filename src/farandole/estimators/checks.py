"""Checks of estimators' parameters. Each returns the value in its final type, or raises `Refused`."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeGuard, TypeVar, cast

import numpy as np
from pyspark.resource import ResourceProfile

from farandole.estimators.backend import Backend
from farandole.estimators.data_module import DataModule
from farandole.estimators.history import EpochLogger
from farandole.estimators.store import FilesystemStore

T = TypeVar("T")


class Refused(Exception):
    """A value is wrong, for the reason in the text. The parameter raises it as a `ConfigError`, with its name."""


def anything(value: object) -> object:
    """Accept any value."""
    return value


def instance_of(kind: type[T], expected: str, *, named: Callable[[object], str] = repr) -> Callable[[object], T]:
    """Return a check for objects of `kind`, which are `expected`; errors show other values as `named` does."""

    def check(value: object) -> T:
        if not isinstance(value, kind):
            raise Refused(f"must be {expected}, got {named(value)}")
        return value

    return check


def type_name(value: object) -> str:
    """Return the name of the value's class."""
    return type(value).__name__


flag = instance_of(bool, "True or False")
text = instance_of(str, "a text")
profile = instance_of(ResourceProfile, "what ResourceProfileBuilder().build gives")
store = instance_of(FilesystemStore, "what Store.create(...) returns")


def at_least(least: int) -> Callable[[object], int]:
    """Return a check for whole numbers, which may be of NumPy or floats such as 32.0, as for pyspark.ml."""

    def check(value: object) -> int:
        if not _is_real(value) or not float(value).is_integer() or value < least:
            raise Refused(f"must be a whole number >= {least}, got {value!r}")
        return int(value)

    return check


def _is_real(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _items(value: object) -> list[object]:
    """Return the items of a list, a tuple or an array of NumPy; of other objects none."""
    given = value.tolist() if isinstance(value, np.ndarray) and value.ndim == 1 else value
    return list(given) if isinstance(given, (list, tuple)) else []


def names_of_columns(value: object) -> list[str]:
    """Check a list of column names."""
    names = [each for each in _items(value) if isinstance(each, str)]
    if not names or len(names) < len(_items(value)):
        raise Refused(f"must be a list of column names, got {value!r}")
    return names


def data_module(value: object) -> Callable[..., object]:
    """Check a subclass of `DataModule`."""
    if not isinstance(value, type) or not issubclass(value, DataModule):
        raise Refused(f"must be a subclass of farandole.spark.data_module.DataModule, got {value!r}")
    return value


def loggers(value: object) -> list[EpochLogger]:
    """Check a list of objects with `log_epoch`; one object counts as a list of one."""
    given = objects(value)
    for each in given:
        if not callable(getattr(each, "log_epoch", None)) or isinstance(each, type):
            raise Refused(f"must be objects with a method log_epoch, got {each!r}")
    return cast(list[EpochLogger], given)


def objects(value: object) -> list[object]:
    """Return a list; one object counts as a list of one."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def mapping(value: object) -> dict[str, object]:
    """Check a dict with texts as keys."""
    if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
        raise Refused(f"must be a dict with names as keys, got {value!r}")
    return dict(value)


def functions(arguments: str, *, classes: bool = False) -> Callable[[object], list[Callable[..., Any]]]:
    """Return a check for functions of `arguments`, one or a list; `classes` count as functions that make objects."""

    def check(value: object) -> list[Callable[..., Any]]:
        given = objects(value)
        if not all(callable(each) for each in given):
            raise Refused(f"must be a function of {arguments}, or a list of them, got {value!r}")
        for each in given:
            if isinstance(each, type) and not classes:
                raise Refused(f"must be a function of {arguments}, got the class {each.__name__}: give an object of it")
        return cast(list[Callable[..., Any]], given)

    return check


def function(expected: str) -> Callable[[object], Callable[..., object]]:
    """Return a check for objects that can be called, which are `expected`."""

    def check(value: object) -> Callable[..., object]:
        if not callable(value):
            raise Refused(f"must be {expected}, got {value!r}")
        return value

    return check


def edit_fields(value: object) -> list[tuple[object, ...]]:
    """Check the columns that `transformation_fn` changes or adds: tuples, or fields of Petastorm."""
    fields = [tuple(each) for each in value] if isinstance(value, (list, tuple)) and _are_fields(value) else []
    if not fields or not all(_is_field(each) for each in fields):
        raise Refused(f"must be a list of (name, NumPy type, shape, nullable), got {value!r}")
    return fields


def _are_fields(value: Sequence[object]) -> bool:
    return all(isinstance(each, (list, tuple)) and len(each) >= 3 for each in value)


def _is_field(field: tuple[object, ...]) -> bool:
    try:
        np.dtype(field[1])  # type: ignore[call-overload]  # raises an error for what is no type
    except TypeError:
        return False
    sizes = isinstance(field[2], (list, tuple)) and all(each is None or isinstance(each, int) for each in field[2])
    return isinstance(field[0], str) and sizes


def weights(value: object) -> list[float]:
    """Check the weights of losses."""
    given = [float(each) if _is_real(each) else -1.0 for each in _items(value)]
    if not given or not all(each >= 0 for each in given):
        raise Refused(f"must be a list of numbers >= 0, got {value!r}")
    return given


def shapes(of: str) -> Callable[[object], list[tuple[int, ...]]]:
    """Return a check for a list of shapes, one per `of`. It adds a missing -1 in front of a shape."""

    def check(value: object) -> list[tuple[int, ...]]:
        given = [tuple(each) for each in value] if isinstance(value, (list, tuple)) else []
        whole = [shape if shape[:1] == (-1,) else (-1, *shape) for shape in given if shape]
        if not given or len(whole) < len(given) or any(min(shape[1:], default=1) <= 0 for shape in whole):
            raise Refused(f"must be one shape per {of}, -1 first, got {value!r}")
        return whole

    return check


def backend(value: object) -> Backend:
    """Check a backend: an object with the methods of `Backend`."""
    if isinstance(value, type) or not all(callable(getattr(value, each, None)) for each in ("run", "num_processes")):
        raise Refused(f"must be a SparkBackend, or an object with the methods run and num_processes, got {value!r}")
    return cast(Backend, value)


def validation(value: object) -> float | str:
    """Check a fraction, which becomes a float, or the name of a column."""
    if isinstance(value, str):
        return value
    if _is_real(value) and 0 <= value < 1:
        return float(value)
    raise Refused(f"must be a fraction in [0, 1) or the name of a column, got {value!r}")


def verbose(value: object) -> int:
    """Check a level of output."""
    if value not in (0, 1, 2) or isinstance(value, bool):
        raise Refused(f"must be 0 (quiet), 1 (progress) or 2 (all output of the ranks), got {value!r}")
    return at_least(0)(value)
