"""Base of classes that are context managers because they have a method `close`."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Context manager that closes itself; `close` must be idempotent where users also call it themselves."""

    @abstractmethod
    def close(self) -> None:
        """Release what this object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
