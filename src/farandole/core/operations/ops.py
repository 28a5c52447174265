"""The operations as users call them, written once for all frameworks."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from farandole.core import default
from farandole.core.operations import kinds
from farandole.core.operations.compression import Compressor
from farandole.core.operations.handle import Handle
from farandole.core.operations.reduction import Average
from farandole.core.operations.request import Request
from farandole.core.operations.requests import Requests, allreduce_request, named, plain, request_of
from farandole.core.process_sets.process_set import ProcessSet, global_process_set

__all__ = ["Operations", "barrier", "join"]

T = TypeVar("T")


class Operations(Generic[T]):
    """The operations for one framework's tensors, with the names, arguments and defaults Horovod's users know.

    Every rank must ask for the same operations under the same names; the order may differ between ranks, except
    for operations without a name, which are matched by their order. A request that can be seen to be wrong on this
    rank alone raises `InvalidRequest` at the call. What only shows when all ranks have asked (`MismatchError`), or
    never (`CollectiveTimeout`, `PeerLost`), is raised by the call that waits.
    """

    def __init__(self, requests: Requests[T]) -> None:
        self.requests = requests

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
        request = allreduce_request(op, average, name, prescale_factor, postscale_factor, process_set)
        if compression is None:
            reduced: T = self.requests.run(request, tensor)
            return reduced
        smaller, ctx = compression.compress(tensor)
        return compression.decompress(self.requests.run(request, smaller), ctx)

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
        if average is None and prescale_factor == 1.0 and postscale_factor == 1.0 and process_set is global_process_set:
            request = plain.get((op, name))
            if request is not None:  # the short way of a repeated call
                return self.requests.reduce(request, tensor, True, default.shared)
        request = allreduce_request(op, average, name, prescale_factor, postscale_factor, process_set)
        return self.requests.reduce(request, tensor, True)

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
        request = allreduce_request(op, average, name, prescale_factor, postscale_factor, process_set)
        return self.requests.start_reduce(request, tensor, False)

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
        request = allreduce_request(op, average, name, prescale_factor, postscale_factor, process_set)
        return self.requests.start_reduce(request, tensor, True)

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
        request = allreduce_request(op, average, name, prescale_factor, postscale_factor, process_set, True)
        return self._run_group(request, tensors, compression)

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
        request = allreduce_request(op, average, name, prescale_factor, postscale_factor, process_set, True)
        return self.requests.reduce_group(request, tensors, write=True)

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
        request = allreduce_request(op, average, name, prescale_factor, postscale_factor, process_set, True)
        return self.requests.start_group(request, tensors, write=False)

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
        request = allreduce_request(op, average, name, prescale_factor, postscale_factor, process_set, True)
        return self.requests.start_group(request, tensors, write=True)

    def allgather(self, tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> T:
        """Concatenate the ranks' tensors by rank along the first dimension, which may differ between ranks.

        Blocks until every rank has asked.
        """
        gathered: T = self.requests.run(request_of(kinds.ALLGATHER, name, process_set), tensor)
        return gathered

    def allgather_async(
        self, tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[T]:
        """Start what `allgather` does; `synchronize` returns the new tensor. Never blocks."""
        return self.requests.start(request_of(kinds.ALLGATHER, name, process_set), tensor)

    def grouped_allgather(
        self, tensors: Sequence[T], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> list[T]:
        """Do what `allgather` does with several tensors at once; none begins before all are ready on all ranks."""
        request = request_of(kinds.ALLGATHER, name, process_set, grouped=True)
        return self.requests.run_group(request, tensors)

    def grouped_allgather_async(
        self, tensors: Sequence[T], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[list[T]]:
        """Start what `grouped_allgather` does; `synchronize` returns a list of new tensors. Never blocks."""
        request = request_of(kinds.ALLGATHER, name, process_set, grouped=True)
        return self.requests.start_group(request, tensors)

    def broadcast(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """Return, in a new tensor, that of rank `root_rank`; all must have one shape and dtype.

        Blocks until the root's tensor is here; the root may return before the others have it.
        """
        request = request_of(kinds.BROADCAST, name, process_set, root=root_rank)
        spread: T = self.requests.run(request, tensor)
        return spread

    def broadcast_(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """Overwrite `tensor` with that of rank `root_rank`, and return it; as `broadcast`."""
        request = request_of(kinds.BROADCAST, name, process_set, root=root_rank)
        return self.requests.overwrite(request, tensor)

    def broadcast_async(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[T]:
        """Start what `broadcast` does; `synchronize` returns the new tensor. Never blocks."""
        request = request_of(kinds.BROADCAST, name, process_set, root=root_rank)
        return self.requests.start(request, tensor)

    def broadcast_async_(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[T]:
        """Start what `broadcast_` does; the tensor must be left alone until `synchronize`. Never blocks."""
        request = request_of(kinds.BROADCAST, name, process_set, root=root_rank)
        return self.requests.start(request, tensor, write=True)

    def alltoall(
        self, tensor: T, splits: object = None, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T | tuple[T, T]:
        """Send `splits[r]` rows to each rank r, in order, and return what came, in order of rank.

        Without `splits` every rank gets an equal part. With it the result is a pair: the rows, and how many of them
        came from each rank. Blocks until every rank has asked.
        """
        request = Request(kinds.ALLTOALL, name, process_set=process_set, splits=splits)
        output, received = self.requests.run(request, tensor)
        return output if splits is None else (output, received)

    def alltoall_async(
        self, tensor: T, splits: object = None, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[tuple[T, T]]:
        """Start what `alltoall` does; `synchronize` always returns the pair. Never blocks."""
        request = Request(kinds.ALLTOALL, name, process_set=process_set, splits=splits)
        return self.requests.start(request, tensor)

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
        return self._run(
            request_of(kinds.REDUCESCATTER, name, process_set, op, prescale_factor, postscale_factor),
            tensor,
            compression,
        )

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
        return self.requests.start(
            request_of(kinds.REDUCESCATTER, name, process_set, op, prescale_factor, postscale_factor), tensor
        )

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
        request = request_of(
            kinds.REDUCESCATTER, name, process_set, op, prescale_factor, postscale_factor, grouped=True
        )
        return self._run_group(request, tensors, compression)

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
        request = request_of(
            kinds.REDUCESCATTER, name, process_set, op, prescale_factor, postscale_factor, grouped=True
        )
        return self.requests.start_group(request, tensors)

    def _run(self, request: Request, tensor: T, compression: Compressor[T] | None) -> T:
        if compression is None:
            output: T = self.requests.run(request, tensor)
            return output
        smaller, ctx = compression.compress(tensor)
        return compression.decompress(self.requests.run(request, smaller), ctx)

    def _run_group(self, request: Request, tensors: Sequence[T], compression: Compressor[T] | None) -> list[T]:
        if compression is None:
            return self.requests.run_group(request, tensors)
        smaller = [compression.compress(tensor) for tensor in tensors]
        outputs = self.requests.run_group(request, [tensor for tensor, _ in smaller])
        return [compression.decompress(output, ctx) for output, (_, ctx) in zip(outputs, smaller, strict=True)]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it. Operations under way are not waited for."""
    membership, _ = named("barrier", "", process_set)
    # One name for all barriers, so that the engine can replay them; two at a time on one rank make no sense.
    membership.engine.run(Request(kinds.BARRIER, "barrier"), "barrier", None, None)


def join(device: int = -1) -> int:
    """Say that this rank has no more data, take part in what the others ask for, and return when all have joined.

    Returns the rank that joined last, the same on all ranks; then everything is as before, and `join` may be called
    again. Until then this rank counts as having asked for every operation: it adds nothing to a Sum or Adasum and to an
    Average, which still divides by the number of all ranks; it is left out of Min, Max and Product; it gathers no rows,
    and arrives at barriers. `device` is Horovod's, and has no meaning here.

    Blocks until every rank has joined, however long the others work; no other operation can be started on this rank
    meanwhile. Raises `CollectiveTimeout` naming who has not joined when no rank has asked for anything for
    `Config.collective_timeout`, and `PeerLost`. On the ranks that ask, what would lose something raises
    `JoinedError`: a reducescatter, a broadcast whose root has joined, an alltoall that sends rows to a joined rank.
    """
    membership = default.membership()
    done = membership.engine.run(Request(kinds.JOIN), "join", None, None)
    assert done is not None
    return done.last_joined()
