"""Gradients as products of two thin matrices: PowerSGD (Vogels et al., 2019)."""

import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from farandole.core.operations.compression import Compressor
from farandole.errors import UnsupportedReduction

Start = Callable[[list[torch.Tensor]], Callable[[], object]]


@dataclass(frozen=True)
class PowerSGD(Compressor[torch.Tensor]):
    """Compression of `DistributedOptimizer` that sends gradients as products of two matrices with `rank` columns.

    A gradient of shape (n, ...) counts as a matrix of n rows. Those of one dimension, sparse ones, and those of which
    the product has more than half of the elements, are sent whole. Raises `ValueError` for a rank below 1."""

    rank: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank must be an integer >= 1, got {self.rank!r}")

    def compress(self, tensor: torch.Tensor) -> NoReturn:
        """Raise `UnsupportedReduction`: one tensor has neither an error nor a factor of the last step."""
        raise UnsupportedReduction("PowerSGD", "is a compression of DistributedOptimizer by Average or Sum only")

    def decompress(self, tensor: torch.Tensor, ctx: object) -> NoReturn:
        """Raise `UnsupportedReduction`."""
        self.compress(tensor)


class LowRank:
    """The errors of this rank's gradients, and the right factors of the last step, by the names of their parameters.

    `reduce` starts the reduction of tensors under names, in place, and returns a function that waits for it."""

    key = "low_rank"  # in an optimizer's state_dict

    def __init__(
        self, rank: int, reduce: Callable[[Sequence[str], Sequence[torch.Tensor]], Callable[[], object]]
    ) -> None:
        self.rank, self.reduce = rank, reduce
        self.errors: dict[str, torch.Tensor] = {}
        self.factors: dict[str, torch.Tensor] = {}  # equal on all ranks
        self._exchange = _Exchange(self)

    def clear(self) -> None:
        """Forget everything, because the ranks have changed."""
        self.errors, self.factors, self._exchange = {}, {}, _Exchange(self)

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return errors and factors."""
        return {"errors": dict(self.errors), "factors": dict(self.factors)}

    def load(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Take copies of what `state` returned, or of nothing."""
        self.errors, self.factors = (
            {name: tensor.clone() for name, tensor in state.get(part, {}).items()} for part in ("errors", "factors")
        )

    def begin(self, names: Sequence[str], gradients: Sequence[torch.Tensor], start: Start) -> Callable[[], None]:
        """Start the reduction of dense gradients by `start`, and return a function that completes it.

        That blocks until every rank has taken part. It completes all gradients begun before it, so that their second
        factors are reduced together."""
        parts = [
            _Product(self, name, gradient) if self._is_worth(gradient) else _Whole(gradient)
            for name, gradient in zip(names, gradients, strict=True)
        ]
        wait = start([part.sent for part in parts])
        if not self._exchange.add(parts, wait):
            self._exchange = _Exchange(self)
            self._exchange.add(parts, wait)
        return self._exchange.complete

    def _is_worth(self, gradient: torch.Tensor) -> bool:
        if gradient.dim() < 2 or gradient.numel() == 0 or not gradient.is_floating_point():
            return False
        rows, columns = len(gradient), gradient.numel() // len(gradient)
        return 2 * self.rank * (rows + columns) <= rows * columns

    def factor(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Return the right factor of the last step; at first a random one, the same on all ranks."""
        shape = (matrix.shape[1], self.rank)
        last = self.factors.get(name)
        if last is None or last.shape != shape:
            last = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        return last.to(matrix)


class _Whole:
    """A gradient that is sent as it is."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self.gradient, self.sent = gradient, gradient.contiguous()  # a channels-last one is not contiguous

    def finish(self) -> None:
        if self.sent is not self.gradient:
            self.gradient.copy_(self.sent)


class _Product:
    """A gradient that is sent as a product P Q^T, one factor after the other; first `sent` is P."""

    def __init__(self, state: LowRank, name: str, gradient: torch.Tensor) -> None:
        self.state, self.name, self.gradient = state, name, gradient
        matrix = gradient.flatten(1)
        if matrix.dtype in (torch.float16, torch.bfloat16):
            matrix = matrix.float()
        error = state.errors.get(name)
        self.matrix = matrix if error is None or error.shape != matrix.shape else matrix + error.to(matrix)
        self.sent = self.matrix @ state.factor(name, self.matrix)

    def turn(self) -> torch.Tensor:
        """Return this rank's Q, to be reduced, now that P is."""
        self.left: torch.Tensor = torch.linalg.qr(self.sent).Q
        self.right = torch.mm(self.matrix.T, self.left)
        # Of this rank's own product: the reduction is linear, so the errors add up to that of the reduced gradient.
        self.error = torch.addmm(self.matrix, self.left, self.right.T, alpha=-1)
        return self.right

    def finish(self) -> None:
        """Set the gradient to the reduced product."""
        self.gradient.copy_((self.left @ self.right.T).view(self.gradient.shape))
        # A gradient scaler skips a step with infinities. The next one must not see them.
        if self.right.isfinite().all():
            self.state.errors[self.name], self.state.factors[self.name] = self.error, self.right
        else:
            self.state.errors.pop(self.name, None)
            self.state.factors.pop(self.name, None)


class _Exchange:
    """The gradients of one step, or of a part of it, until they are complete."""

    def __init__(self, state: LowRank) -> None:
        self._state = state
        self._parts: list[_Product | _Whole] = []
        self._waits: list[Callable[[], object]] = []
        self._error: Exception | None = None
        self._is_over = False
        # Several threads may read gradients. One must not hold `_adding` while it waits: another one may have to start
        # what other ranks wait for.
        self._adding, self._completing = threading.Lock(), threading.Lock()

    def add(self, parts: Sequence[_Product | _Whole], wait: Callable[[], object]) -> bool:
        """Add gradients whose reduction has started; return False if it is too late."""
        with self._adding:
            if not self._is_over:
                self._parts += parts
                self._waits.append(wait)
            return not self._is_over

    def complete(self) -> None:
        """Reduce the second factors and set the gradients, the first time; raise the error every time."""
        with self._completing:
            with self._adding:
                first, self._is_over = not self._is_over, True
            if first:
                try:
                    self._complete()
                except Exception as error:
                    self._error = error
            if self._error is not None:
                raise self._error

    def _complete(self) -> None:
        for wait in self._waits:
            wait()
        products = [part for part in self._parts if isinstance(part, _Product)]
        if products:
            names = [f"{product.name}.right" for product in products]
            self._state.reduce(names, [product.turn() for product in products])()
        for part in self._parts:
            part.finish()
