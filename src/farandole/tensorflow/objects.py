"""Collectives over Python objects. They do not use TensorFlow, so they are the same in every mode."""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import tensorflow as tf

from farandole.core.operations import objects
from farandole.core.process_sets.process_set import ProcessSet, global_process_set

T = TypeVar("T")
Session: TypeAlias = tf.compat.v1.Session


def broadcast_object(
    obj: T | None,
    root_rank: int = 0,
    session: Session | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T:
    """Return the object of rank `root_rank`, which cloudpickle must be able to pickle; the root gets its own back.

    The other ranks' `obj` and `session` are ignored. Blocks until the root's object has arrived.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Session | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[T | None], T]:
    """Return a function that calls `broadcast_object` with these settings."""

    def broadcast(obj: T | None) -> T:
        return objects.broadcast_object(obj, root_rank, name, process_set)

    return broadcast


def allgather_object(
    obj: T,
    session: Session | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[T]:
    """Return the objects of all ranks in rank order, pickled by cloudpickle; `session` is ignored.

    Blocks until every rank has sent its object.
    """
    return objects.allgather_object(obj, name, process_set)
