"""Losses and metrics of PyTorch models: their construction on each rank, their names, and means over weighted rows."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeAlias, cast

import torch
from torch import Tensor

import farandole.torch as hvd
from farandole.errors import ConfigError
from farandole.estimators.trainers.run import Run

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Metric: TypeAlias = Callable[[Tensor, Tensor], Tensor | float]

_PER_ROW = "with sample_weight_col a loss has to give the loss of each row for reduction='none'"


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The optimizer of a `torch.nn.Module`, a loss with a weight for each label, and metrics."""

    optimizer: torch.optim.Optimizer
    losses: tuple[Loss, ...]
    constructors: tuple[Callable[..., Loss], ...] = ()  # functions that make `losses` on the ranks
    weights: tuple[float, ...]
    metrics: tuple[Metric, ...]

    def made(self, model: torch.nn.Module, run: Run) -> Self:
        """Return a copy with the losses that the constructors make on this rank, if there are any."""
        if not self.constructors:
            return self
        offered = {
            "model": model,
            "torch": torch,
            "hvd": hvd,
            "train_rows": run.rows.train.plan.total,
            "val_rows": run.rows.held,
        }
        return replace(self, losses=tuple(_made_loss(each, offered) for each in self.constructors))

    def mean(self, pairs: Sequence[tuple[Tensor, Tensor]], weights: Tensor | None) -> Tensor:
        """Return the mean loss over rows of (output, label), summed over the labels with their weights."""
        weighted = zip(self.losses, self.weights, pairs, strict=True)
        return torch.stack([weight * mean_loss(loss, *pair, weights) for loss, weight, pair in weighted]).sum()

    def scores(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor | float]:
        """Return the values of the metrics, in the order of `score_names`."""
        with torch.no_grad():
            return [_one_number(metric(*pair), "metrics") for pair in pairs for metric in self.metrics]


def _made_loss(constructor: Callable[..., Loss], offered: Mapping[str, object]) -> Loss:
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
    """Return the mean loss over rows; with `weights` the mean of each row's loss times its weight.

    Raises `ConfigError` for a loss that gives other than one number or, with `weights`, not the loss of each row."""
    if weights is None:
        return cast(Tensor, _one_number(loss(output, label), "loss"))
    if isinstance(loss, torch.nn.Module) and hasattr(loss, "reduction"):
        before = cast(str, loss.reduction)
        loss.reduction = "none"  # type: ignore[assignment]
        try:
            each: Tensor = loss(output, label)
        finally:
            loss.reduction = before  # type: ignore[assignment]
    else:
        _require_reduction(loss)
        each = loss(output, label, reduction="none")  # type: ignore[call-arg]
    if each.numel() % len(weights):
        raise ConfigError("loss", f"gives the shape {list(each.shape)} for {len(weights)} rows; {_PER_ROW}")
    return (each.reshape(len(weights), -1).mean(1) * weights.to(each.dtype)).mean()


def _one_number(value: Tensor | float, setting: str) -> Tensor | float:
    """Return the value of a loss or metric; raises `ConfigError` for several numbers, whose sum is no mean."""
    if isinstance(value, Tensor) and value.numel() != 1:
        shape = list(value.shape)
        raise ConfigError(
            setting, f"gives the shape {shape}, and has to give one number for all rows, such as a mean()"
        )
    return value


def _require_reduction(loss: Loss) -> None:
    """Raise `ConfigError` for a function that does not take `reduction`."""
    try:
        parameters = inspect.signature(getattr(loss, "forward", loss)).parameters
    except ValueError:  # functions in C may have no signature
        return
    if "reduction" not in parameters and all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
        raise ConfigError("loss", f"does not take reduction='none'; {_PER_ROW}")


def score_names(metrics: Sequence[Metric], label_cols: Sequence[str]) -> list[str]:
    """Return distinct names of scores: the metric's name, after the label's if there are several labels."""
    names = distinct([getattr(metric, "__name__", type(metric).__name__).strip("<>") for metric in metrics])
    if len(label_cols) == 1:
        return names
    return [f"{label}_{name}" for label in label_cols for name in names]


def distinct(names: Sequence[str]) -> list[str]:
    """Return the names; those that occur again, or are "loss", get a number."""
    given: list[str] = []
    for name in names:
        number, free = 1, name
        while free == "loss" or free in given:
            number, free = number + 1, f"{name}_{number + 1}"
        given.append(free)
    return given
