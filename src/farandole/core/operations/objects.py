"""Collectives over Python objects, as pickles of any size.

Unpickling can run code of the sender. It is safe here because all bytes come from ranks of this job: the transport
accepts no peer that has not proved the job's secret (`farandole.meeting.handshake`).
"""

from typing import TypeVar, cast

import cloudpickle

from farandole.core.operations import kinds
from farandole.core.operations.request import Request
from farandole.core.operations.requests import named
from farandole.core.process_sets.process_set import ProcessSet, global_process_set
from farandole.meeting.frames import LENGTH, frame, split_frames

T = TypeVar("T")


def broadcast_object(
    obj: T | None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> T:
    """Return the object of rank `root_rank`, which cloudpickle must be able to pickle; the root gets its own back.

    `root_rank` is a rank of the job, also with a process set. `obj` is ignored on other ranks. Blocks until the root's
    object has arrived; raises `InvalidRequest` for an invalid root.
    """
    membership, wire = named("broadcast_object", name, process_set)
    place = membership.place_of(root_rank, wire)
    root = place == membership.rank
    payload = bytearray(cloudpickle.dumps(obj)) if root else bytearray()
    # The other ranks need the length first, to allocate a buffer.
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
    """Return copies of the objects of all ranks, in rank order; they are pickled by cloudpickle.

    Blocks until every rank has sent its object.
    """
    membership, wire = named("allgather_object", name, process_set)
    payload = cloudpickle.dumps(obj)
    done = membership.engine.run(Request(kinds.ALLGATHER), wire, frame(payload), None)
    assert done is not None
    joined = done.result()
    assert joined is not None
    return [cloudpickle.loads(part) for part in split_frames(memoryview(joined))]
