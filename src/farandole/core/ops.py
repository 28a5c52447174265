"""The operations as users call them, once for all frameworks."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from farandole.core import default, kinds
from farandole.core.adapter import Adapter
from farandole.core.blocking import Blocking
from farandole.core.compression import Compressor
from farandole.core.handle import Handle
from farandole.core.process_sets import ProcessSet, global_process_set
from farandole.core.reduction import Average, choose_op
from farandole.core.requests import Requests, named

__all__ = ["Operations", "barrier", "join"]

T = TypeVar("T")


class Operations(Generic[T]):
    """The operations for one framework's tensors, with the names, arguments and defaults Horovod's users know.

    Every rank must ask for the same operations under the same names; the order may differ between ranks, except
    for operations without a name, which are matched by their order. A request that can be seen to be wrong on this
    rank alone raises `InvalidRequest` at the call. What only shows when all ranks have asked (`MismatchError`), or
    never (`CollectiveTimeout`, `PeerLost`), is raised by the call that waits.
    """

    def __init__(self, adapter: Adapter[T], blocking: type[Blocking[T]] = Blocking) -> None:
        self.requests = Requests(adapter)
        self.blocking = blocking(self.requests)

    def allreduce(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        compression: Compressor[T] | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Combine `tensor` over all ranks; every rank gets the same result, in a new tensor of the same shape.

        All ranks must have one shape, of any number of dimensions and elements, and one dtype. `op` is Average (the
        default), Sum, Adasum, Min, Max or Product. `prescale_factor` multiplies before the reduction and
        `postscale_factor` after it: in float64 for integers, whose results are truncated toward zero, in float32 for
        float16 and bfloat16, and else in the tensor's own dtype. An integer Average is exact, truncated toward zero.
        Of bool tensors Sum and Max are "or", Product and Min are "and"; the others are refused, and so is Adasum of
        integers.

        Blocks until every rank has asked.
        """
        op = choose_op(op, average)
        if compression is None:
            return self.blocking.allreduce(tensor, name, op, prescale_factor, postscale_factor, process_set)
        smaller, ctx = compression.compress(tensor)
        output = self.blocking.allreduce(smaller, name, op, prescale_factor, postscale_factor, process_set)
        return compression.decompress(output, ctx)

    def allreduce_(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Combine `tensor` over all ranks in place, and return it; as `allreduce`."""
        op = choose_op(op, average)
        return self.requests.reduce(tensor, name, op, prescale_factor, postscale_factor, process_set, write=True)

    def allreduce_async(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[T]:
        """Start what `allreduce` does; `synchronize` returns the new tensor. Never blocks."""
        op = choose_op(op, average)
        return self.requests.start_reduce(tensor, name, op, prescale_factor, postscale_factor, process_set, write=False)

    def allreduce_async_(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[T]:
        """Start what `allreduce_` does; the tensor must be left alone until `synchronize`. Never blocks."""
        op = choose_op(op, average)
        return self.requests.start_reduce(tensor, name, op, prescale_factor, postscale_factor, process_set, write=True)

    def grouped_allreduce(
        self,
        tensors: Sequence[T],
        average: bool | None = None,
        name: str | None = None,
        compression: Compressor[T] | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[T]:
        """Combine several tensors at once, each in a new tensor; none begins before all are ready on all ranks.

        Blocks until every rank has asked.
        """
        op = choose_op(op, average)
        if compression is None:
            return self.blocking.grouped_allreduce(tensors, name, op, prescale_factor, postscale_factor, process_set)
        smaller = [compression.compress(tensor) for tensor in tensors]
        outputs = self.blocking.grouped_allreduce(
            [tensor for tensor, _ in smaller], name, op, prescale_factor, postscale_factor, process_set
        )
        return [compression.decompress(output, ctx) for output, (_, ctx) in zip(outputs, smaller, strict=True)]

    def grouped_allreduce_(
        self,
        tensors: Sequence[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[T]:
        """Combine several tensors at once, in place, and return them; as `grouped_allreduce`."""
        op = choose_op(op, average)
        return self.requests.reduce_group(tensors, name, op, prescale_factor, postscale_factor, process_set, write=True)

    def grouped_allreduce_async(
        self,
        tensors: Sequence[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[list[T]]:
        """Start what `grouped_allreduce` does; `synchronize` returns a list of new tensors. Never blocks."""
        op = choose_op(op, average)
        return self.requests.start_reduce_group(
            tensors, name, op, prescale_factor, postscale_factor, process_set, write=False
        )

    def grouped_allreduce_async_(
        self,
        tensors: Sequence[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[list[T]]:
        """Start what `grouped_allreduce_` does; leave the tensors alone until `synchronize`. Never blocks."""
        op = choose_op(op, average)
        return self.requests.start_reduce_group(
            tensors, name, op, prescale_factor, postscale_factor, process_set, write=True
        )

    def allgather(self, tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> T:
        """Concatenate the ranks' tensors by rank along the first dimension, which may differ between ranks.

        Blocks until every rank has asked.
        """
        return self.blocking.allgather(tensor, name, process_set)

    def allgather_async(
        self, tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[T]:
        """Start what `allgather` does; `synchronize` returns the new tensor. Never blocks."""
        return self.requests.gather(tensor, name, process_set, now=False)

    def grouped_allgather(
        self, tensors: Sequence[T], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> list[T]:
        """Do what `allgather` does with several tensors at once; none begins before all are ready on all ranks."""
        return self.blocking.grouped_allgather(tensors, name, process_set)

    def grouped_allgather_async(
        self, tensors: Sequence[T], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[list[T]]:
        """Start what `grouped_allgather` does; `synchronize` returns a list of new tensors. Never blocks."""
        return self.requests.start_gather_group(tensors, name, process_set)

    def broadcast(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """Return, in a new tensor, that of rank `root_rank`; all must have one shape and dtype.

        Blocks until the root's tensor is here; the root may return before the others have it.
        """
        return self.blocking.broadcast(tensor, root_rank, name, process_set)

    def broadcast_(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """Overwrite `tensor` with that of rank `root_rank`, and return it; as `broadcast`."""
        return self.requests.broadcast(tensor, root_rank, name, process_set, write=True, now=True).wait()

    def broadcast_async(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[T]:
        """Start what `broadcast` does; `synchronize` returns the new tensor. Never blocks."""
        return self.requests.broadcast(tensor, root_rank, name, process_set, write=False, now=False)

    def broadcast_async_(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[T]:
        """Start what `broadcast_` does; the tensor must be left alone until `synchronize`. Never blocks."""
        return self.requests.broadcast(tensor, root_rank, name, process_set, write=True, now=False)

    def alltoall(
        self, tensor: T, splits: object = None, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T | tuple[T, T]:
        """Send `splits[r]` rows to each rank r, in order, and return what came, in order of rank.

        Without `splits` every rank gets an equal part. With it the result is a pair: the rows, and how many of them
        came from each rank. Blocks until every rank has asked.
        """
        output, received = self.blocking.alltoall(tensor, splits, name, process_set)
        return output if splits is None else (output, received)

    def alltoall_async(
        self, tensor: T, splits: object = None, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[tuple[T, T]]:
        """Start what `alltoall` does; `synchronize` always returns the pair. Never blocks."""
        return self.requests.exchange(tensor, splits, name, process_set, now=False)

    def reducescatter(
        self,
        tensor: T,
        name: str | None = None,
        compression: Compressor[T] | None = None,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> T:
        """Combine `tensor` over all ranks (Average or Sum) and return this rank's rows of the result.

        The first ranks get one row more where the rows do not divide evenly. Blocks until every rank has asked.
        """
        if compression is None:
            return self.blocking.reducescatter(tensor, name, op, prescale_factor, postscale_factor, process_set)
        smaller, ctx = compression.compress(tensor)
        output = self.blocking.reducescatter(smaller, name, op, prescale_factor, postscale_factor, process_set)
        return compression.decompress(output, ctx)

    def reducescatter_async(
        self,
        tensor: T,
        name: str | None = None,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Handle[T]:
        """Start what `reducescatter` does; `synchronize` returns the new tensor. Never blocks."""
        return self.requests.scatter(tensor, name, op, prescale_factor, postscale_factor, process_set, now=False)

    def grouped_reducescatter(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        compression: Compressor[T] | None = None,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[T]:
        """Do what `reducescatter` does with several tensors at once; none begins before all are ready."""
        if compression is None:
            return self.blocking.grouped_reducescatter(
                tensors, name, op, prescale_factor, postscale_factor, process_set
            )
        smaller = [compression.compress(tensor) for tensor in tensors]
        outputs = self.blocking.grouped_reducescatter(
            [tensor for tensor, _ in smaller], name, op, prescale_factor, postscale_factor, process_set
        )
        return [compression.decompress(output, ctx) for output, (_, ctx) in zip(outputs, smaller, strict=True)]

    def grouped_reducescatter_async(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Handle[list[T]]:
        """Start what `grouped_reducescatter` does; `synchronize` returns a list of new tensors. Never blocks."""
        return self.requests.start_scatter_group(tensors, name, op, prescale_factor, postscale_factor, process_set)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it. Operations under way are not waited for."""
    seat, _ = named("barrier", "", process_set)
    # One name for all barriers, so that the engine can replay them; two at a time on one rank make no sense.
    seat.engine.run(kinds.BARRIER, "barrier", None, None)


def join(device: int = -1) -> int:
    """Say that this rank has no more data, take part in what the others ask for, and return when all have joined.

    Returns the rank that joined last, the same on all ranks; then everything is as before, and `join` may be called
    again. Until then this rank counts as having asked for every operation: it adds nothing to a Sum or Adasum and to an
    Average, which still divides by the number of all ranks; it is left out of Min, Max and Product; it gathers no rows,
    and arrives at barriers. `device` is Horovod's, and has no meaning here.

    Blocks until every rank has joined, however long the others work; no other operation can be started on this rank
    meanwhile. Raises `CollectiveTimeout` naming who has not joined when nobody has asked for anything for
    `Config.collective_timeout`, and `PeerLost`. On the ranks that ask, what would lose something raises
    `JoinedError`: a reducescatter, a broadcast whose root has joined, an alltoall that sends rows to a joined rank.
    """
    seat = default.seat()
    return seat.engine.run(kinds.JOIN, "join", None, None, cacheable=False).last_joined()
