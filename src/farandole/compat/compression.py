"""The base class of `horovod.<framework>.compression`, for programs with their own compressor."""

from typing import Generic, TypeVar

T = TypeVar("T")  # a framework's tensors


class Compressor(Generic[T]):
    """Base of a user's compressor, which defines both methods as static ones."""

    @staticmethod
    def compress(tensor: T) -> tuple[T, object]:
        """Return the tensor to reduce, and the context that `decompress` takes."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: T, ctx: object) -> T:
        """Return the reduced tensor in its original form."""
        raise NotImplementedError
