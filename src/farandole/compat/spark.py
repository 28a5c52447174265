"""The function `horovod.spark.run`, its backend, and `HorovodRunner`, with compat installed on their ranks."""

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar

from farandole.compat.answering import answering
from farandole.compat.output import tagged
from farandole.estimators.backend import Backend, default_num_proc
from farandole.estimators.backend import SparkBackend as OwnBackend
from farandole.launch.environment import without_torch
from farandole.spark.jobs.runner import HorovodRunner as Runner
from farandole.spark.jobs.session import run as run_in_spark

__all__ = ["Backend", "HorovodRunner", "SparkBackend", "default_num_proc", "run"]

T = TypeVar("T")


def run(fn: Callable[..., T], *args: object, **kwargs: object) -> list[T]:
    given = inspect.signature(run_in_spark).bind(answering(fn), *args, **kwargs)
    given.apply_defaults()
    named = given.arguments
    timestamp = named.pop("prefix_output_with_timestamp")
    named["env"] = without_torch(named["env"] or {})
    for stream in ("stdout", "stderr"):
        named[stream] = tagged(stream, named[stream], timestamp)
    return run_in_spark(**named)


functools.update_wrapper(run, run_in_spark)  # for its signature and docstring


class HorovodRunner(Runner):
    """The class `sparkdl.HorovodRunner`; see `farandole.spark.HorovodRunner`."""

    def run(self, main: Callable[..., T], **kwargs: object) -> T:
        """Call `main(**kwargs)` on every rank and return rank 0's value."""
        return super().run(answering(main), **kwargs)


class SparkBackend(OwnBackend):
    """The class `horovod.spark.common.backend.SparkBackend`; see `farandole.spark.backend.SparkBackend`."""

    def _call(self, fn: Callable[..., T], *args: object, **kwargs: object) -> list[T]:
        return run(fn, *args, **kwargs)
