"""Process group for torch over farandole's collectives."""

import os
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch
import torch.distributed as dist

from farandole.config import Config
from farandole.core.context import Context
from farandole.core.operations import kinds
from farandole.core.operations.reduction import Average, Reduction, Sum
from farandole.core.operations.request import Request
from farandole.errors import InvalidRequest
from farandole.meeting.rendezvous import Rendezvous
from farandole.torch.distributed.names import SinglePart
from farandole.torch.distributed.reduction import reduction_of
from farandole.torch.distributed.streams import note_use
from farandole.torch.distributed.strided import writes_strided
from farandole.torch.distributed.submitter import Submitter
from farandole.torch.distributed.tensors import flat, joined, one, packed, readable, require_apart, unpack, writable
from farandole.torch.distributed.work import Follower, Work

if TYPE_CHECKING:  # a module of torch's own, whose place may change
    from torch._C._distributed_c10d import (
        AllgatherOptions,
        AllreduceCoalescedOptions,
        AllreduceOptions,
        AllToAllOptions,
        BarrierOptions,
        BroadcastOptions,
        GatherOptions,
        ReduceOptions,
        ReduceScatterOptions,
        ScatterOptions,
    )  # fmt: skip

__all__ = ["FarandoleGroup"]

Tensor = torch.Tensor


class _Options(Protocol):
    """The fields that the options of each of torch's collectives have."""

    @property
    def asyncOp(self) -> bool: ...


POINT_TO_POINT = (
    "farandole has no operations between two ranks; use all_to_all_single or broadcast, or a group of gloo's: "
    'dist.new_group(backend="gloo")'
)


