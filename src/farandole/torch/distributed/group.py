"""Process group for torch over farandole's collectives."""

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from farandole.config import Config
from farandole.core.context import Context
from farandole.core.operations import kinds
from farandole.core.operations.reduction import Average, Reduction, Sum
from farandole.core.operations.request import Request
from farandole.errors import InvalidRequest
from farandole.meeting.rendezvous import Rendezvous
from farandole.torch.distributed.compiler import run_as_written
from farandole.torch.distributed.gathered import Fold, fold_bits, fold_of, sum_sparse
from farandole.torch.distributed.monitored import monitored_barrier
from farandole.torch.distributed.named_group import NamedGroup
from farandole.torch.distributed.names import SinglePart
from farandole.torch.distributed.overloads import overloaded
from farandole.torch.distributed.reduction import reduction_of
from farandole.torch.distributed.sizes import require_received, require_times, shares_of
from farandole.torch.distributed.streams import note_use
from farandole.torch.distributed.strided import writes_strided
from farandole.torch.distributed.submitter import Submitter
from farandole.torch.distributed.tensors import flat, joined, one, packed, readable, require_apart, unpack, writable
from farandole.torch.distributed.work import Follower, Work

if TYPE_CHECKING:  # a module of torch's own, whose place may change
    from torch._C._distributed_c10d import AllgatherOptions

__all__ = ["FarandoleGroup"]

Tensor = torch.Tensor


class _Options(Protocol):
    """The fields that the options of each of torch's collectives have."""

    @property
    def asyncOp(self) -> bool: ...


ANY_RANK = -1
BARRIER_TAG = 1 << 31  # programs have the tags below


