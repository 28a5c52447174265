"""An all-gather among threads, which stand for ranks."""

import threading
from typing import Any

__all__ = ["Meeting"]


class Meeting:
    """An all-gather among threads, which counts its exchanges."""

    def __init__(self, size: int) -> None:
        self.exchanges = 0
        self._told: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def of(self, rank: int) -> Any:
        def gather(mine: object) -> list[object]:
            self._told[rank] = mine
            self._barrier.wait()
            told = list(self._told)
            self.exchanges += self._barrier.wait() == 0
            return told

        return gather
