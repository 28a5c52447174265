"""Submission of a process group's operations to the engine."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from farandole.core.operations.request import Request
from farandole.errors import CollectiveError, MismatchError
from farandole.torch.distributed.names import Names, SinglePart
from farandole.torch.distributed.work import Follower, Results, Underway, Work

__all__ = ["Submitter"]

Tensor = torch.Tensor
Operand: TypeAlias = Tensor | list[Tensor] | None
Finish: TypeAlias = Callable[[SinglePart], None]


class Submitter:
    """Submitter of operations to an engine, in the order of the calls, that returns them as `Work`.

    With `now` an operation has completed when the method returns, which is faster than to start it and to wait. A
    request has torch's name, for errors; `signature` is equal on all ranks; `results` are the tensors that hold the
    result afterwards; `finish` is called when the engine has completed it."""

    def __init__(self, engine: Any, follower: Follower) -> None:
        self._engine, self._follower = engine, follower
        self._names = Names()

    def reduce(self, request: Request, tensor: Tensor, now: bool) -> Work:
        """Reduce in place."""
        signature = (request.reduction, tensor.dtype, tensor.shape)
        return self.submit(request, signature, (tensor, tensor), [tensor], now)

    def reduce_group(self, request: Request, tensors: Sequence[Tensor], now: bool) -> Work:
        """Reduce several tensors in place; none begins before all are requested on all ranks."""
        results = list(tensors)
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
    ) -> Work:
        """Perform `request` on `tensors`, which are its input and its output, if any."""
        what = request.name
        explained = partial(self._explained, what, tensors[0][0] if isinstance(tensors[0], list) else tensors[0])
        operation = self._names.next((what, signature))
        start = self._engine.run if now else self._engine.start
        try:
            part = start(request, operation.free_name(), *tensors)
            if now:
                if finish is not None:
                    finish(part)
                return Work(results, None, self._follower)
        except CollectiveError as error:
            raise explained(error) from None
        operation.part = part
        finishing = None if finish is None else partial(finish, part)
        return Work(results, Underway([part], results, explained, finishing), self._follower)

    def together(self, works: Sequence[Work]) -> Work:
        """Join several into one."""
        results = [tensor for work in works for tensor in work.results]
        pending = [underway for work in works if (underway := work.take()) is not None]
        return Work(results, Underway(pending, results, lambda error: error) if pending else None, self._follower)

    def _explained(self, what: str | None, tensor: Tensor | None, error: CollectiveError) -> CollectiveError:
        """Put torch's name of the operation into its error."""
        if isinstance(error, MismatchError):
            self._names.start_over()
        assert what is not None
        error.name = what if tensor is None else f"{what} of {str(tensor.dtype)[6:]}{list(tensor.shape)}"
        error.args = (error.name, *error.args[1:])
        return error
