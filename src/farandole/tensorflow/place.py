"""Where this rank is, as tensors that are computed when they are needed: what was traced outlives `init()`."""

import tensorflow as tf

from farandole.core.plugins import address_of
from farandole.core.process_sets import global_process_set
from farandole.core.registry import GLOBAL
from farandole.tensorflow import nodes

__all__ = ["local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"]

# The places of the numbers in the plugin's answer.
RANK, SIZE, LOCAL_RANK, LOCAL_SIZE, INCLUDED = range(5)


def size_op(process_set_id: int = GLOBAL, name: str | None = None) -> tf.Tensor:
    """Return how many ranks there are, or how many a process set has; 0 for who is no member of it."""
    return nodes.place(SIZE, _at(process_set_id), name)


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return this rank's number."""
    return nodes.place(RANK, _at(GLOBAL), name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return how many ranks are on this host."""
    return nodes.place(LOCAL_SIZE, _at(GLOBAL), name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return this rank's place among those on its host."""
    return nodes.place(LOCAL_RANK, _at(GLOBAL), name)


def process_set_included_op(process_set_id: int = GLOBAL, name: str | None = None) -> tf.Tensor:
    """Return 1 where this rank is a member of a process set, else 0."""
    return nodes.place(INCLUDED, _at(process_set_id), name)


def _at(process_set: int) -> tuple[int, int]:
    slot, _ = address_of(global_process_set, "place")
    return slot, process_set
