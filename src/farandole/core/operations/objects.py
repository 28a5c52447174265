"""Collectives over Python objects, as pickles of any size.

Unpickling runs code that the sender chose. It is safe here because bytes only come from ranks of this job: the
transport connects no peer that has not proved the job's secret (`farandole.handshake`).
"""

from typing import TypeVar, cast

import cloudpickle

from farandole.core.operations import kinds
from farandole.core.operations.frames import LENGTH, split_frames, write_frame
from farandole.core.operations.request import Request
from farandole.core.operations.requests import named
from farandole.core.process_sets.process_set import ProcessSet, global_process_set

__all__ = ["allgather_object", "broadcast_object"]

T = TypeVar("T")


def broadcast_object(
    obj: T | None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """Return the object of rank `root_rank`, which must be picklable by cloudpickle; the root gets its own back.

    `root_rank` is a rank of the job, in a process set too. The others' `obj` is ignored. Blocks until the root's
    object is here; raises `InvalidRequest` for a wrong root.
    """
    membership, wire = named("broadcast_object", name, process_set)
    place = membership.place_of(root_rank, wire)
    root = place == membership.rank
    payload = bytearray(cloudpickle.dumps(obj)) if root else bytearray()
    # The length goes first, in 64 bits: the others need it to make room.
    length = bytearray(LENGTH.pack(len(payload)))
    request = Request(kinds.BROADCAST, root=place)
    membership.engine.run(request, f"{wire}.sz", length, length)
    if not root:
        payload = bytearray(LENGTH.unpack(length)[0])
    membership.engine.run(request, f"{wire}.t", payload, payload)
    if root:
        return cast(T, obj)
    received: T = cloudpickle.loads(payload)
    return received


def allgather_object(obj: T, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[T]:
    """Return the objects of all ranks in rank order, pickled by cloudpickle; each list holds copies.

    Blocks until every rank has given its object.
    """
    membership, wire = named("allgather_object", name, process_set)
    payload = cloudpickle.dumps(obj)
    done = membership.engine.run(Request(kinds.ALLGATHER), wire, write_frame(payload), None)
    assert done is not None
    joined = done.result()
    assert joined is not None
    return [cloudpickle.loads(part) for part in split_frames(memoryview(joined))]
