"""Operations as users call them, written once for all frameworks."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from farandole.core import default
from farandole.core.operations import kinds
from farandole.core.operations.compression import Compressor, wire_op
from farandole.core.operations.handle import Handle
from farandole.core.operations.reduction import Average
from farandole.core.operations.request import Request
from farandole.core.operations.requests import Requests, allreduce_request, named, plain, request_of
from farandole.core.process_sets.process_set import ProcessSet, global_process_set

T = TypeVar("T")


class Operations(Generic[T]):
    """Operations on one framework's tensors, with the names, arguments and defaults of Horovod.

    All ranks must request the same operations under the same names, in any order. Operations without a name are matched
    by their order. A request that is invalid on this rank alone raises `InvalidRequest` at the call. `MismatchError`,
    `CollectiveTimeout` and `PeerLost` are raised by the call that waits.
    """

    def __init__(self, requests: Requests[T], changed: Callable[[list[T]], object] | None = None) -> None:
        """Make operations of `requests`; `changed` tells the framework that tensors are overwritten."""
        self.requests, self._changed = requests, changed
        self._own_type, self._overwrite = requests.adapter.own_type, requests.adapter.overwrite

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
        """Reduce `tensor` over all ranks; every rank gets the same result, in a new tensor of the same shape.

        The ranks' tensors must have equal shapes, of any number of dimensions and elements, and equal dtypes. `op` is
        Average (the default), Sum, Adasum, Min, Max or Product. Tensors are multiplied by `prescale_factor` before the
        reduction and by `postscale_factor` after it: integers in float64 with results truncated toward zero, float16
        and bfloat16 in float32, other dtypes as they are. An integer Average is exact, and truncated toward zero. For
        bool tensors Sum and Max are "or", Product and Min are "and"; Average and Adasum are refused. Adasum of integers
        is refused too.

        Blocks until every rank has made the request.
        """
        request = allreduce_request(op, average, name, prescale_factor, postscale_factor, process_set)
        if compression is None:  # as `_run` does, without its call
            reduced: T = self.requests.run(request, tensor)
            return reduced
        return self._run(request, tensor, compression)

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
        """Reduce `tensor` over all ranks in place, and return it; as `allreduce`."""
        if average is None and prescale_factor == 1.0 and postscale_factor == 1.0 and process_set is global_process_set:
            request, membership = plain.get((op, name)), default.shared
            if request is not None and membership is not None and (wire := request.wire) is not None:
                # A repeated call with default arguments: `Requests.run` without its calls, which would take longer than
                # the operation. Not a binding's `run`: results in place are neither differentiated nor traced.
                if type(tensor) is not self._own_type:
                    self._overwrite(tensor, wire)
                try:
                    membership.engine.run(request, wire, tensor, tensor)
                except Exception as error:
                    return self.requests.run_dense(error, request, tensor, write=True)
                return tensor
        request = allreduce_request(op, average, name, prescale_factor, postscale_factor, process_set)
        reduced: T = self.requests.run(request, tensor, write=True)
        return reduced

    def bind(
        self,
        tensor: T,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Callable[[], T]:
        """Return a function without arguments that does `allreduce_` of `tensor`, in less time.

        The tensor may have any shape, but must be contiguous and writable. All ranks bind tensors of the same shape and
        dtype under one name, and call their functions equally often. Tensors without a name are matched by the order
        in which they are bound; an elastic job needs names. Never blocks. Raises `InvalidRequest` for a tensor that
        cannot be reduced in place.

        The function reduces the values that the tensor has at the call, and returns the tensor. It blocks until every
        rank has called, and raises what `allreduce_` raises. It keeps the tensor alive, and a NumPy array's memory,
        shape and dtype as they were. After `shutdown` it raises `NotInitializedError`; once the job has been
        initialized again, or its ranks have changed, it reduces over the ranks of that time.
        """
        request = allreduce_request(op, None, name, prescale_factor, postscale_factor, process_set)
        return self.requests.bind(request, tensor, self._changed)

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
        """Start an `allreduce`; `synchronize` returns the new tensor. Never blocks."""
        request = allreduce_request(op, average, name, prescale_factor, postscale_factor, process_set)
        return self.requests.start(request, tensor)

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
        """Start an `allreduce_`; do not use the tensor until `synchronize`. Never blocks."""
        request = allreduce_request(op, average, name, prescale_factor, postscale_factor, process_set)
        return self.requests.start(request, tensor, write=True)

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
        """Reduce several tensors together, into new ones; none begins before all are requested on all ranks.

        Blocks until every rank has made the request.
        """
        request = allreduce_request(op, average, name, prescale_factor, postscale_factor, process_set, grouped=True)
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
        """Reduce several tensors together, in place, and return them; as `grouped_allreduce`."""
        request = allreduce_request(op, average, name, prescale_factor, postscale_factor, process_set, grouped=True)
        reduced: list[T] = self.requests.run(request, tensors, write=True)
        return reduced

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
        """Start a `grouped_allreduce`; `synchronize` returns a list of new tensors. Never blocks."""
        request = allreduce_request(op, average, name, prescale_factor, postscale_factor, process_set, grouped=True)
        return self.requests.start(request, tensors)

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
        """Start a `grouped_allreduce_`; do not use the tensors until `synchronize`. Never blocks."""
        request = allreduce_request(op, average, name, prescale_factor, postscale_factor, process_set, grouped=True)
        return self.requests.start(request, tensors, write=True)

    def allgather(self, tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> T:
        """Concatenate the ranks' tensors by rank along the first dimension, which may differ between ranks.

        Blocks until every rank has made the request.
        """
        gathered: T = self.requests.run(request_of(kinds.ALLGATHER, name, process_set), tensor)
        return gathered

    def allgather_async(
        self, tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[T]:
        """Start an `allgather`; `synchronize` returns the new tensor. Never blocks."""
        return self.requests.start(request_of(kinds.ALLGATHER, name, process_set), tensor)

    def grouped_allgather(
        self, tensors: Sequence[T], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> list[T]:
        """Gather several tensors together, as `allgather`; none begins before all are requested on all ranks."""
        request = request_of(kinds.ALLGATHER, name, process_set, grouped=True)
        gathered: list[T] = self.requests.run(request, tensors)
        return gathered

    def grouped_allgather_async(
        self, tensors: Sequence[T], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[list[T]]:
        """Start a `grouped_allgather`; `synchronize` returns a list of new tensors. Never blocks."""
        request = request_of(kinds.ALLGATHER, name, process_set, grouped=True)
        return self.requests.start(request, tensors)

    def broadcast(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """Return a copy of the tensor of rank `root_rank`; the ranks' shapes and dtypes must be equal.

        Blocks until the root's tensor has arrived; the root may return before the other ranks have it.
        """
        request = request_of(kinds.BROADCAST, name, process_set, root=root_rank)
        spread: T = self.requests.run(request, tensor)
        return spread

    def broadcast_(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """Overwrite `tensor` with the tensor of rank `root_rank`, and return it; as `broadcast`."""
        request = request_of(kinds.BROADCAST, name, process_set, root=root_rank)
        spread: T = self.requests.run(request, tensor, write=True)
        return spread

    def broadcast_async(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[T]:
        """Start a `broadcast`; `synchronize` returns the new tensor. Never blocks."""
        request = request_of(kinds.BROADCAST, name, process_set, root=root_rank)
        return self.requests.start(request, tensor)

    def broadcast_async_(
        self, tensor: T, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[T]:
        """Start a `broadcast_`; do not use the tensor until `synchronize`. Never blocks."""
        request = request_of(kinds.BROADCAST, name, process_set, root=root_rank)
        return self.requests.start(request, tensor, write=True)

    def alltoall(
        self, tensor: T, splits: object = None, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T | tuple[T, T]:
        """Send `splits[r]` rows to each rank r, in order, and return the received rows in rank order.

        Without `splits` every rank gets an equal part. With `splits` the result is a pair: the rows, and the number of
        rows from each rank. Blocks until every rank has made the request.
        """
        request = Request(kinds.ALLTOALL, name, process_set=process_set, splits=splits)
        output, received = self.requests.run(request, tensor)
        return output if splits is None else (output, received)

    def alltoall_async(
        self, tensor: T, splits: object = None, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle[tuple[T, T]]:
        """Start an `alltoall`; `synchronize` always returns the pair. Never blocks."""
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
        """Reduce `tensor` over all ranks (Average or Sum) and return this rank's rows of the result.

        If the rows do not divide evenly, the first ranks get one row more. Blocks until every rank has made the
        request.
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
        """Start a `reducescatter`; `synchronize` returns the new tensor. Never blocks."""
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
        """Scatter several tensors together, as `reducescatter`; none begins before all are requested on all ranks."""
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
        """Start a `grouped_reducescatter`; `synchronize` returns a list of new tensors. Never blocks."""
        request = request_of(
            kinds.REDUCESCATTER, name, process_set, op, prescale_factor, postscale_factor, grouped=True
        )
        return self.requests.start(request, tensors)

    def _run(self, request: Request, tensor: T, compression: Compressor[T] | None) -> T:
        if compression is None:
            output: T = self.requests.run(request, tensor)
            return output
        request = _encoded(request, compression)
        smaller, ctx = compression.compress(tensor)
        return compression.decompress(self.requests.run(request, smaller), ctx)

    def _run_group(self, request: Request, tensors: Sequence[T], compression: Compressor[T] | None) -> list[T]:
        if compression is None:
            outputs: list[T] = self.requests.run(request, tensors)
            return outputs
        request = _encoded(request, compression)
        smaller = [compression.compress(tensor) for tensor in tensors]
        outputs = self.requests.run(request, [tensor for tensor, _ in smaller])
        return [compression.decompress(output, ctx) for output, (_, ctx) in zip(outputs, smaller, strict=True)]


