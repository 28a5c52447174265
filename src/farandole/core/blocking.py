"""The forms that return a new tensor when it is there. A framework that differentiates overrides them."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from farandole.core.process_sets import ProcessSet
from farandole.core.requests import Requests

__all__ = ["Blocking"]

T = TypeVar("T")


class Blocking(Generic[T]):
    """One method per kind of operation, each of which blocks until every rank has asked."""

    def __init__(self, requests: Requests[T]) -> None:
        self.requests = requests

    def allreduce(
        self, tensor: T, name: str | None, op: int, prescale: float, postscale: float, members: ProcessSet
    ) -> T:
        """Return the reduction."""
        return self.requests.reduce(tensor, name, op, prescale, postscale, members, write=False)

    def grouped_allreduce(
        self, tensors: Sequence[T], name: str | None, op: int, prescale: float, postscale: float, members: ProcessSet
    ) -> list[T]:
        """Return the reductions of a group."""
        return self.requests.reduce_group(tensors, name, op, prescale, postscale, members, write=False)

    def allgather(self, tensor: T, name: str | None, members: ProcessSet) -> T:
        """Return the ranks' rows joined."""
        return self.requests.gather(tensor, name, members, now=True).wait()

    def grouped_allgather(self, tensors: Sequence[T], name: str | None, members: ProcessSet) -> list[T]:
        """Return the ranks' rows joined, for each tensor of a group."""
        return self.requests.start_gather_group(tensors, name, members).wait()

    def broadcast(self, tensor: T, root: int, name: str | None, members: ProcessSet) -> T:
        """Return the root's tensor."""
        return self.requests.broadcast(tensor, root, name, members, write=False, now=True).wait()

    def alltoall(self, tensor: T, splits: object, name: str | None, members: ProcessSet) -> tuple[T, T]:
        """Return the rows sent to this rank, and how many came from each."""
        return self.requests.exchange(tensor, splits, name, members, now=True).wait()

    def reducescatter(
        self, tensor: T, name: str | None, op: int, prescale: float, postscale: float, members: ProcessSet
    ) -> T:
        """Return this rank's rows of the reduction."""
        return self.requests.scatter(tensor, name, op, prescale, postscale, members, now=True).wait()

    def grouped_reducescatter(
        self, tensors: Sequence[T], name: str | None, op: int, prescale: float, postscale: float, members: ProcessSet
    ) -> list[T]:
        """Return this rank's rows of the reductions of a group."""
        return self.requests.start_scatter_group(tensors, name, op, prescale, postscale, members).wait()
