"""Submission of requests to the engine: names on the wire, checks at the call, and memory for the results."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
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

P = ParamSpec("P")
T = TypeVar("T")


_KEPT = 16384  # largest number of requests in each table
_MOST_ROWS = 2**63 - 1  # the engine's sizes have 64 bits


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


@lru_cache(256)
def _wire_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names on the wire of many allreduces, which the steps of a training repeat."""
    return tuple(f"allreduce.{name}" for name in names)


class Requests(Generic[T]):
    """Methods that submit requests for one framework's tensors.

    The engine reads and writes contiguous tensors in place. It gets a contiguous copy of a strided one, because ranks
    may differ in strides, and copies of a group's tensors that share memory and are overwritten, so that each is
    reduced from its values at the call. Other tensors that it cannot use are refused. The engine also refuses requests
    that are invalid on this rank alone, such as a wrong root, wrong splits, or a name that is in flight. Bindings that
    differentiate or trace override `run`.

    `tensors` are a sequence for a grouped request, else one tensor. With `write`, which allreduces and broadcasts
    support, the results overwrite them. The result is a tensor, a list of tensors for a grouped request, or for an
    alltoall a pair: the rows, and the number of rows from each rank.
    """

    def __init__(self, adapter: Adapter[T]) -> None:
        self.adapter = adapter
        self._own_type, self._overwrite, self._check = adapter.own_type, adapter.overwrite, adapter.check

    def run(self, request: Request, tensors: T | Sequence[T], write: bool = False) -> Any:
        """Return the result of `request`. Blocks until every rank has asked."""
        # A small allreduce takes no longer than a few Python calls, so this path has few, and reads all fields at once.
        kind, name, _, _, _, grouped, process_set, wire = request
        if kind != kinds.ALLREDUCE or grouped:
            return self._submit(request, tensors, write, now=True).wait()
        tensor: T = tensors  # type: ignore[assignment]  # the request is not grouped
        membership = default.shared if process_set is global_process_set else None
        if membership is None:
            membership = membership_of(process_set, request.stem, name)
        wire = wire or membership.wire_name(request.stem, name)
        if type(tensor) is not self._own_type:
            (self.adapter.overwrite if write else self.adapter.check)(tensor, wire)
        output = tensor if write else self.adapter.empty_like(tensor)
        try:
            membership.engine.run(request, wire, tensor, output)
        except Exception as error:
            return self.run_dense(error, request._replace(wire=wire), tensor, write)
        return output

    def run_dense(self, error: Exception, request: Request, tensor: T, write: bool) -> T:
        """Return the result of the allreduce `request`, which the engine refused with `error`, by a contiguous copy.

        Raises `error` if it has another reason."""
        assert request.wire is not None
        (dense,) = self._dense(error, (tensor,), (request.wire,), write)
        return self.adapter.restore(Requests.run(self, request, dense, write), tensor, write)

    def start(self, request: Request, tensors: T | Sequence[T], write: bool = False, wake: bool = True) -> Handle[Any]:
        """Start `request`. Never blocks. No operation of a group begins before all are requested on all ranks.

        Without `wake` the engine is not woken: the operation starts when this rank waits for one."""
        kind, name, _, _, _, grouped, process_set, wire = request
        membership = default.shared
        if kind != kinds.ALLREDUCE or grouped or process_set is not global_process_set or membership is None:
            return self._submit(request, tensors, write, wake=wake)
        tensor: T = tensors  # type: ignore[assignment]  # the request is not grouped
        wire = wire or membership.wire_name("allreduce", name)
        if type(tensor) is not self._own_type:
            (self.adapter.overwrite if write else self.adapter.check)(tensor, wire)
        output = tensor if write else self.adapter.empty_like(tensor)
        try:
            return Handle(membership.engine.start(request, wire, tensor, output, wake), output)
        except Exception:
            # Nothing was started. This tries a contiguous copy, or raises the error.
            return self._submit(request._replace(wire=wire), tensor, write, wake=wake)

    def _submit(self, request: Request, tensors: Any, write: bool, now: bool = False, wake: bool = True) -> Handle[Any]:
        """Start `request`; with `now` block until it is done."""
        membership = default.shared if request.process_set is global_process_set else None
        if membership is None:
            membership = membership_of(request.process_set, request.stem, request.name)
        wire = request.wire or membership.wire_name(request.stem, request.name)
        adapter, grouped, asked = self.adapter, request.grouped, request
        if request.kind in kinds.ROOTED:
            place = membership.place_of(request.root, wire)
            if place != request.root:
                request = request._replace(root=place)
        if grouped:
            # A generator, such as `model.parameters()`, would be empty after the checks.
            tensors = tensors if isinstance(tensors, (list, tuple)) else list(tensors)
            (adapter.overwrite_each if write else adapter.check_each)(tensors, wire)
        else:
            (adapter.overwrite if write else adapter.check)(tensors, wire)
        if request.splits is not None:
            splits = adapter.read_splits(request.splits, wire)
            if not splits:
                raise InvalidRequest(wire, f"splits is empty; give one number for each of the {membership.size} ranks")
            if not -_MOST_ROWS <= min(splits) <= max(splits) <= _MOST_ROWS:
                raise InvalidRequest(wire, f"splits must be numbers of rows, got {splits}")
            request = request._replace(splits=splits)
        outputs = None  # the engine allocates the results
        if write:
            outputs = list(tensors) if grouped else tensors
        elif request.kind in kinds.KEEPING_SHAPE:
            outputs = list(map(adapter.empty_like, tensors)) if grouped else adapter.empty_like(tensors)
        try:
            engine = membership.engine
            if now:
                part = engine.run(request, wire, tensors, outputs)
            else:
                part = engine.start(request, wire, tensors, outputs, wake)
        except Exception as error:
            if grouped and write and _native.share_memory(tensors):
                dense = [adapter.restore(tensor, adapter.empty_like(tensor), True) for tensor in tensors]
            else:
                dense = self._dense(error, tensors if grouped else (tensors,), repeat(wire), write)
        else:
            if outputs is not None:
                return Handle(part, outputs)
            if part is None:  # of a group without tensors
                return Handle(None, [])
            return Handle(part, finish=partial(self._adopt, asked, part, tensors))
        handle = self._submit(asked._replace(wire=wire), dense if grouped else dense[0], write, now, wake)
        if outputs is None:
            return handle
        restore = self._restore_each if grouped else adapter.restore
        return Handle(handle, finish=lambda: restore(handle.wait(), tensors, write))

    def bind(self, request: Request, tensor: T, changed: Callable[[list[T]], object] | None) -> Callable[[], T]:
        """Return a function that performs the allreduce `request` of `tensor` in place, in whichever job is running.

        It calls `changed`, if given, with a list of the tensor before each reduction."""
        membership, process_set = membership_of(request.process_set, request.stem, request.name), request.process_set
        if request.name is None:
            if default.is_elastic():
                raise InvalidRequest(
                    "bind", "ranks that join an elastic job have not bound what others have; pass name="
                )
            name = f"bound.{next(membership.counters.of['bind'])}"
            request = request.renamed(name)._replace(wire=f"{request.stem}.{name}")
        wire = request.wire or membership.wire_name(request.stem, request.name)
        self.adapter.check(tensor, wire)
        refusal = self.adapter.refusal(tensor)
        if refusal is not None:
            raise InvalidRequest(wire, refusal)
        return _native.Bound(lambda: membership_of(process_set, wire).engine, changed, request, wire, tensor)

    def start_each(
        self, request: Request, names: Sequence[str], tensors: Sequence[T], wake: bool
    ) -> Handle[Sequence[T]]:
        """Start an allreduce of each tensor, in place and independent of the others, in one call.

        `names` replace the name of `request`. Without `wake` the engine is not woken: the operations start when this
        rank waits for one of them.
        """
        membership, _ = named("allreduce", names[0], request.process_set)
        wires = _wire_names(tuple(names))
        self.adapter.overwrite_each(tensors, wires[0])
        try:
            part = membership.engine.start(request, wires, tensors, tensors, wake)
        except Exception as error:
            dense = self._dense(error, tensors, wires, write=True)
        else:
            return Handle(part, tensors)
        each = self.start_each(request, names, dense, wake)
        return Handle(each, finish=lambda: self._restore_each(each.wait(), tensors, write=True))

    def _adopt(self, request: Request, part: _native.Handle, like: Any) -> Any:
        """Return the result of `request` from the engine's memory; `part` is done."""
        adopt = self.adapter.adopt
        if request.grouped:
            return [adopt(*pair) for pair in zip(part.results(), like, strict=True)]
        if request.kind != kinds.ALLTOALL:
            return adopt(part.result(), like)
        return adopt(part.result(), like), self.adapter.make_splits(part.received_splits(), request.splits)

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
    membership = membership_of(process_set, stem, name)
    return membership, membership.wire_name(stem, name)
