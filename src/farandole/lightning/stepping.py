"""Optimizer steps with learning rates that are larger than those that the program sees."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def stepping(
    optimizer: torch.optim.Optimizer, factor: float, reduce: Callable[[object], object] | None = None
) -> Iterator[None]:
    """Multiply the learning rates by `factor` during each `optimizer.step` within the block.

    Closures, schedulers and later code see the rates without the factor. With `reduce`, the line search of LBFGS uses
    the loss that `reduce` returns, so that all ranks search in the same way."""
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
    """The learning rates of an optimizer, multiplied by a factor or as the program has set them."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        self._optimizer, self._factor = optimizer, factor
        self._shown: list[float | torch.Tensor] | None = None  # the program's rates, while they are multiplied

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
