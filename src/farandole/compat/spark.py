"""The functions `run` and `run_elastic` of `horovod.spark`, its backend, and `HorovodRunner`, with compat on ranks."""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from farandole.compat.answering import answering
from farandole.compat.output import tagged
from farandole.estimators.backend import Backend, default_num_proc
from farandole.estimators.backend import SparkBackend as OwnBackend
from farandole.launch.environment import without_torch
from farandole.spark.jobs.elastic import run_elastic as elastic_in_spark
from farandole.spark.jobs.runner import HorovodRunner as Runner
from farandole.spark.jobs.session import run as run_in_spark

__all__ = ["Backend", "HorovodRunner", "SparkBackend", "default_num_proc", "run", "run_elastic"]

T = TypeVar("T")


def run(fn: Callable[..., T], *args: object, **kwargs: object) -> list[T]:
    return run_in_spark(**_as_of_horovod(run_in_spark, fn, args, kwargs))


functools.update_wrapper(run, run_in_spark)  # for its signature and docstring


_OLD_NAMES = {"min_np": "min_num_proc", "max_np": "max_num_proc"}
_OF_ELASTIC = inspect.signature(elastic_in_spark)
_OLD = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in _OLD_NAMES]
_SIGNATURE = _OF_ELASTIC.replace(parameters=[*_OF_ELASTIC.parameters.values(), *_OLD])


def run_elastic(*args: object, **kwargs: object) -> list[object]:
    given = _SIGNATURE.bind(*args, **kwargs).arguments
    for old in [old for old in _OLD_NAMES if old in given]:
        warnings.warn(f"{old}= is deprecated; use {_OLD_NAMES[old]}=", DeprecationWarning, stacklevel=2)
        given[_OLD_NAMES[old]] = given.pop(old)
    return elastic_in_spark(**_as_of_horovod(elastic_in_spark, given.pop("fn"), (), given))


functools.update_wrapper(run_elastic, elastic_in_spark)
vars(run_elastic)["__signature__"] = _SIGNATURE


def _as_of_horovod(
    function: Callable[..., object], fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, Any]:
    """Return the arguments of `function` by name, for ranks with compat and lines as Horovod writes them."""
    given = inspect.signature(function).bind(answering(fn), *args, **kwargs)
    given.apply_defaults()
    named = given.arguments
    timestamp = named.pop("prefix_output_with_timestamp")
    named["env"] = without_torch(named["env"] or {})
    for stream in ("stdout", "stderr"):
        named[stream] = tagged(stream, named[stream], timestamp)
    return named


class HorovodRunner(Runner):
    """The class `sparkdl.HorovodRunner`; see `farandole.spark.HorovodRunner`."""

    def run(self, main: Callable[..., T], **kwargs: object) -> T:
        """Call `main(**kwargs)` on every rank and return rank 0's value."""
        return super().run(answering(main), **kwargs)


class SparkBackend(OwnBackend):
    """The class `horovod.spark.common.backend.SparkBackend`; see `farandole.spark.backend.SparkBackend`."""

    def _call(self, fn: Callable[..., T], *args: object, **kwargs: object) -> list[T]:
        return run(fn, *args, **kwargs)
