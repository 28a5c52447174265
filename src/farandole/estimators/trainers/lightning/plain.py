"""A `LightningModule` around a `torch.nn.Module`, an optimizer and losses, as `TorchEstimator` takes them."""

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farandole.estimators.trainers.lightning.data import Tensors
from farandole.estimators.trainers.run import Run
from farandole.estimators.trainers.torch.losses import Losses, score_names
from farandole.estimators.trainers.torch.tensors import as_output, outputs_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule as _Base
else:
    _Base = object


def wrapped(package: ModuleType, model: torch.nn.Module, losses: Losses, tensors: Tensors, run: Run) -> "_Base":
    """Return the `LightningModule` that trains `model`."""
    kind: Callable[..., _Base] = type("PlainModule", (_PlainModule, package.LightningModule), {})
    return kind(model, losses.made(model, run), tensors)


class _PlainModule(_Base):  # its other base is the package's
    def __init__(self, model: torch.nn.Module, losses: Losses, tensors: Tensors) -> None:
        super().__init__()
        self.model, self._losses = model, losses
        self._features, self._labels, self._weight_col = tensors.inputs.columns, tensors.label_cols, tensors.weight_col
        self._shaped = tensors.label_shapes is not None  # by the user

    def forward(self, *inputs: Tensor) -> object:
        """Call the model."""
        return self.model(*inputs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the user's optimizer, which updates the model's parameters."""
        return self._losses.optimizer

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        return self._step(batch, "")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log loss and metrics of a batch."""
        self.log("val_loss", self._step(batch, "val_"), sync_dist=True)

    def _step(self, batch: dict[str, Tensor], prefix: str) -> Tensor:
        outputs = outputs_of(self.model(*[batch[name] for name in self._features]), self._labels)
        pairs = [(output, self._fit(batch[name], output)) for name, output in zip(self._labels, outputs, strict=True)]
        weights = None if self._weight_col is None else batch[self._weight_col]
        loss, names = self._losses.mean(pairs, weights), score_names(self._losses.metrics, self._labels)
        for name, score in zip(names, self._losses.scores(pairs), strict=True):
            self.log(prefix + name, score, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def _fit(self, label: Tensor, output: Tensor) -> Tensor:
        """Return the label as `as_output` does, in the shape that the user has given."""
        fitted = as_output(label, output)
        return fitted.reshape(label.shape) if self._shaped else fitted
