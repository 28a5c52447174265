"""Base of classes that are context managers because they have a method `close`."""

from types import TracebackType
from typing import Self

__all__ = ["Closing"]


class Closing:
    """Context manager that closes itself; `close` must be idempotent where users also call it themselves."""

    def close(self) -> None:
        """Release what this object holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
