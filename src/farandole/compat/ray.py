"""The classes `RayExecutor` and `ElasticRayExecutor` of `horovod.ray`, with compat installed on their ranks."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from farandole.compat.answering import answering
from farandole.launch.environment import without_torch
from farandole.ray.elastic import ElasticRayExecutor as ElasticExecutor
from farandole.ray.elastic import ElasticSettings
from farandole.ray.executor import RayExecutor as Executor
from farandole.refusals import IGNORED_ARGUMENTS

log = logging.getLogger(__name__)

T = TypeVar("T")


class RayExecutor(Executor):
    """The class `horovod.ray.RayExecutor`; see `farandole.ray.RayExecutor`."""

    def _start_actors(self, extra: Mapping[str, str]) -> None:
        super()._start_actors(without_torch(extra))

    def _prepared(self, fn: Callable[..., T]) -> Callable[..., T]:
        return answering(super()._prepared(fn))


class ElasticRayExecutor(ElasticExecutor):
    """The class `horovod.ray.ElasticRayExecutor`; see `farandole.ray.ElasticRayExecutor`."""

    @staticmethod
    def create_settings(*args: Any, verbose: int | bool | None = None, **kwargs: Any) -> ElasticSettings:
        """Return settings; `verbose`, which Horovod's examples pass, is ignored with a warning."""
        if verbose is not None:
            log.warning("verbose has no effect: %s", IGNORED_ARGUMENTS["verbose"])
        return ElasticExecutor.create_settings(*args, **kwargs)

    def run(self, worker_fn: Callable[[], T], callbacks: Sequence[object] | None = None) -> list[T]:
        """Call `worker_fn()` on the ranks and return the values of the last ranks."""
        self._env = without_torch(self._env)
        return super().run(answering(worker_fn), callbacks)
