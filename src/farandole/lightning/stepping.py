"""The step of an optimizer with larger learning rates than the ones that the program sees."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["stepping"]


@contextmanager
def stepping(
    optimizer: torch.optim.Optimizer, factor: float, reduce: Callable[[Any], Any] | None = None
) -> Iterator[None]:
    """Let `optimizer.step` multiply the learning rates by `factor` within the block.

    Closures, schedulers and what follows see the rates without the factor. With `reduce`, an LBFGS searches by the loss
    that `reduce` returns: all ranks go the same way if they see one loss."""
    searches = reduce is not None and isinstance(optimizer, torch.optim.LBFGS)
    if factor == 1.0 and not searches:
        yield
        return
    rates, original, own = _Rates(optimizer, factor), optimizer.step, vars(optimizer).get("step")

    def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        def run() -> Any:
            rates.show()
            assert closure is not None
            loss = closure()
            rates.multiply()
            return reduce(loss) if reduce is not None and searches else loss

        rates.multiply()
        try:
            return original(**kwargs) if closure is None else original(run, **kwargs)
        finally:
            rates.show()

    optimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own  # type: ignore[method-assign]


class _Rates:
    """The learning rates of an optimizer: shown as the program set them, or multiplied."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        self._optimizer, self._factor = optimizer, factor
        self._shown: list[Any] | None = None  # while they are multiplied

    def multiply(self) -> None:
        groups = self._optimizer.param_groups
        self._shown = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * self._factor

    def show(self) -> None:
        if self._shown is not None:
            for group, rate in zip(self._optimizer.param_groups, self._shown, strict=True):
                group["lr"] = rate
            self._shown = None
