"""The operations the engine knows, as the integers it knows them by."""

from typing import Final

__all__ = ["ALLGATHER", "ALLREDUCE", "ALLTOALL", "BARRIER", "BROADCAST", "JOIN", "REDUCESCATTER"]

ALLREDUCE: Final = 0
ALLGATHER: Final = 1
BROADCAST: Final = 2
ALLTOALL: Final = 3
REDUCESCATTER: Final = 4
BARRIER: Final = 5
JOIN: Final = 6
