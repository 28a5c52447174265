"""Requests in the form in which JAX stores them with a traced program and compares them."""

from dataclasses import dataclass, replace
from typing import Unpack

from farandole.core.operations.request import Changes, Request
from farandole.core.plugins import Address


@dataclass(frozen=True)
class TracedRequest:
    """A request for one array or a group of arrays.

    `at` identifies the rank, so that ranks that are threads of one process do not share traced programs."""

    request: Request
    at: Address
    shapes: tuple[tuple[int, ...], ...]  # of the arrays
    rows: tuple[int, ...] | None = None  # of an allgather's results; None: all ranks have equally many

    def backward(
        self,
        part: str = "",
        shapes: tuple[tuple[int, ...], ...] | None = None,
        rows: tuple[int, ...] | None = None,
        **changes: Unpack[Changes],
    ) -> "TracedRequest":
        """Return the request for a part of the gradient, with a name of its own."""
        return replace(
            self, request=self.request.backward(part, **changes), shapes=shapes or self.shapes, rows=rows or self.rows
        )
