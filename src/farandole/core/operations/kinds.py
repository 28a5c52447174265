"""Kinds of operations, as the engine's integers, and their names."""

from typing import Final

ALLREDUCE: Final = 0
ALLGATHER: Final = 1
BROADCAST: Final = 2
ALLTOALL: Final = 3
REDUCESCATTER: Final = 4
BARRIER: Final = 5
JOIN: Final = 6

NAMES: Final = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join")
