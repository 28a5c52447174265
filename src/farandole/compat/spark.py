"""The function `horovod.spark.run`, its backend, and `HorovodRunner`, with compat installed on their ranks."""

import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from farandole.compat.hook import install
from farandole.launch.pickling import dumps
from farandole.spark.runner import HorovodRunner as Runner
from farandole.spark.session import active_session
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


def _answering(fn: Callable[..., T]) -> Callable[..., T]:
    # It has the function's name, which jobs and their errors show.
    return functools.update_wrapper(Answering(fn), fn, updated=())


def run(fn: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
    return run_in_spark(_answering(fn), *args, **kwargs)


functools.update_wrapper(run, run_in_spark)  # for its signature and docstring


class HorovodRunner(Runner):
    """The class `sparkdl.HorovodRunner`; see `farandole.spark.HorovodRunner`."""

    def run(self, main: Callable[..., T], **kwargs: object) -> T:
        """Call `main(**kwargs)` on every rank and return rank 0's value."""
        return super().run(_answering(main), **kwargs)


def default_num_proc() -> int:
    """Return how many ranks a Spark job has by default."""
    return active_session().sparkContext.defaultParallelism


class Backend:
    """Base of a user's backend, which runs a function on all ranks."""

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[T]:
        """Return the values of `fn(*args, **kwargs)` by rank."""
        raise NotImplementedError

    def num_processes(self) -> int:
        """Return the number of ranks."""
        raise NotImplementedError


class SparkBackend(Backend):
    """Backend that calls `run`; `kwargs` are further arguments of `run`."""

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        self._num_proc, self._env, self._kwargs = num_proc or default_num_proc(), env, kwargs

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[T]:
        merged = {**(self._env or {}), **(env or {})}
        return run(fn, args, kwargs, num_proc=self._num_proc, env=merged, **self._kwargs)

    def num_processes(self) -> int:
        return self._num_proc
