"""Requests: all that the engine needs to know about an operation, as one value."""

from typing import Any, NamedTuple, TypedDict, Unpack

from farandole.core.operations import kinds
from farandole.core.operations.reduction import Reduction, Sum


class Changes(TypedDict, total=False):
    """Fields in which a request differs from the one of which it is made."""

    kind: int
    reduction: Reduction
    splits: object
    grouped: bool


# A NamedTuple, because the engine reads the fields by place (native/bind/request.cc).
class Request(NamedTuple):
    """One operation over one tensor or a group of them; equal requests may share a traced program."""

    kind: int  # of farandole.core.operations.kinds
    name: str | None = None  # None: the response cache does not keep it, because its name does not recur
    reduction: Reduction = Reduction(Sum)
    root: int = 0  # of a broadcast: a rank of the job; in the engine's request a rank of the engine
    splits: object = None  # of an alltoall
    grouped: bool = False
    process_set: Any = None  # the ProcessSet of the operation; the engine ignores it
    wire: str | None = None  # the name on the wire, "<stem>.<name>"; None: not made yet

    @property
    def stem(self) -> str:
        """The first part of the name on the wire."""
        return f"grouped_{kinds.NAMES[self.kind]}" if self.grouped else kinds.NAMES[self.kind]

    def backward(self, part: str = "", **changes: Unpack[Changes]) -> "Request":
        """Return the request for a part of the gradient, with a name of its own."""
        return self.renamed(None if self.name is None else f"{self.name}.backward{part}", **changes)

    def renamed(self, name: str | None, **changes: Unpack[Changes]) -> "Request":
        """Return the request under another name."""
        return self._replace(name=name, wire=None, **changes)
