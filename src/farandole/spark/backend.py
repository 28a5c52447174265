"""Number and environment of an estimator's ranks, by Horovod's names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from farandole.spark.chosen import application_of
from farandole.spark.driver_log import Show
from farandole.spark.session import active_session, run, shown_on

__all__ = ["Backend", "SparkBackend", "default_num_proc"]

T = TypeVar("T")


def default_num_proc() -> int:
    """Return how many ranks a Spark job has by default."""
    return application_of(active_session()).parallelism()


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
    """Backend of the session's own tasks; `kwargs` are further arguments of `farandole.spark.run`.

    An estimator takes the number of ranks, their environment and the files for their output from it. Its ranks are
    tasks of its own job, which its DataFrame feeds."""

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        self._num_proc, self.env, self._kwargs = num_proc or default_num_proc(), dict(env or {}), kwargs

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[T]:
        """Return the values of `fn(*args, **kwargs)` by rank."""
        return self._call(fn, args, kwargs, num_proc=self._num_proc, env={**self.env, **(env or {})}, **self._kwargs)

    def num_processes(self) -> int:
        """Return the number of ranks."""
        return self._num_proc

    def show(self) -> Show | None:
        """Return what writes the ranks' output to `stdout` and `stderr`; None if neither was given."""
        files = self._kwargs.get("stdout"), self._kwargs.get("stderr")
        if files == (None, None):
            return None
        return shown_on(*files, bool(self._kwargs.get("prefix_output_with_timestamp")))

    def _call(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        return run(fn, *args, **kwargs)
