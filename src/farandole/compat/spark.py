"""The function `horovod.spark.run`, its backend, and `HorovodRunner`, with compat installed on their ranks."""

import functools
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from farandole.compat.hook import install
from farandole.launch.pickling import dumps
from farandole.spark.backend import Backend, default_num_proc
from farandole.spark.backend import SparkBackend as OwnBackend
from farandole.spark.runner import HorovodRunner as Runner
from farandole.spark.session import run as run_in_spark

__all__ = ["Backend", "HorovodRunner", "SparkBackend", "default_num_proc", "run"]

T = TypeVar("T")


class Answering(functools.partial[T]):
    """A function that installs compat where it is unpickled, before its own modules are imported there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (dumps((self.func, self.args, self.keywords)),)


def _unpickle(data: bytes) -> functools.partial[object]:
    install()
    func, args, keywords = pickle.loads(data)
    return functools.partial(func, *args, **keywords)


def answering(fn: Callable[..., T]) -> Callable[..., T]:
    """Return the function with compat installed wherever it is unpickled."""
    # It has the function's name, which jobs and their errors show.
    return functools.update_wrapper(Answering(fn), fn, updated=())


def run(fn: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
    return run_in_spark(answering(fn), *args, **kwargs)


functools.update_wrapper(run, run_in_spark)  # for its signature and docstring


class HorovodRunner(Runner):
    """The class `sparkdl.HorovodRunner`; see `farandole.spark.HorovodRunner`."""

    def run(self, main: Callable[..., T], **kwargs: object) -> T:
        """Call `main(**kwargs)` on every rank and return rank 0's value."""
        return super().run(answering(main), **kwargs)


class SparkBackend(OwnBackend):
    """The class `horovod.spark.common.backend.SparkBackend`; see `farandole.spark.backend.SparkBackend`."""

    def _call(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        return run(fn, *args, **kwargs)