class FarandoleGroup(dist.ProcessGroup):
    """The ranks of `rendezvous`, with their own engine; made by `init_process_group(backend="farandole")`.

    All ranks must request the same operations in one order. Results are written into the given tensors. An invalid
    request on this rank alone raises `InvalidRequest` at the call. `MismatchError`, `CollectiveTimeout` and `PeerLost`
    are raised by the wait, or by the call itself if torch requests a synchronous operation."""

    def __init__(
        self, rendezvous: Rendezvous, config: Config, *, name: str = "", members: Sequence[int] = (), label: str = ""
    ) -> None:
        """Join a group of the job's ranks `members`, given by their numbers in the job. Blocks until all of them have
        joined."""
        super().__init__(rendezvous.rank, rendezvous.size)  # type: ignore[call-arg]  # an overload of torch's stub
        self._name, self._label = name, label
        self._rank, self._size = rendezvous.rank, rendezvous.size
        context = Context(rendezvous, config, members=members, process_set=label)
        follower = Follower("farandole-futures")
        self._submitter = Submitter(context.engine, follower)
        # At the interpreter's exit at the latest: many programs never destroy their process group.
        self._end = weakref.finalize(self, _end, context, follower, os.getpid())

    # torch's queries about a group; C++ uses the names in its own style.

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch's NewType of str
        """The name by which torch's functional collectives find the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The group's name in errors; empty for the group of all ranks."""
        return self._label

    def getGroupName(self) -> str:
        """Return `group_name`."""
        return self._name

    def getGroupDesc(self) -> str:
        """Return `group_desc`."""
        return self._label

    def setGroupName(self, name: str) -> None:
        """Set torch's name of the group."""
        self._name = name

    def setGroupDesc(self, description: str) -> None:
        """Keep the label, which is more precise."""

    def getBackendName(self) -> str:
        """Return the name for `init_process_group`."""
        return "farandole"

    def shutdown(self) -> None:
        """Leave the group; operations in flight fail, here and on the other ranks. Idempotent."""
        self._end()

    def abort(self) -> None:
        """Do what `shutdown` does."""
        self._end()

    # torch's own Python and C++ call these with lists, and never use its overloads for one tensor.

    # Reductions

    @writes_strided
    def allreduce(  # type: ignore[override]
        self,
        tensors: Sequence[Tensor],
        opts: "AllreduceOptions | None" = None,
    ) -> Work:
        """Reduce the tensor in place."""
        what = "all_reduce"
        tensor = writable(one(tensors, what), what)
        request = Request(kinds.ALLREDUCE, what, _reduction(opts, tensor, what))
        return self._submitter.reduce(request, tensor, _is_now(opts))

    @writes_strided
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: "AllreduceCoalescedOptions | None" = None) -> Work:
        """Reduce several tensors in place, all at once."""
        what = "all_reduce_coalesced"
        ready = [writable(tensor, what) for tensor in tensors]
        if not ready:
            return self._submitter.together([])
        request = Request(kinds.ALLREDUCE, what, _reduction(opts, ready[0], what), grouped=True)
        return self._submitter.reduce_group(request, ready, _is_now(opts))

    @writes_strided
    def reduce(self, tensors: Sequence[Tensor], opts: "ReduceOptions") -> Work:  # type: ignore[override]
        """Reduce into the root's tensor; the others' stay as they are."""
        what, given, leads = "reduce", one(tensors, "reduce"), opts.rootRank == self._rank
        tensor = writable(given, what) if leads else readable(given, what)
        reduction = _reduction(opts, tensor, what)
        signature = (opts.rootRank, reduction, tensor.dtype, tensor.shape)
        pair = (tensor, tensor if leads else torch.empty_like(tensor))
        request = Request(kinds.ALLREDUCE, what, reduction)
        return self._submitter.submit(request, signature, pair, [tensor], _is_now(opts))

    @writes_strided
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: "ReduceScatterOptions | None" = None) -> Work:
        """Reduce, and keep this rank's part of the result; the parts are adjacent in the input."""
        what = "reduce_scatter"
        source, target = readable(input, what).view(-1), writable(output, what).view(-1)
        _require_times(self._size, source, target, what)
        require_apart(source, target, self._rank * target.nbytes, what)
        reduction = _reduction(opts, source, what)
        signature = (reduction, source.dtype, source.shape)
        if reduction.op in (Sum, Average):
            request = Request(kinds.REDUCESCATTER, what, reduction)
            return self._submitter.submit(request, signature, (source, target), [output], _is_now(opts))
        # The engine scatters only sums.
        whole = torch.empty_like(source)

        def keep(_: SinglePart) -> None:
            target.copy_(whole.chunk(self._size)[self._rank])
            note_use(whole)

        request = Request(kinds.ALLREDUCE, what, reduction)
        return self._submitter.submit(request, signature, (source, whole), [output], _is_now(opts), keep)

    @writes_strided
    def reduce_scatter(  # type: ignore[override]
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Sequence[Tensor]],
        opts: "ReduceScatterOptions | None" = None,
    ) -> Work:
        """Do as `reduce_scatter_single`; the parts are separate tensors."""
        what, output = "reduce_scatter", one(output_tensors, "reduce_scatter")
        parts = input_tensors[0]
        if len(parts) != self._size or any(part.numel() != output.numel() for part in parts):
            raise InvalidRequest(what, f"needs {self._size} inputs, each with as many elements as the output")
        return self.reduce_scatter_single(output, packed([readable(part, what).view(-1) for part in parts]), opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: "ReduceScatterOptions | None" = None
    ) -> Work:
        """Do as `reduce_scatter_single` for several pairs of tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return self._submitter.together([self.reduce_scatter_single(output, input, opts) for output, input in pairs])

    # Movement

    @writes_strided
    def broadcast(self, tensors: Sequence[Tensor], opts: "BroadcastOptions") -> Work:  # type: ignore[override]
        """Overwrite the tensor with the root's."""
        what, tensor = "broadcast", one(tensors, "broadcast")
        row = flat(tensor, what, write=True)
        signature = (opts.rootRank, row.dtype, row.shape)
        request = Request(kinds.BROADCAST, what, root=opts.rootRank)
        return self._submitter.submit(request, signature, (row, row), [tensor], _is_now(opts))

    @writes_strided
    def all_gather_single(self, output: Tensor, input: Tensor, opts: "AllgatherOptions | None" = None) -> Work:
        """Write the ranks' tensors into the output, in rank order."""
        what = "all_gather"
        source, target = flat(input, what), flat(output, what, write=True)
        _require_times(self._size, target, source, what)
        require_apart(source, target, -self._rank * source.nbytes, what)
        request = Request(kinds.ALLGATHER, what)
        return self._submitter.submit(request, source.dtype, (source, target), [output], _is_now(opts))

    @writes_strided
    def allgather(  # type: ignore[override]
        self,
        output_tensors: Sequence[Sequence[Tensor]],
        input_tensors: Sequence[Tensor],
        opts: "AllgatherOptions | None" = None,
    ) -> Work:
        """Write each rank's tensor into one of the outputs; they may differ in size between ranks."""
        what, results = "all_gather", list(output_tensors[0])
        source, targets = flat(one(input_tensors, what), what), [flat(each, what, write=True) for each in results]
        if len(targets) != self._size or targets[self._rank].numel() != source.numel():
            raise InvalidRequest(what, f"needs {self._size} outputs, each as large as that rank's input")
        whole = joined(targets)
        finish = partial(_unpack, targets) if whole is None else None
        request = Request(kinds.ALLGATHER, what)
        return self._submitter.submit(request, source.dtype, (source, whole), results, _is_now(opts), finish)

    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[Tensor]],
        input_list: Sequence[Tensor],
        opts: "AllgatherOptions | None" = None,
    ) -> Work:
        """Do as `allgather` for several tensors."""
        pairs = zip(output_lists, input_list, strict=True)
        return self._submitter.together([self.allgather([outputs], [input], opts) for outputs, input in pairs])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: "AllgatherOptions | None" = None
    ) -> Work:
        """Do as `all_gather_single` for several pairs of tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return self._submitter.together([self.all_gather_single(output, input, opts) for output, input in pairs])

    @writes_strided
    def all_to_all_single(  # type: ignore[override]
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: "AllToAllOptions | None" = None,
    ) -> Work:
        """Send rows of the input to each rank, write received rows into the output; in equal parts without splits."""
        what = "all_to_all"
        source, target = flat(input, what), flat(output, what, write=True)
        require_apart(source, target, None, what)
        sent = self._shares(input, source, input_split_sizes, "input", what)
        wanted = self._shares(output, target, output_split_sizes, "output", what)
        finish = partial(_require_received, what, wanted)
        request = Request(kinds.ALLTOALL, what, splits=sent)
        return self._submitter.submit(request, (), (source, target), [output], _is_now(opts), finish)

    @writes_strided
    def alltoall(  # type: ignore[override]
        self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], opts: "AllToAllOptions | None" = None
    ) -> Work:
        """Send one tensor to each rank, and write each rank's tensor into one of the outputs."""
        return self._exchange("all_to_all", output_tensors, input_tensors, opts)

    @writes_strided
    def gather(  # type: ignore[override]
        self, output_tensors: Sequence[Sequence[Tensor]], input_tensors: Sequence[Tensor], opts: "GatherOptions"
    ) -> Work:
        """Write each rank's tensor into one of the root's outputs."""
        tensor = one(input_tensors, "gather")
        nothing = tensor.new_empty(0)
        outputs = output_tensors[0] if opts.rootRank == self._rank else [nothing] * self._size
        inputs = [tensor if rank == opts.rootRank else nothing for rank in range(self._size)]
        return self._exchange("gather", outputs, inputs, opts)

    @writes_strided
    def scatter(  # type: ignore[override]
        self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Sequence[Tensor]], opts: "ScatterOptions"
    ) -> Work:
        """Write one of the root's tensors into each rank's output."""
        tensor = one(output_tensors, "scatter")
        nothing = tensor.new_empty(0)
        outputs = [tensor if rank == opts.rootRank else nothing for rank in range(self._size)]
        inputs = input_tensors[0] if opts.rootRank == self._rank else [nothing] * self._size
        return self._exchange("scatter", outputs, inputs, opts)

    def barrier(  # type: ignore[override]
        self, opts: "BarrierOptions | None" = None
    ) -> Work:
        """Wait until all ranks have called it."""
        return self._submitter.submit(Request(kinds.BARRIER, "barrier"), (), (None, None), [], _is_now(opts))

    def send(self, tensors: Sequence[Tensor], dst_rank: int, tag: int) -> NoReturn:
        """Raise `InvalidRequest`: there are no operations between two ranks."""
        raise InvalidRequest("send", POINT_TO_POINT)

    def recv(self, tensors: Sequence[Tensor], src_rank: int, tag: int) -> NoReturn:
        """Raise `InvalidRequest`, as `send` does."""
        raise InvalidRequest("recv", POINT_TO_POINT)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> NoReturn:
        """Raise `InvalidRequest`, as `send` does."""
        raise InvalidRequest("recv", POINT_TO_POINT)

    def _exchange(
        self, what: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: "_Options | None"
    ) -> Work:
        """Do an alltoall between lists of tensors."""
        if len(outputs) != self._size or len(inputs) != self._size:
            raise InvalidRequest(what, f"needs one tensor for each of the {self._size} ranks")
        sources, targets = [flat(each, what) for each in inputs], [flat(each, what, write=True) for each in outputs]
        whole = joined(targets)
        wanted = [target.numel() for target in targets]

        def finish(part: SinglePart) -> None:
            _require_received(what, wanted, part)
            if whole is None:
                _unpack(targets, part)

        request = Request(kinds.ALLTOALL, what, splits=[source.numel() for source in sources])
        return self._submitter.submit(request, (), (packed(sources), whole), list(outputs), _is_now(opts), finish)

    def _shares(self, tensor: Tensor, row: Tensor, splits: Sequence[int], which: str, what: str) -> list[int]:
        """Return the numbers of elements of `row` for each rank, where `splits` count rows of `tensor`."""
        rows = tensor.shape[0] if tensor.dim() > 0 else 1
        if not splits:
            if rows % self._size:
                raise InvalidRequest(what, f"the {which} has {rows} rows for {self._size} ranks; give its split sizes")
            return [row.numel() // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows or min(splits) < 0:
            raise InvalidRequest(
                what, f"the {which} has {rows} rows for {self._size} ranks, which split sizes {splits} do not add up to"
            )
        return [split * row.numel() // max(1, rows) for split in splits]


def _end(context: Context, follower: Follower, process: int) -> None:
    if os.getpid() == process:  # a forked child has no such threads
        context.shutdown()
        follower.close()


def _is_now(opts: "_Options | None") -> bool:
    return opts is not None and not opts.asyncOp


def _reduction(
    opts: "AllreduceOptions | ReduceOptions | ReduceScatterOptions | None", tensor: Tensor, what: str
) -> Reduction:
    return reduction_of(dist.ReduceOp(dist.ReduceOp.SUM) if opts is None else opts.reduceOp, tensor.dtype, what)


def _require_times(size: int, whole: Tensor, part: Tensor, what: str) -> None:
    if whole.numel() != part.numel() * size:
        raise InvalidRequest(
            what, f"{whole.numel()} elements of all ranks are not {size} times the {part.numel()} of this one"
        )


def _require_received(what: str, wanted: Sequence[int], part: SinglePart) -> None:
    received = part.received_splits()
    if received != list(wanted):
        raise InvalidRequest(what, f"{received} elements came from the ranks, and the outputs have room for {wanted}")


def _unpack(targets: Sequence[Tensor], part: SinglePart) -> None:
    unpack(part.result(), targets)
