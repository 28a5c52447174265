"""What an operation is asked for: all that JAX may keep with a traced program, and compare."""

from dataclasses import dataclass, replace

from farandole.core.plugins import Address
from farandole.core.process_sets import ProcessSet
from farandole.core.reduction import Sum

__all__ = ["Call"]


@dataclass(frozen=True)
class Call:
    """One operation over one array or a group of them.

    `at` tells whose it is: what one rank has traced is not another's, though they are threads of one process."""

    kind: int  # of farandole.core.kinds
    word: str  # for it, with which names on the wire begin
    name: str | None
    members: ProcessSet
    at: Address
    shapes: tuple[tuple[int, ...], ...]  # of the arrays
    grouped: bool = False
    op: int = Sum
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0  # of a broadcast, a rank of the job
    splits: tuple[int, ...] | None = None  # of an alltoall
    rows: tuple[int, ...] | None = None  # of an allgather's results; None: all ranks have as many

    def scaled(self, op: int, prescale: float, postscale: float) -> "Call":
        """Return the same as a reduction."""
        return replace(self, op=op, prescale=prescale, postscale=postscale)

    def backward(self, part: str = "", **changes: object) -> "Call":
        """Return what asks for a part of the gradient, under a name of its own."""
        name = None if self.name is None else f"{self.name}.backward{part}"
        return replace(self, name=name, **changes)  # type: ignore[arg-type]
