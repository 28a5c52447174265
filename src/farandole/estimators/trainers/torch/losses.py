"""Losses of PyTorch models: their construction on each rank, and means over weighted rows."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from farandole.errors import ConfigError

__all__ = ["Loss", "made_loss", "mean_loss"]

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def made_loss(constructor: Callable[..., Loss], offered: Mapping[str, object]) -> Loss:
    """Call a loss's constructor with those of the `offered` arguments that it names, all of them if it takes `**any`.

    Raises `ConfigError` if it returns no function."""
    try:
        parameters = inspect.signature(constructor).parameters
    except ValueError:  # functions in C may have no signature
        parameters = inspect.Signature().parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    loss = constructor(**{name: value for name, value in offered.items() if takes_all or name in parameters})
    if not callable(loss):
        raise ConfigError("loss_constructors", f"return a function of (output, label), got {type(loss).__name__}")
    return loss


def mean_loss(loss: Loss, output: Tensor, label: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean loss over rows; with `weights` the mean of each row's loss times its weight."""
    if weights is None:
        return loss(output, label)
    if isinstance(loss, torch.nn.Module) and hasattr(loss, "reduction"):
        before: Any = loss.reduction
        loss.reduction = "none"  # type: ignore[assignment]
        try:
            each: Tensor = loss(output, label)
        finally:
            loss.reduction = before
    else:
        each = loss(output, label, reduction="none")  # type: ignore[call-arg]
    return (each.reshape(len(weights), -1).mean(1) * weights.to(each.dtype)).mean()
