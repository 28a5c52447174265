"""Backends under Horovod's names: the number and the environment of an estimator's ranks."""

import copy
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from farandole.config import Config
from farandole.errors import ConfigError
from farandole.masking import without_secrets
from farandole.spark.jobs.chosen import application_of
from farandole.spark.jobs.session import active_session, check_transport, interface_of, run, shown_on
from farandole.spark.jobs.task_settings import TaskSettings

T = TypeVar("T")

log = logging.getLogger(__name__)

_CALL_ARGUMENTS = ("fn", "args", "kwargs", "num_proc", "env")


def default_num_proc() -> int:
    """Return how many ranks a Spark job has by default."""
    return application_of(active_session()).parallelism()


def saved_environment(env: Mapping[str, str], setter: str) -> dict[str, str]:
    """Return `env` to be saved in a file, without the variables whose names mark them as secret.

    Logs a warning that names those and the estimator's method to set them again, `setter`."""
    kept = without_secrets(env)
    if hidden := sorted(set(env) - set(kept)):
        log.warning("an estimator is saved without the variables %s; set them again with %s", ", ".join(hidden), setter)
    return {name: env[name] for name in kept}


class Backend:
    """Base of a user's backend, which runs a function on all ranks; any object with these methods will do.

    The function calls `init()`, so its processes must be ranks of one job with `num_processes()` ranks, such as those
    of `farandole.run`."""

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

    An estimator takes the number of ranks, their environment and these arguments from its backend. The ranks are tasks
    of the estimator's own job, which feeds them its DataFrame; their output is shown if `verbose`, `stdout` or `stderr`
    is given here. Raises `ConfigError` for arguments that `run` does not know or refuses."""

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        known = [name for name in inspect.signature(run).parameters if name not in _CALL_ARGUMENTS]
        if unknown := [name for name in kwargs if name not in known]:
            raise ConfigError(", ".join(unknown), f"no such argument; a SparkBackend takes {', '.join(known)}")
        check_transport(kwargs.get("use_mpi") or kwargs.get("extra_mpi_args"), kwargs.pop("use_gloo", None))
        self._num_proc = num_proc or default_num_proc() * int(kwargs.get("ranks_per_task", 1))
        self.env, self._kwargs = dict(env or {}), kwargs

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

    def without_secrets(self) -> Self:
        """Return a copy to be saved in a file, without variables of `env` whose names mark them as secret."""
        bare = copy.copy(self)
        bare.env = saved_environment(self.env, "setBackend")
        return bare

    @property
    def is_plain(self) -> bool:
        """Return whether `run` is this class's, and not a subclass's."""
        return type(self).run is SparkBackend.run

    def tasks(self) -> TaskSettings:
        """Return the settings of an estimator's tasks."""
        given = self._kwargs
        timeout, nics = given.get("start_timeout"), given.get("nics")
        files, verbose = (given.get("stdout"), given.get("stderr")), given.get("verbose")
        stamped = bool(given.get("prefix_output_with_timestamp"))
        asked = verbose if verbose is not None else True if files != (None, None) else None
        return TaskSettings(
            profile=given.get("resource_profile"),
            ranks_per_task=given.get("ranks_per_task", 1),
            executable=given.get("executable") or "",
            start_timeout=None if timeout is None else Config.from_environment({}, start_timeout=timeout).start_timeout,
            show=shown_on(*files, stamped) if stamped or files != (None, None) else None,
            shows_lines=None if asked is None else bool(asked),
            env=self.env if nics is None else {**self.env, "FARANDOLE_INTERFACE": interface_of(nics)},
        )

    def _call(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        return run(fn, *args, **kwargs)