def _encoded(request: Request, compression: object) -> Request:
    """Return the request whose operator says how `compression` sends tensors."""
    op = wire_op(compression, request.reduction.op, request.name, request.kind)
    return request if op == request.reduction.op else request._replace(reduction=request.reduction._replace(op=op))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank has called it. It does not wait for operations in flight."""
    membership, _ = named("barrier", "", process_set)
    # All barriers have one name, so that the response cache keeps it. A rank has at most one barrier in flight.
    membership.engine.run(Request(kinds.BARRIER, "barrier"), "barrier", None, None)


def join(device: int = -1) -> int:
    """Declare that this rank has no more data, and take part in the other ranks' operations until all have joined.

    Returns the rank that joined last, which is the same on all ranks; `join` can then be called again. Until then this
    rank counts as having requested every operation. It adds zeros to Sum, Adasum and Average, and Average still divides
    by the number of all ranks. It is left out of Min, Max and Product, contributes no rows to an allgather, and arrives
    at barriers. `device` is an argument of Horovod's and is ignored.

    Blocks until every rank has joined, without a limit while the others work; no other operation can be started on this
    rank meanwhile. Raises `PeerLost`, and `CollectiveTimeout` with the ranks that have not joined if no rank has made a
    request for `Config.collective_timeout`. An operation that would lose data raises `JoinedError` on the ranks that
    request it: a reducescatter, a broadcast whose root has joined, an alltoall that sends rows to a joined rank.
    """
    membership = default.membership()
    done = membership.engine.run(Request(kinds.JOIN), "join", None, None)
    assert done is not None
    return done.last_joined()
