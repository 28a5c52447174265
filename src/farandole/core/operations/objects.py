"""Collectives over Python objects, as pickles of any size.

Unpickling can run code of the sender. It is safe here because all bytes come from ranks of this job: the transport
accepts no peer that has not proved the job's secret (`farandole.meeting.handshake`).
"""

import io
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import cloudpickle

from farandole.core.operations import kinds
from farandole.core.operations.request import Request
from farandole.core.operations.requests import named
from farandole.core.process_sets.process_set import ProcessSet, global_process_set
from farandole.errors import InvalidRequest, spell_ranks
from farandole.meeting.frames import LENGTH, frame, split_frames

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Unpicklable:
    """Travels in place of an object that its rank cannot pickle, so that the other ranks do not wait for it."""

    why: str


def broadcast_object(
    obj: T | None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """Return the object of rank `root_rank`, which cloudpickle must be able to pickle; the root gets its own back.

    Instances of a class in the program's own file become instances of the receiver's class of that name.

    `root_rank` is a rank of the job, also with a process set. `obj` is ignored on other ranks. Blocks until the root's
    object has arrived. Raises `InvalidRequest` for an invalid root. If the object cannot be pickled, the root raises
    the error of cloudpickle, and the other ranks raise `InvalidRequest` with its text.
    """
    membership, wire = named("broadcast_object", name, process_set)
    place = membership.place_of(root_rank, wire)
    root = place == membership.rank
    data, failed = _pickled(obj) if root else (b"", None)
    payload = bytearray(data)
    # The other ranks need the length first, to allocate a buffer.
    length = bytearray(LENGTH.pack(len(payload)))
    request = Request(kinds.BROADCAST, root=place)
    membership.engine.run(request, f"{wire}.sz", length, length)
    if not root:
        payload = bytearray(LENGTH.unpack(length)[0])
    membership.engine.run(request, f"{wire}.t", payload, payload)
    if failed is not None:
        raise failed
    if root:
        return cast(T, obj)
    received: T = cloudpickle.loads(payload)
    _refuse_unpicklable(wire, [received], [root_rank])
    return received


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """Return copies of the objects of all ranks, in rank order; they are pickled by cloudpickle.

    Instances of a class in the program's own file become instances of the receiver's, as with `broadcast_object`.
    Blocks until every rank has sent its object. If one cannot be pickled, its rank raises the error of cloudpickle, and
    the other ranks raise `InvalidRequest` with its text.
    """
    membership, wire = named("allgather_object", name, process_set)
    payload, failed = _pickled(obj)
    done = membership.engine.run(Request(kinds.ALLGATHER), wire, frame(payload), None)
    assert done is not None
    joined = done.result()
    assert joined is not None
    if failed is not None:
        raise failed
    objects: list[T] = [cloudpickle.loads(part) for part in split_frames(memoryview(joined))]
    _refuse_unpicklable(wire, objects, process_set.ranks or range(len(objects)))
    return objects


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickler that sends classes of the program's own file by name, with a copy for ranks that lack them.

    cloudpickle sends the copy alone: what a rank received would be no instance of the rank's own class."""

    def reducer_override(self, obj: object) -> object:
        """Return how `obj` is sent; called by pickle."""
        if isinstance(obj, type) and obj.__module__ == "__main__" and _class_of_program(obj.__qualname__) is obj:
            return _class_here, (obj.__qualname__, cloudpickle.dumps(obj))
        return super().reducer_override(obj)


def _class_of_program(name: str) -> type | None:
    """Return the class of this qualified name in the file that Python runs; None if it has none."""
    try:
        found = operator.attrgetter(name)(sys.modules["__main__"])
    except AttributeError:
        return None
    return found if isinstance(found, type) else None


def _class_here(name: str, copy: bytes) -> type:
    """Return this rank's class of the program's file, or else `copy`, the pickle of the sender's."""
    found = _class_of_program(name)
    return cast(type, cloudpickle.loads(copy)) if found is None else found


def _pickled(obj: object) -> tuple[bytes, Exception | None]:
    """Return the pickle of `obj`; if it cannot be pickled, that of an `_Unpicklable`, and the error."""
    written = io.BytesIO()
    try:
        _Pickler(written).dump(obj)
        return written.getvalue(), None
    except Exception as error:  # any class: the object's own methods run
        return cloudpickle.dumps(_Unpicklable(f"{type(error).__name__}: {error}")), error


def _refuse_unpicklable(wire: str, objects: Sequence[object], ranks: Sequence[int]) -> None:
    """Raise `InvalidRequest` if one of the ranks could not pickle its object; `objects` are those of `ranks`."""
    whys = {rank: each.why for rank, each in zip(ranks, objects, strict=True) if isinstance(each, _Unpicklable)}
    if whys:
        raise InvalidRequest(
            wire,
            f"{spell_ranks(whys)} cannot pickle the object to send ({next(iter(whys.values()))}); send one without "
            "locks, files, sockets and generators",
        )