@run_as_written
class FarandoleGroup(NamedGroup):
    """The ranks of `rendezvous`, with their own engine; made by `init_process_group(backend="farandole")`.

    All ranks must request the same operations in one order. Results are written into the given tensors. An invalid
    request on this rank alone raises `InvalidRequest` at the call. `MismatchError`, `CollectiveTimeout` and `PeerLost`
    are raised by the wait, or by the call itself if torch requests a synchronous operation."""

    def __init__(
        self, rendezvous: Rendezvous, config: Config, *, name: str = "", members: Sequence[int] = (), label: str = ""
    ) -> None:
        """Join a group of the job's ranks `members`, given by their numbers in the job. Blocks until all of them have
        joined."""
        super().__init__(rendezvous.rank, rendezvous.size, name, label)
        self._join(rendezvous, config, members, label)

    def _join(self, rendezvous: Rendezvous, config: Config, members: Sequence[int] = (), label: str = "") -> None:
        self._rank, self._size = rendezvous.rank, rendezvous.size
        self._barriers = 0  # monitored ones so far
        context = Context(rendezvous, config, members=members, process_set=label, transfers=True)
        follower = Follower("farandole-futures")
        self._submitter = Submitter(context.engine, follower, self.title)
        self._context = weakref.ref(context)  # which ends with the group
        # At the interpreter's exit at the latest: many programs never destroy their process group.
        self._end: Callable[[], object] = weakref.finalize(self, _end, context, follower, os.getpid())

    def shutdown(self) -> None:
        """Leave the group; operations in flight fail, here and on the other ranks. Idempotent."""
        self._end()

    def abort(self) -> None:
        """Do what `shutdown` does."""
        self._end()

    # torch's own Python and C++ call these with lists and options; programs may use torch's overloads.

    # Reductions

    @overloaded(c10d.AllreduceOptions, 1, "op", "timeout")
    @writes_strided
    def allreduce(self, tensors: Sequence[Tensor], opts: c10d.AllreduceOptions | None = None) -> Work:
        """Reduce the tensor in place."""
        what, given = "all_reduce", one(tensors, "all_reduce")
        if given.is_sparse:
            return sum_sparse(self._submitter, what, _asked(opts), given, _is_now(opts))
        tensor = writable(given, what)
        fold = fold_of(_asked(opts), tensor.dtype)
        if fold is not None:
            return self._fold(what, fold, tensor, tensor.copy_, given, opts)
        request = Request(kinds.ALLREDUCE, what, _reduction(opts, given, what))
        return self._submitter.reduce(request, tensor, _is_now(opts))

    @writes_strided
    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: c10d.AllreduceCoalescedOptions | None = None
    ) -> Work:
        """Reduce several tensors in place, all at once."""
        what = "all_reduce_coalesced"
        ready = [writable(tensor, what) for tensor in tensors]
        if not ready or fold_of(_asked(opts), ready[0].dtype) is not None:
            return self._submitter.together([self.allreduce([tensor], opts) for tensor in ready])
        reduction = _reduction(opts, max(tensors, key=torch.is_complex), what)  # which complex numbers restrict
        request = Request(kinds.ALLREDUCE, what, reduction, grouped=True)
        return self._submitter.reduce_group(request, ready, _is_now(opts))

    @overloaded(c10d.ReduceOptions, 1, "root", "op", "timeout")
    @writes_strided
    def reduce(self, tensors: Sequence[Tensor], opts: c10d.ReduceOptions) -> Work:
        """Reduce into the root's tensor; the others' stay as they are."""
        what, given, leads = "reduce", one(tensors, "reduce"), opts.rootRank == self._rank
        tensor = writable(given, what) if leads else readable(given, what)
        fold = fold_of(opts.reduceOp, tensor.dtype)
        if fold is not None:
            return self._fold(what, fold, tensor, tensor.copy_ if leads else lambda _: tensor, given, opts)
        reduction = _reduction(opts, given, what)
        signature = (opts.rootRank, reduction, tensor.dtype, tensor.shape)
        request, output = Request(kinds.ALLREDUCE, what, reduction), tensor if leads else torch.empty_like(tensor)
        return self._submitter.submit(request, signature, (tensor, output), [given], _is_now(opts))

    @writes_strided
    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: c10d.ReduceScatterOptions | None = None
    ) -> Work:
        """Reduce, and keep this rank's part of the result; the parts are adjacent in the input."""
        what = "reduce_scatter"
        source, target = readable(input, what).view(-1), writable(output, what).view(-1)
        require_times(self._size, source, target, what)
        require_apart(source, target, self._rank * target.nbytes, what)
        fold = fold_of(_asked(opts), source.dtype)
        if fold is not None:
            return self._fold(
                what, fold, source, lambda whole: target.copy_(whole.chunk(self._size)[self._rank]), output, opts
            )
        reduction = _reduction(opts, input, what)
        signature = (reduction, source.dtype, source.shape)
        if reduction.op in (Sum, Average):
            request = Request(kinds.REDUCESCATTER, what, reduction)
            return self._submitter.submit(request, signature, (source, target), [output], _is_now(opts), given=[input])
        # The engine scatters only sums.
        whole = torch.empty_like(source)

        def keep(_: SinglePart) -> None:
            target.copy_(whole.chunk(self._size)[self._rank])
            note_use(whole)

        request = Request(kinds.ALLREDUCE, what, reduction)
        return self._submitter.submit(request, signature, (source, whole), [output], _is_now(opts), keep, [input])

    @overloaded(c10d.ReduceScatterOptions, 2, "op", "timeout")
    @writes_strided
    def reduce_scatter(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Sequence[Tensor]],
        opts: c10d.ReduceScatterOptions | None = None,
    ) -> Work:
        """Do as `reduce_scatter_single`; the parts are separate tensors."""
        what, output = "reduce_scatter", one(output_tensors, "reduce_scatter")
        parts = input_tensors[0]
        if len(parts) != self._size or any(part.numel() != output.numel() for part in parts):
            raise InvalidRequest(what, f"needs {self._size} inputs, each with as many elements as the output")
        whole = packed([readable(part, what).view(-1) for part in parts])
        return self.reduce_scatter_single(output, whole.view(parts[0].dtype), opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: c10d.ReduceScatterOptions | None = None
    ) -> Work:
        """Do as `reduce_scatter_single` for several pairs of tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return self._submitter.together([self.reduce_scatter_single(output, input, opts) for output, input in pairs])

    # Movement

    @overloaded(c10d.BroadcastOptions, 1, "root", "timeout")
    @writes_strided
    def broadcast(self, tensors: Sequence[Tensor], opts: c10d.BroadcastOptions) -> Work:
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
        require_times(self._size, target, source, what)
        require_apart(source, target, -self._rank * source.nbytes, what)
        request = Request(kinds.ALLGATHER, what)
        return self._submitter.submit(request, source.dtype, (source, target), [output], _is_now(opts), given=[input])

    @overloaded(c10d.AllgatherOptions, 2, "timeout")  # type: ignore[attr-defined]
    @writes_strided
    def allgather(
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

        def finish(part: SinglePart) -> None:
            if whole is None:
                unpack(targets, part.result())

        request = Request(kinds.ALLGATHER, what)
        return self._submitter.submit(
            request, source.dtype, (source, whole), results, _is_now(opts), finish, given=input_tensors
        )

    @writes_strided
    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[Tensor]],
        input_list: Sequence[Tensor],
        opts: "AllgatherOptions | None" = None,
    ) -> Work:
        """Do as `allgather` for several tensors; a list of outputs for each rank."""
        what, results = "all_gather_coalesced", [[*each] for each in zip(*output_lists, strict=True)]
        sources = [flat(each, what) for each in input_list]
        targets = [[flat(each, what, write=True) for each in outputs] for outputs in results]

        def finish(part: SinglePart) -> None:
            for rows, result in zip(targets, part.results(), strict=True):
                unpack(rows, result)

        request, signature = Request(kinds.ALLGATHER, what, grouped=True), tuple(each.dtype for each in sources)
        outputs = list(chain(*results))
        return self._submitter.submit(request, signature, (sources, None), outputs, _is_now(opts), finish, input_list)

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
        opts: c10d.AllToAllOptions | None = None,
    ) -> Work:
        """Send rows of the input to each rank, write received rows into the output; in equal parts without splits."""
        what = "all_to_all"
        source, target = flat(input, what), flat(output, what, write=True)
        require_apart(source, target, None, what)
        sent = shares_of(source, input, input_split_sizes, self._size, "input", what)
        wanted = shares_of(target, output, output_split_sizes, self._size, "output", what)
        finish = partial(require_received, what, wanted)
        request = Request(kinds.ALLTOALL, what, splits=sent)
        return self._submitter.submit(request, (), (source, target), [output], _is_now(opts), finish, [input])

    @writes_strided
    def alltoall(  # type: ignore[override]
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Tensor],
        opts: c10d.AllToAllOptions | None = None,
    ) -> Work:
        """Send one tensor to each rank, and write each rank's tensor into one of the outputs."""
        return self._exchange("all_to_all", output_tensors, input_tensors, opts)

    @overloaded(c10d.GatherOptions, 2, "root", "timeout")
    @writes_strided
    def gather(
        self, output_tensors: Sequence[Sequence[Tensor]], input_tensors: Sequence[Tensor], opts: c10d.GatherOptions
    ) -> Work:
        """Write each rank's tensor into one of the root's outputs."""
        tensor = one(input_tensors, "gather")
        nothing = tensor.new_empty(0)
        outputs = output_tensors[0] if opts.rootRank == self._rank else [nothing] * self._size
        inputs = [tensor if rank == opts.rootRank else nothing for rank in range(self._size)]
        return self._exchange("gather", outputs, inputs, opts)

    @overloaded(c10d.ScatterOptions, 2, "root", "timeout")
    @writes_strided
    def scatter(
        self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Sequence[Tensor]], opts: c10d.ScatterOptions
    ) -> Work:
        """Write one of the root's tensors into each rank's output."""
        tensor = one(output_tensors, "scatter")
        nothing = tensor.new_empty(0)
        outputs = [tensor if rank == opts.rootRank else nothing for rank in range(self._size)]
        inputs = input_tensors[0] if opts.rootRank == self._rank else [nothing] * self._size
        return self._exchange("scatter", outputs, inputs, opts)

    @overloaded(c10d.BarrierOptions, 0, "timeout")
    def barrier(self, opts: c10d.BarrierOptions | None = None) -> Work:
        """Wait until all ranks have called it."""
        return self._submitter.submit(Request(kinds.BARRIER, "barrier"), (), (None, None), [], _is_now(opts))

    # The names that torch 2.12 and older call; its stubs have other arguments
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    # Between two ranks

    def send(self, tensors: Sequence[Tensor], dst_rank: int, tag: int) -> Work:
        """Send the tensor to a rank of the group; the work completes once the tensor may be changed."""
        return self._message("send", tensors, dst_rank, tag)

    @writes_strided
    def recv(self, tensors: Sequence[Tensor], src_rank: int, tag: int) -> Work:
        """Overwrite the tensor with the oldest message of that rank with the tag, of as many bytes."""
        return self._message("recv", tensors, src_rank, tag)

    @writes_strided
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Work:
        """Do as `recv`, with a message of any rank."""
        return self._message("recv", tensors, ANY_RANK, tag)

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called it, up to `timeout`; raises `CollectiveTimeout` with missing ranks."""
        self._barriers += 1  # a late message of one that failed does not count for the next
        start = partial(self._submitter.transfer, tag=BARRIER_TAG + self._barriers)
        monitored_barrier(start, self._rank, self._size, timeout, wait_all_ranks)

    def _message(self, what: str, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        if not 0 <= tag < BARRIER_TAG:
            raise InvalidRequest(what, f"tags are 0 to {BARRIER_TAG - 1}, got {tag}")
        return self._submitter.transfer(what, one(tensors, what), peer, tag)

    def _fold(
        self,
        what: str,
        fold: Fold,
        source: Tensor,
        keep: Callable[[Tensor], Tensor],
        output: Tensor,
        opts: "_Options | None",
    ) -> Work:
        return fold_bits(self._submitter, what, fold, source, keep, [output], _is_now(opts))

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
            require_received(what, wanted, part)
            if whole is None:
                unpack(targets, part.result())

        request = Request(kinds.ALLTOALL, what, splits=[source.numel() for source in sources])
        pair = (packed(sources), whole)
        return self._submitter.submit(request, (), pair, list(outputs), _is_now(opts), finish, inputs)


def _end(context: Context, follower: Follower, process: int) -> None:
    if os.getpid() == process:  # a forked child has no such threads
        context.shutdown()
        follower.close()


def _is_now(opts: "_Options | None") -> bool:
    return opts is not None and not opts.asyncOp


def _asked(opts: c10d.ReduceOptions | c10d.ReduceScatterOptions | c10d.AllreduceOptions | None) -> dist.ReduceOp:
    return dist.ReduceOp(dist.ReduceOp.SUM) if opts is None else opts.reduceOp


def _reduction(
    opts: c10d.AllreduceOptions | c10d.ReduceOptions | c10d.ReduceScatterOptions | None, tensor: Tensor, what: str
) -> Reduction:
    return reduction_of(_asked(opts), tensor.dtype, what)
