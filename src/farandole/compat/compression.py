"""The base class of `horovod.<framework>.compression`, for programs that write a compressor of their own."""

from typing import Any

__all__ = ["Compressor"]


class Compressor:
    """The base of a user's compressor, which defines both as static methods."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, object]:
        """Return what is reduced, and what `decompress` needs to undo it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: object) -> Any:
        """Return the reduced tensor in its original form."""
        raise NotImplementedError
