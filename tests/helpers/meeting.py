"""All-gather among threads that stand for ranks."""

import threading
from typing import Any


class Meeting:
    """All-gather among threads, with a count of its exchanges."""

    def __init__(self, size: int) -> None:
        self.exchanges = 0
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def of(self, rank: int) -> Any:
        def gather(mine: object) -> list[object]:
            self._values[rank] = mine
            self._barrier.wait()
            values = list(self._values)
            self.exchanges += self._barrier.wait() == 0
            return values

        return gather
