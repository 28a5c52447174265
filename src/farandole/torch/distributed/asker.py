"""Asks the engine for what a process group is asked for."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from farandole.core import kinds
from farandole.errors import CollectiveError, MismatchError
from farandole.torch.distributed.names import Names, SinglePart
from farandole.torch.distributed.reduction import Reduction
from farandole.torch.distributed.work import Follower, Results, Underway, Work

__all__ = ["Asker"]

Tensor = torch.Tensor
Finish: TypeAlias = Callable[[SinglePart], None]


class Asker:
    """Starts operations in an engine, in the order of the calls, and makes `Work` of them.

    With `now` an operation is done when the method returns, which takes less time than to start it and to wait.
    `what` is torch's name for it, for errors; `signature` is what all ranks ask for alike; `results` are the tensors
    that the caller finds the result in; `finish` is to be called when the engine is done."""

    def __init__(self, engine: Any, follower: Follower) -> None:
        self._engine, self._follower = engine, follower
        self._names = Names()

    def reduce(self, what: str, tensor: Tensor, reduction: Reduction, now: bool) -> Work:
        """Reduce in place."""
        op, prescale, _ = reduction
        slot = self._names.next((what, op, prescale, tensor.dtype, tensor.shape))
        name = slot.free()
        try:
            if now:
                self._engine.reduce(name, tensor, tensor, op, prescale, 1.0)
                return Work([tensor], None, self._follower)
            part = slot.part = self._engine.start_reduce(name, tensor, tensor, op, prescale, 1.0)
        except CollectiveError as error:
            raise self._explained(what, tensor, error) from None
        return Work([tensor], Underway([part], [tensor], partial(self._explained, what, tensor)), self._follower)

    def reduce_group(self, what: str, tensors: Sequence[Tensor], reduction: Reduction, now: bool) -> Work:
        """Reduce several in place, none before all are ready on all ranks."""
        results, (op, prescale, _) = list(tensors), reduction
        slot = self._names.next((what, op, prescale, *((each.dtype, each.shape) for each in results)))
        name = slot.free()
        try:
            if now:
                self._engine.reduce_group(name, results, results, op, prescale, 1.0, True)
                return Work(results, None, self._follower)
            part = slot.part = self._engine.start_group(
                kinds.ALLREDUCE, name, results, results, op, prescale, 1.0, True
            )
        except CollectiveError as error:
            raise self._explained(what, results[0], error) from None
        return Work(results, Underway([part], results, partial(self._explained, what, results[0])), self._follower)

    def ask(
        self,
        kind: int,
        what: str,
        signature: Hashable,
        tensors: tuple[Tensor | None, Tensor | None],
        results: Results,
        now: bool,
        terms: Mapping[str, Any],
        finish: Finish | None = None,
    ) -> Work:
        """Do an operation of `kind` on `tensors`, which are its input and its output, if any."""
        slot = self._names.next((what, signature))
        start = self._engine.run if now else self._engine.submit
        try:
            part = start(kind, slot.free(), *tensors, **terms)
            if now:
                if finish is not None:
                    finish(part)
                return Work(results, None, self._follower)
        except CollectiveError as error:
            raise self._explained(what, tensors[0], error) from None
        slot.part = part
        finishing = None if finish is None else partial(finish, part)
        return Work(
            results, Underway([part], results, partial(self._explained, what, tensors[0]), finishing), self._follower
        )

    def together(self, works: Sequence[Work]) -> Work:
        """Make one of several."""
        results = [tensor for work in works for tensor in work.results]
        pending = [work.underway for work in works if work.underway is not None]
        return Work(results, Underway(pending, results, lambda error: error) if pending else None, self._follower)

    def _explained(self, what: str, tensor: Tensor | None, error: CollectiveError) -> CollectiveError:
        """Give an error torch's name for what has failed."""
        if isinstance(error, MismatchError):
            self._names.start_over()
        error.name = what if tensor is None else f"{what} of {str(tensor.dtype)[6:]}{list(tensor.shape)}"
        error.args = (error.name, *error.args[1:])
        return error
