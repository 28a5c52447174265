"""Submission of a process group's operations to the engine."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Protocol, TypeAlias, cast

import torch
from torch.autograd import (  # type: ignore[attr-defined]  # torch's stub lacks them
    _record_function_with_args_enter,
    _record_function_with_args_exit,
    profiler,
)

from farandole import _native
from farandole.core.operations.request import Request
from farandole.errors import CollectiveError, MismatchError
from farandole.torch.distributed.names import Names, SinglePart
from farandole.torch.distributed.streams import note_use
from farandole.torch.distributed.tensors import flat
from farandole.torch.distributed.work import Follower, Results, Transfer, Underway, Work

__all__ = ["Submitter"]

Tensor = torch.Tensor
Operand: TypeAlias = Tensor | list[Tensor] | None
Finish: TypeAlias = Callable[[SinglePart], None]


class Engine(Protocol):
    """The calls of the native engine."""

    def start(self, request: Request, name: str, input: Operand, output: Operand) -> SinglePart: ...

    def run(self, request: Request, name: str, input: Operand, output: Operand) -> SinglePart | None: ...

    def start_transfer(self, sends: bool, name: str, tensor: Tensor, peer: int, tag: int) -> SinglePart: ...


class Submitter:
    """Submitter of operations to an engine, in the order of the calls, that returns them as `Work`.

    With `now` an operation has completed when the method returns, which is faster than to start it and to wait. A
    request has torch's name, for errors; `signature` is equal on all ranks; `results` are the tensors that hold the
    result afterwards; `finish` is called when the engine has completed it."""

    def __init__(self, engine: Engine, follower: Follower, title: str) -> None:
        self._engine, self._follower, self._title = engine, follower, title
        self._names = Names()

    def reduce(self, request: Request, tensor: Tensor, now: bool) -> Work:
        """Reduce in place."""
        signature = (request.reduction, tensor.dtype, tensor.shape)
        return self.submit(request, signature, (tensor, tensor), [tensor], now)

    def reduce_group(self, request: Request, tensors: Sequence[Tensor], now: bool) -> Work:
        """Reduce several tensors in place; none begins before all are requested on all ranks.

        Each is reduced from its values at the call, also if tensors share memory, as with gloo."""
        results = list(tensors)
        if _native.share_memory(results):
            copies = [tensor.clone() for tensor in results]

            def finish() -> None:
                for tensor, copy in zip(results, copies, strict=True):
                    tensor.copy_(copy)
                    note_use(copy)

            return self.reduce_group(request, copies, now).finished_by(finish, results)
        signature = (request.reduction, *((each.dtype, each.shape) for each in results))
        return self.submit(request, signature, (results, results), results, now)

    def submit(
        self,
        request: Request,
        signature: Hashable,
        tensors: tuple[Operand, Operand],
        results: Results,
        now: bool,
        finish: Finish | None = None,
        given: Sequence[Tensor] | None = None,
        recorded: bool = False,
    ) -> Work:
        """Perform `request` on `tensors`, which are its input and its output, if any.

        torch's profiler shows the inputs `given`, by default the results."""
        what = request.name
        if profiler._is_profiler_enabled and not recorded:
            start_it = partial(self.submit, request, signature, tensors, results, False, finish, recorded=True)
            return self._record(what, results if given is None else given, start_it, now)
        explained = partial(self._explained, what, tensors[0][0] if isinstance(tensors[0], list) else tensors[0])
        operation = self._names.next((what, signature))
        start = self._engine.run if now else self._engine.start
        try:
            part = cast(SinglePart, start(request, operation.free_name(), *tensors))
            if now:
                if finish is not None:
                    finish(part)
                return Work(results, None, self._follower)
        except CollectiveError as error:
            raise explained(error) from None
        operation.part = part
        finishing = None if finish is None else partial(finish, part)
        return Work(results, Underway([part], results, explained, finishing), self._follower)

    def transfer(self, what: str, tensor: Tensor, peer: int, tag: int, recorded: bool = False) -> Work:
        """Start to send `tensor`, if `what` is "send", or else to receive it, from any rank if `peer` is -1."""
        if profiler._is_profiler_enabled and not recorded:
            title = "recvAnySource" if peer < 0 else what  # as gloo calls it
            return self._record(title, [tensor], partial(self.transfer, what, tensor, peer, tag, True))
        row = flat(tensor.cpu() if tensor.is_cuda else tensor, what, write=what != "send")
        part = self._engine.start_transfer(what == "send", what, row, peer, tag)
        explained = partial(_named, f"{what} with tag {tag}", tensor)

        def copy_back() -> None:
            tensor.detach().copy_(row.view(tensor.dtype).view(tensor.shape))

        finish = copy_back if tensor.is_cuda and what != "send" else None
        return Transfer(part, Underway([part], [tensor], explained, finish), self._follower)

    def together(self, works: Sequence[Work]) -> Work:
        """Join several into one."""
        results = [tensor for work in works for tensor in work.results]
        pending = [underway for work in works if (underway := work.take()) is not None]
        return Work(results, Underway(pending, results, lambda error: error) if pending else None, self._follower)

    def _record(
        self, what: str | None, tensors: Sequence[Tensor], start: Callable[[], Work], now: bool = False
    ) -> Work:
        """Start an operation, with `now` run it to its end, as an event of torch's profiler, which runs."""
        record = _record_function_with_args_enter(f"{self._title}:{what}", *tensors)
        try:
            work = start()
            assert work.underway is not None
        except BaseException:
            _record_function_with_args_exit(record)
            raise
        # An event that ends in another thread is asynchronous: other operations are beside it, not below it.
        end = partial(torch.ops.profiler._call_end_callbacks_on_jit_fut, record)
        work.recorded = self._follower.future_of(work.underway, end)
        if now:
            work.wait()
        return work

    def _explained(self, what: str | None, tensor: Tensor | None, error: CollectiveError) -> CollectiveError:
        """Put torch's name of the collective into its error."""
        if isinstance(error, MismatchError):  # on all ranks
            self._names.start_over()
        return _named(what, tensor, error)


def _named(what: str | None, tensor: Tensor | None, error: CollectiveError) -> CollectiveError:
    """Put torch's name of the operation into its error."""
    assert what is not None
    error.name = what if tensor is None else f"{what} of {str(tensor.dtype)[6:]}{list(tensor.shape)}"
    error.args = (error.name, *error.args[1:])
    return error
