"""Rank and size as tensors that are computed at run time, because traced functions outlive `init()`."""

import tensorflow as tf

from farandole.core import default
from farandole.core.plugins import Address, address_of
from farandole.core.process_sets.process_set import global_process_set
from farandole.core.process_sets.registry import GLOBAL
from farandole.errors import InvalidRequest
from farandole.tensorflow import nodes

# Indexes into the plugin's `Place`.
RANK, SIZE, LOCAL_RANK, LOCAL_SIZE, INCLUDED = range(5)


def size_op(process_set_id: int = GLOBAL, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks in the job or a process set, also on ranks outside of the set.

    On those, a traced function keeps the number that it was traced with."""
    ranks = default.context().sets.ranks_by_number.get(process_set_id) if default.is_initialized() else None
    if ranks is not None and default.rank() not in ranks:
        return tf.constant(len(ranks), tf.int32, name=name)  # there is no engine to ask
    return nodes.place(SIZE, _at(process_set_id), name)


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return this rank's number."""
    return nodes.place(RANK, _at(GLOBAL), name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks on this host."""
    return nodes.place(LOCAL_SIZE, _at(GLOBAL), name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return this rank's index among the ranks on its host."""
    return nodes.place(LOCAL_RANK, _at(GLOBAL), name)


def process_set_included_op(process_set_id: int = GLOBAL, name: str | None = None) -> tf.Tensor:
    """Return 1 if this rank is a member of the process set, else 0."""
    return nodes.place(INCLUDED, _at(process_set_id), name)


def _at(process_set_id: int) -> Address:
    rank_id, address = address_of(global_process_set, "place")
    if process_set_id == GLOBAL:
        return rank_id, address
    # A function traced before `init()` finds the set with this number among those that the process makes first.
    found = default.context().sets.address_of_number(process_set_id) if default.is_initialized() else process_set_id
    if found is None:
        raise InvalidRequest("place", f"process set {process_set_id} is not there (any more)")
    return rank_id, found
