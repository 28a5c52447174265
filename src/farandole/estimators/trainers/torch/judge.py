"""Settings of a PyTorch fit, and the judge of its model's outputs: inputs, losses and scores of a batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from farandole.data import ShardBatch
from farandole.estimators.trainers.run import RunPlan
from farandole.estimators.trainers.torch.devices import CPU
from farandole.estimators.trainers.torch.losses import Losses, score_names
from farandole.estimators.trainers.torch.tensors import Inputs, Output, as_output, fit_label, label_tensor, outputs_of

# (model, optimizer, transform_outputs, loss_fn, inputs, labels, sample_weights) -> (outputs, loss)
TrainMinibatch: TypeAlias = Callable[..., object]


@dataclass(frozen=True, kw_only=True)
class TorchJob:
    """The settings of a fit; pickled as one object, so that the optimizer still updates this model's parameters."""

    plan: RunPlan
    model: torch.nn.Module
    losses: Losses
    inputs: Inputs
    train_minibatch: TrainMinibatch | None = None  # in place of the trainer's own step
    callbacks: tuple[object, ...] = ()


class Judge:
    """Turns a batch's columns into the model's inputs, and its outputs into a loss and scores."""

    def __init__(self, job: TorchJob, device: torch.device = CPU) -> None:
        self.job, self.device, self.label_cols = job, device, job.plan.label_cols
        self.names = ["loss", *score_names(job.losses.metrics, self.label_cols)]
        self.outputs: list[Output] | None = None  # of the last batch
        self._shapes = job.plan.label_shapes or (None,) * len(self.label_cols)

    def __call__(self, batch: ShardBatch) -> tuple[Tensor, list[float]]:
        """Return the batch's mean loss and its scores, in the order of `names`."""
        pairs = self.pairs(batch, self.predict(self.job.model, batch))
        return self.loss(pairs, self.weights(batch)), self.scores(pairs)

    def loss(self, pairs: Sequence[tuple[Tensor, Tensor]], weights: Tensor | None) -> Tensor:
        """Return the mean loss over rows, summed over the labels with their weights."""
        return self.job.losses.mean(pairs, weights)

    def scores(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
        """Return the values of the metrics, in the order of `names`; record the types and shapes of the outputs."""
        self.outputs = [Output.of(output) for output, _ in pairs]
        return [float(score) for score in self.job.losses.scores(pairs)]

    def predict(self, model: torch.nn.Module, batch: ShardBatch) -> list[Tensor]:
        """Return the model's outputs, one per label."""
        return outputs_of(model(*self.inputs(batch)), self.label_cols)

    def inputs(self, batch: ShardBatch) -> list[Tensor]:
        """Return the model's inputs, one per feature column."""
        inputs = self.job.inputs
        tensors = (inputs.tensor(index, batch.columns[name]) for index, name in enumerate(inputs.columns))
        return [each.to(self.device) for each in tensors]

    def labels(self, batch: ShardBatch) -> list[Tensor]:
        """Return the labels, before any output is known."""
        return [
            label_tensor(batch.columns[name], self.job.inputs.dtype, shape).to(self.device)
            for name, shape in zip(self.label_cols, self._shapes, strict=True)
        ]

    def fitted(self, labels: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return labels in the shapes of their outputs, if they have as many numbers and no label shapes are set."""
        if self.job.plan.label_shapes is not None:
            return list(labels)
        return [as_output(label, output) for label, output in zip(labels, outputs, strict=True)]

    def weights(self, batch: ShardBatch) -> Tensor | None:
        """Return the weights of the rows; None if all rows count the same."""
        column = self.job.plan.weight_col
        return None if column is None else torch.from_numpy(batch.columns[column]).to(self.device)

    def pairs(self, batch: ShardBatch, outputs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return each output with its label, as the loss takes them."""
        return [
            (output, fit_label(batch.columns[name], output, self.job.inputs.dtype, shape).to(self.device))
            for name, output, shape in zip(self.label_cols, outputs, self._shapes, strict=True)
        ]
