"""The base class of `horovod.<framework>.compression`, for programs with their own compressor."""

from typing import Any

__all__ = ["Compressor"]


class Compressor:
    """Base of a user's compressor, which defines both methods as static ones."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, object]:
        """Return the tensor to reduce, and the context that `decompress` takes."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: object) -> Any:
        """Return the reduced tensor in its original form."""
        raise NotImplementedError
