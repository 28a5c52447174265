"""Submission of requests to the engine: names on the wire, checks at the call, and memory for the results."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import repeat
from operator import is_
from typing import Any, Generic, ParamSpec, TypeVar

from farandole import _native
from farandole.core import default
from farandole.core.operations import kinds
from farandole.core.operations.adapter import Adapter
from farandole.core.operations.handle import Handle
from farandole.core.operations.reduction import Average, Reduction, Sum, choose_reduction
from farandole.core.operations.request import Request
from farandole.core.process_sets.membership import Membership
from farandole.core.process_sets.process_set import ProcessSet, global_process_set, membership_of
from farandole.errors import InvalidRequest, UnsupportedReduction

__all__ = ["Requests", "allreduce_request", "named", "plain", "request_of"]

P = ParamSpec("P")
T = TypeVar("T")


_KEPT = 16384  # largest number of requests in each table


def _remembered(make: Callable[P, Request]) -> Callable[P, Request]:
    kept = lru_cache(_KEPT)(make)

    def find(*args: P.args, **kwargs: P.kwargs) -> Request:
        try:
            return kept(*args, **kwargs)  # type: ignore[arg-type]  # P has no bound
        except TypeError:  # an argument without a hash, such as an array as a factor
            return make(*args, **kwargs)

    return find


@_remembered
def request_of(
    kind: int,
    name: str | None,
    process_set: ProcessSet,
    op: int = Sum,
    prescale: float = 1.0,
    postscale: float = 1.0,
    grouped: bool = False,
    root: int = 0,
) -> Request:
    """Return the request with these fields; repeated calls return the same object.

    Raises `UnsupportedReduction` for a reducescatter with an `op` other than Average and Sum."""
    reduction = Reduction(op, prescale, postscale)
    if kind == kinds.ALLREDUCE:
        reduction = choose_reduction(op, None, prescale, postscale)
    elif kind == kinds.REDUCESCATTER and op not in (Average, Sum):
        raise UnsupportedReduction(name or "reducescatter", "reducescatter supports Average and Sum only")
    made = Request(kind, name, reduction, root, None, grouped, process_set)
    return made if name is None else made._replace(wire=f"{made.stem}.{name}")


# Allreduces over all ranks by `op` and name, with defaults for all other fields. A lookup by all fields takes twice as
# long, and submitting a small tensor takes only as long as a few lookups.
plain: dict[tuple[int | None, str | None], Request] = {}


def allreduce_request(
    op: int | None,
    average: bool | None,
    name: str | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    grouped: bool = False,
) -> Request:
    """Return the request for an allreduce; raises `ValueError` for an invalid `op`, or if `average` is given too."""
    if average is None and prescale == 1.0 and postscale == 1.0 and process_set is global_process_set and not grouped:
        try:
            return plain[op, name]
        except KeyError:
            if len(plain) >= _KEPT:
                plain.clear()
            made = request_of(kinds.ALLREDUCE, name, process_set, Average if op is None else op)
            return plain.setdefault((op, name), made)
    if op is None or average is not None:
        op = choose_reduction(op, average).op
    return request_of(kinds.ALLREDUCE, name, process_set, op, prescale, postscale, grouped)


class Requests(Generic[T]):
    """Methods that submit requests for one framework's tensors.

    The engine reads and writes contiguous tensors in place. It gets a contiguous copy of a strided one, because ranks
    may differ in strides. Other tensors that it cannot use are refused. The engine also refuses requests that are
    invalid on this rank alone, such as a wrong root, wrong splits, or a name that is in flight. Bindings that
    differentiate or trace override `run` and `run_group`.
    """

    def __init__(self, adapter: Adapter[T]) -> None:
        self.adapter = adapter
        self._own_type = adapter.own_type

    def run(self, request: Request, tensor: T) -> Any:
        """Return the result of `request` in new memory; for an alltoall with the number of rows from each rank.

        Blocks until every rank has asked.
        """
        if request.kind == kinds.ALLREDUCE:
            return self.reduce(request, tensor, False)
        return self.start(request, tensor, write=False, now=True).wait()

    def run_group(self, request: Request, tensors: Sequence[T]) -> list[T]:
        """Return the results of a grouped `request` in new memory. Blocks until every rank has asked."""
        if request.kind == kinds.ALLREDUCE:
            return self.reduce_group(request, tensors, write=False)
        return self.start_group(request, tensors).wait()

    def reduce(self, request: Request, tensor: T, write: bool, membership: Membership | None = None) -> T:
        """Perform an allreduce, in place with `write`, and return the result. Blocks as `run` does.

        A caller that knows its membership in the request's process set passes it to save time: a few Python calls take
        longer than a small allreduce."""
        wire = request.wire
        if membership is None or wire is None:
            membership, wire = _addressed(request)
        output = tensor
        if type(tensor) is not self._own_type:
            (self.adapter.overwrite if write else self.adapter.check)(tensor, wire)
        if not write:
            output = self.adapter.empty_like(tensor)
        try:
            membership.engine.run(request, wire, tensor, output)
        except Exception as error:
            (dense,) = self._dense(error, (tensor,), (wire,), write)
        else:
            return output
        made = self.reduce(request._replace(wire=wire), dense, write, membership)
        return self.adapter.restore(made, tensor, write)

    def start_reduce(self, request: Request, tensor: T, write: bool) -> Handle[T]:
        """Start an allreduce, in place with `write`. Never blocks."""
        membership, wire, output = self._prepare(request, tensor, write)
        try:
            part = membership.engine.start(request, wire, tensor, output)
        except Exception as error:
            (dense,) = self._dense(error, (tensor,), (wire,), write)
        else:
            return Handle(part, output)
        handle = self.start_reduce(request._replace(wire=wire), dense, write)
        return Handle(handle, finish=lambda: self.adapter.restore(handle.wait(), tensor, write))

    def overwrite(self, request: Request, tensor: T) -> T:
        """Perform `request`, an allreduce or broadcast, in place, and return `tensor`. Blocks as `run` does."""
        if request.kind == kinds.ALLREDUCE:
            return self.reduce(request, tensor, write=True)
        overwritten: T = self.start(request, tensor, write=True, now=True).wait()
        return overwritten

    def start(self, request: Request, tensor: T, write: bool = False, now: bool = False) -> Handle[Any]:
        """Start `request`, which is not an allreduce, in place with `write`.

        Blocks until it is done with `now`, else never.
        """
        asked, kind = request, request.kind
        membership, wire = _addressed(request)
        if kind == kinds.BROADCAST:
            place = membership.place_of(request.root, wire)
            if place != request.root:
                request = request._replace(root=place)
        given = request.splits
        if given is not None:
            self.adapter.check(tensor, wire)
            splits = self.adapter.read_splits(given, wire)
            if not splits:
                raise InvalidRequest(wire, f"splits is empty; give one number for each of the {membership.size} ranks")
            request = request._replace(splits=splits)
        output = None
        if write:
            self.adapter.overwrite(tensor, wire)
            output = tensor
        else:
            self.adapter.check(tensor, wire)
            if kind == kinds.BROADCAST:
                output = self.adapter.empty_like(tensor)
        try:
            engine = membership.engine
            part = engine.run(request, wire, tensor, output) if now else engine.start(request, wire, tensor, output)
        except Exception as error:
            (dense,) = self._dense(error, (tensor,), (wire,), write)
        else:
            if output is not None or part is None:
                return Handle(part, output)
            return Handle(part, finish=self._finish(kind, part, tensor, given))
        handle = self.start(asked._replace(wire=wire), dense, write, now)
        if output is None:
            return handle
        return Handle(handle, finish=lambda: self.adapter.restore(handle.wait(), tensor, write))

    def start_group(self, request: Request, tensors: Sequence[T], write: bool = False) -> Handle[list[T]]:
        """Start a grouped `request`: no operation begins before all are requested on all ranks. Never blocks."""
        membership, wire, outputs = self._prepare_group(request, tensors, write)
        try:
            part = membership.engine.start(request, wire, tensors, outputs)
        except Exception as error:
            dense = self._dense(error, tensors, repeat(wire), write)
        else:
            if outputs is not None:
                return Handle(part, outputs)
            adopt = self.adapter.adopt
            return Handle(part, finish=lambda: [adopt(*pair) for pair in zip(part.results(), tensors, strict=True)])
        group = self.start_group(request._replace(wire=wire), dense, write)
        if outputs is None:
            return group
        return Handle(group, finish=lambda: self._restore_each(group.wait(), tensors, write))

    def reduce_group(self, request: Request, tensors: Sequence[T], write: bool) -> list[T]:
        """Perform a grouped allreduce, in place with `write`, and return the results. Blocks as `run` does."""
        membership, wire, outputs = self._prepare_group(request, tensors, write)
        assert outputs is not None
        try:
            membership.engine.run(request, wire, tensors, outputs)
        except Exception as error:
            dense = self._dense(error, tensors, repeat(wire), write)
        else:
            return outputs
        return self._restore_each(self.reduce_group(request._replace(wire=wire), dense, write), tensors, write)

    def start_each(
        self, request: Request, names: Sequence[str], tensors: Sequence[T], wake: bool
    ) -> Handle[Sequence[T]]:
        """Start an allreduce of each tensor, in place and independent of the others, in one call.

        `names` replace the name of `request`. Without `wake` the engine is not woken: the operations start when this
        rank waits for one of them.
        """
        membership, _ = named("allreduce", names[0], request.process_set)
        wires = [membership.wire_name("allreduce", name) for name in names]
        self.adapter.overwrite_each(tensors, wires[0])
        try:
            part = membership.engine.start(request, wires, tensors, tensors, wake)
        except Exception as error:
            dense = self._dense(error, tensors, wires, write=True)
        else:
            return Handle(part, tensors)
        each = self.start_each(request, names, dense, wake)
        return Handle(each, finish=lambda: self._restore_each(each.wait(), tensors, write=True))

    def _finish(self, kind: int, part: _native.Handle, like: T, given: object) -> Callable[[], Any]:
        """Return a function that makes the result from the engine's memory, once `part` is done."""
        if kind != kinds.ALLTOALL:
            return lambda: self.adapter.adopt(part.result(), like)
        return lambda: (
            self.adapter.adopt(part.result(), like),
            self.adapter.make_splits(part.received_splits(), given),
        )

    def _prepare(self, request: Request, tensor: T, write: bool) -> tuple[Membership, str, T]:
        membership, wire = _addressed(request)
        if write:
            self.adapter.overwrite(tensor, wire)
            return membership, wire, tensor
        self.adapter.check(tensor, wire)
        return membership, wire, self.adapter.empty_like(tensor)

    def _prepare_group(
        self, request: Request, tensors: Sequence[T], write: bool
    ) -> tuple[Membership, str, list[T] | None]:
        membership, wire = _addressed(request)
        if write:
            self.adapter.overwrite_each(tensors, wire)
            return membership, wire, list(tensors)
        self.adapter.check_each(tensors, wire)
        if request.kind != kinds.ALLREDUCE:
            return membership, wire, None
        return membership, wire, [self.adapter.empty_like(tensor) for tensor in tensors]

    def _dense(self, error: Exception, tensors: Sequence[T], wires: Iterable[str], write: bool) -> list[T]:
        """Return `tensors`, which the engine refused with `error`, with contiguous copies in place of strided ones.

        Raises `error` if it has another reason, in the adapter's words if it is a refusal of a tensor."""
        dense = []
        for tensor, wire in zip(tensors, wires, strict=False):
            refusal = self.adapter.refusal(tensor)
            if refusal is not None:
                raise InvalidRequest(wire, refusal) from None
            dense.append(self.adapter.dense(tensor, wire, write))
        # The engine looks at all tensors before it starts anything, so nothing is under way.
        if not isinstance(error, InvalidRequest) or all(map(is_, dense, tensors)):
            raise error
        return dense

    def _restore_each(self, made: Sequence[T], tensors: Sequence[T], write: bool) -> list[T]:
        """Return the results `made` of contiguous copies in the memory of `tensors`, or in their memory formats."""
        return [self.adapter.restore(each, tensor, write) for each, tensor in zip(made, tensors, strict=True)]


def named(stem: str, name: str | None, process_set: ProcessSet) -> tuple[Membership, str]:
    """Return the caller's membership in `process_set` and the operation's name on the wire."""
    membership = default.membership() if process_set is global_process_set else membership_of(process_set, stem, name)
    return membership, membership.wire_name(stem, name)


def _addressed(request: Request) -> tuple[Membership, str]:
    process_set = request.process_set
    membership = (
        default.membership()
        if process_set is global_process_set
        else membership_of(process_set, request.stem, request.name)
    )
    return membership, request.wire or membership.wire_name(request.stem, request.name)
