"""Kinds of operations, as the engine's integers, their names and traits."""

from typing import Final

ALLREDUCE: Final = 0
ALLGATHER: Final = 1
BROADCAST: Final = 2
ALLTOALL: Final = 3
REDUCESCATTER: Final = 4
BARRIER: Final = 5
JOIN: Final = 6

NAMES: Final = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join")

ROOTED: Final = frozenset({BROADCAST})  # with a root rank
KEEPING_SHAPE: Final = frozenset({ALLREDUCE, BROADCAST})  # results have the inputs' shapes, and may overwrite them
