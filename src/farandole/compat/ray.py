"""The class `horovod.ray.RayExecutor`, with compat installed on its ranks."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from farandole.compat.answering import answering
from farandole.launch.environment import without_torch
from farandole.ray.executor import RayExecutor as Executor

__all__ = ["RayExecutor"]

T = TypeVar("T")


class RayExecutor(Executor):
    """The class `horovod.ray.RayExecutor`; see `farandole.ray.RayExecutor`."""

    def _start_actors(self, extra: Mapping[str, str]) -> None:
        super()._start_actors(without_torch(extra))

    def _prepared(self, fn: Callable[..., T]) -> Callable[..., T]:
        return answering(super()._prepared(fn))
