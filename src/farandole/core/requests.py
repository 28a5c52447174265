"""What the engine is asked for: the name on the wire, the checks at the call, the memory for the result."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from farandole import _native
from farandole.core import default, kinds
from farandole.core.adapter import Adapter
from farandole.core.handle import Handle
from farandole.core.process_sets import ProcessSet, global_process_set, seat_of
from farandole.core.reduction import Sum
from farandole.core.seat import Seat
from farandole.errors import InvalidRequest

__all__ = ["Requests", "named"]

T = TypeVar("T")


class Requests(Generic[T]):
    """One method per kind of operation. With `now` it is done when the method returns, otherwise only started.

    The engine reads and writes tensors where they lie, so what it cannot read as it lies is refused, never copied. It
    also refuses what is wrong on this rank alone: a root or splits that do not fit, a name that is in flight already.
    """

    def __init__(self, adapter: Adapter[T]) -> None:
        self.adapter = adapter

    def reduce(
        self, tensor: T, name: str | None, op: int, prescale: float, postscale: float, members: ProcessSet, write: bool
    ) -> T:
        """Do an allreduce, into `tensor` itself with `write`, and return the result."""
        # Small tensors are reduced in less time than a few calls of Python take, so there are as few as possible.
        seat = default.seat() if members is global_process_set else seat_of(members, "allreduce", name)
        wire = seat.wire_name("allreduce", name)
        if write:
            self.adapter.overwrite(tensor, wire)
            output = tensor
        else:
            self.adapter.check(tensor, wire)
            output = self.adapter.empty_like(tensor)
        try:
            if name is not None:
                seat.engine.reduce(wire, tensor, output, op, prescale, postscale)
            else:
                seat.engine.run(
                    kinds.ALLREDUCE,
                    wire,
                    tensor,
                    output,
                    op=op,
                    prescale=prescale,
                    postscale=postscale,
                    cacheable=False,
                )
        except Exception as error:
            raise self._explained(error, tensor, wire) from None
        return output

    def start_reduce(
        self, tensor: T, name: str | None, op: int, prescale: float, postscale: float, members: ProcessSet, write: bool
    ) -> Handle[T]:
        """Start an allreduce, into `tensor` itself with `write`."""
        seat, wire = named("allreduce", name, members)
        output = self._output(tensor, wire, write)
        try:
            if name is not None:
                part = seat.engine.start_reduce(wire, tensor, output, op, prescale, postscale)
            else:
                part = seat.engine.submit(
                    kinds.ALLREDUCE,
                    wire,
                    tensor,
                    output,
                    op=op,
                    prescale=prescale,
                    postscale=postscale,
                    cacheable=False,
                )
        except Exception as error:
            raise self._explained(error, tensor, wire) from None
        return Handle(part, output)

    def start_reduce_group(
        self,
        tensors: Sequence[T],
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        members: ProcessSet,
        write: bool,
    ) -> Handle[list[T]]:
        """Start an allreduce of several tensors, none of which begins before all are ready on all ranks."""
        seat, wire, outputs = self._reducible(tensors, name, members, write)
        try:
            part = seat.engine.start_group(
                kinds.ALLREDUCE, wire, tensors, outputs, op, prescale, postscale, name is not None
            )
        except Exception as error:
            raise self._explained_group(error, tensors, wire) from None
        return Handle(part, outputs)

    def reduce_group(
        self,
        tensors: Sequence[T],
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        members: ProcessSet,
        write: bool,
    ) -> list[T]:
        """Do what `start_reduce_group` starts."""
        seat, wire, outputs = self._reducible(tensors, name, members, write)
        try:
            seat.engine.reduce_group(wire, tensors, outputs, op, prescale, postscale, name is not None)
        except Exception as error:
            raise self._explained_group(error, tensors, wire) from None
        return outputs

    def start_reduce_each(
        self,
        tensors: Sequence[T],
        names: Sequence[str],
        op: int,
        prescale: float,
        postscale: float,
        members: ProcessSet,
        wake: bool,
    ) -> Handle[Sequence[T]]:
        """Start an allreduce of each tensor in place, in one call; they have nothing to do with each other.

        Without `wake` nothing happens before this rank waits for one of them: for who does that at once.
        """
        seat, _ = named("allreduce", names[0], members)
        wires = [seat.wire_name("allreduce", name) for name in names]
        self.adapter.overwrite_each(tensors, wires[0])
        try:
            part = seat.engine.start_each(wires, tensors, tensors, op, prescale, postscale, wake)
        except Exception as error:
            for tensor, wire in zip(tensors, wires, strict=True):
                if self.adapter.refusal(tensor) is not None:
                    raise self._explained(error, tensor, wire) from None
            raise
        return Handle(part, tensors)

    def gather(self, tensor: T, name: str | None, members: ProcessSet, now: bool) -> Handle[T]:
        """Concatenate over ranks along the first dimension."""
        seat, wire = named("allgather", name, members)
        self.adapter.check(tensor, wire)
        start = seat.engine.run if now else seat.engine.submit
        try:
            part = start(kinds.ALLGATHER, wire, tensor, None, cacheable=name is not None)
        except Exception as error:
            raise self._explained(error, tensor, wire) from None
        return Handle(part, finish=lambda: self.adapter.adopt(part.result(), tensor))

    def start_gather_group(self, tensors: Sequence[T], name: str | None, members: ProcessSet) -> Handle[list[T]]:
        """Start an allgather of several tensors, none of which begins before all are ready on all ranks."""
        seat, wire = named("grouped_allgather", name, members)
        self.adapter.check_each(tensors, wire)
        try:
            part = seat.engine.start_group(kinds.ALLGATHER, wire, tensors, [], Sum, 1.0, 1.0, name is not None)
        except Exception as error:
            raise self._explained_group(error, tensors, wire) from None
        return self._adopting(part, tensors)

    def broadcast(
        self, tensor: T, root: int, name: str | None, members: ProcessSet, write: bool, now: bool
    ) -> Handle[T]:
        """Spread the tensor of the job's rank `root`, into `tensor` itself with `write`."""
        seat, wire = named("broadcast", name, members)
        place = seat.place_of(root, wire)
        output = self._output(tensor, wire, write)
        start = seat.engine.run if now else seat.engine.submit
        try:
            part = start(kinds.BROADCAST, wire, tensor, output, root=place, cacheable=name is not None)
        except Exception as error:
            raise self._explained(error, tensor, wire) from None
        return Handle(part, output)

    def exchange(
        self, tensor: T, splits: object, name: str | None, members: ProcessSet, now: bool
    ) -> Handle[tuple[T, T]]:
        """Send rows to each rank; the result is what came, and how much of it from each rank."""
        seat, wire = named("alltoall", name, members)
        self.adapter.check(tensor, wire)
        shares = None if splits is None else self.adapter.read_splits(splits, wire)
        if shares == []:
            raise InvalidRequest(wire, f"splits is empty; give one number for each of the {seat.size} ranks")
        start = seat.engine.run if now else seat.engine.submit
        try:
            part = start(kinds.ALLTOALL, wire, tensor, None, splits=shares, cacheable=name is not None)
        except Exception as error:
            raise self._explained(error, tensor, wire) from None
        return Handle(
            part,
            finish=lambda: (
                self.adapter.adopt(part.result(), tensor),
                self.adapter.make_splits(part.received_splits()),
            ),
        )

    def scatter(
        self, tensor: T, name: str | None, op: int, prescale: float, postscale: float, members: ProcessSet, now: bool
    ) -> Handle[T]:
        """Reduce, and keep this rank's rows of the result."""
        seat, wire = named("reducescatter", name, members)
        self.adapter.check(tensor, wire)
        start = seat.engine.run if now else seat.engine.submit
        try:
            part = start(
                kinds.REDUCESCATTER,
                wire,
                tensor,
                None,
                op=op,
                prescale=prescale,
                postscale=postscale,
                cacheable=name is not None,
            )
        except Exception as error:
            raise self._explained(error, tensor, wire) from None
        return Handle(part, finish=lambda: self.adapter.adopt(part.result(), tensor))

    def start_scatter_group(
        self,
        tensors: Sequence[T],
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        members: ProcessSet,
    ) -> Handle[list[T]]:
        """Start a reducescatter of several tensors, none of which begins before all are ready on all ranks."""
        seat, wire = named("grouped_reducescatter", name, members)
        self.adapter.check_each(tensors, wire)
        try:
            part = seat.engine.start_group(
                kinds.REDUCESCATTER, wire, tensors, [], op, prescale, postscale, name is not None
            )
        except Exception as error:
            raise self._explained_group(error, tensors, wire) from None
        return self._adopting(part, tensors)

    def _adopting(self, group: _native.GroupHandle, tensors: Sequence[T]) -> Handle[list[T]]:
        return Handle(
            group,
            finish=lambda: [
                self.adapter.adopt(part.result(), like) for part, like in zip(group.parts(), tensors, strict=True)
            ],
        )

    def _reducible(
        self, tensors: Sequence[T], name: str | None, members: ProcessSet, write: bool
    ) -> tuple[Seat, str, list[T]]:
        seat, wire = named("grouped_allreduce", name, members)
        if write:
            self.adapter.overwrite_each(tensors, wire)
            return seat, wire, list(tensors)
        self.adapter.check_each(tensors, wire)
        return seat, wire, [self.adapter.empty_like(tensor) for tensor in tensors]

    def _output(self, tensor: T, wire: str, write: bool) -> T:
        if write:
            self.adapter.overwrite(tensor, wire)
            return tensor
        self.adapter.check(tensor, wire)
        return self.adapter.empty_like(tensor)

    def _explained(self, error: Exception, tensor: T, wire: str) -> Exception:
        """Return what to raise for `error`: the framework's words for what is wrong with the tensor, if anything is."""
        refusal = self.adapter.refusal(tensor)
        return error if refusal is None else InvalidRequest(wire, refusal)

    def _explained_group(self, error: Exception, tensors: Sequence[T], wire: str) -> Exception:
        for tensor in tensors:
            refusal = self.adapter.refusal(tensor)
            if refusal is not None:
                return InvalidRequest(wire, refusal)
        return error


def named(kind: str, name: str | None, members: ProcessSet) -> tuple[Seat, str]:
    """Return the caller's seat among `members` and the operation's name on the wire."""
    seat = default.seat() if members is global_process_set else seat_of(members, kind, name)
    return seat, seat.wire_name(kind, name)
