"""Trainer of PyTorch models: what each rank of a `TorchEstimator` runs."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

import farandole.torch as hvd
from farandole.data import ShardBatch
from farandole.spark.trainers.report import Meter, Record
from farandole.spark.trainers.run import Run, RunPlan, sum_over_ranks
from farandole.spark.trainers.run import train as train_with
from farandole.spark.trainers.torch_probe import probe
from farandole.spark.trainers.torch_tensors import Inputs, Output, fit_label, outputs_of

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Metric: TypeAlias = Callable[[Tensor, Tensor], Tensor | float]


@dataclass(frozen=True, kw_only=True)
class TorchJob:
    """All that the ranks need; pickled as one object, so that the optimizer still updates this model's parameters."""

    plan: RunPlan
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    losses: tuple[Loss, ...]
    loss_weights: tuple[float, ...]
    metrics: tuple[Metric, ...]
    inputs: Inputs
    weight_col: str | None
    label_shapes: tuple[tuple[int, ...], ...] | None
    compression: Any | None
    passes: int  # batches whose gradients are averaged before a step

    @property
    def label_cols(self) -> tuple[str, ...]:
        """The columns that the outputs are compared with."""
        return self.plan.label_cols


def train(job: TorchJob) -> bytes | None:
    """Train a `TorchJob` on this rank; see `trainers.run.train`."""
    return train_with(job.plan, lambda run: TorchTrainer(job, run))


class TorchTrainer:
    """A rank's model, optimizer and loss; a `Trainer`."""

    def __init__(self, job: TorchJob, run: Run) -> None:
        self.job, self.model, self.judge = job, job.model, Judge(job)
        probe(self.judge, run)
        # Ranks need no broadcast of the initial state: all of them unpickled the same model, or the same checkpoint.
        self.optimizer = hvd.DistributedOptimizer(
            job.optimizer,
            named_parameters=self.model.named_parameters(),
            compression=job.compression or hvd.Compression.none,
            backward_passes_per_step=job.passes,
        )
        self._take_rates(job.optimizer.state_dict())
        self.optimizer.zero_grad()
        self._pending = 0  # batches since the last step of the optimizer

    def restore(self, state: bytes) -> None:
        """Load tensors and plain values only: a foreign file runs no code."""
        saved = _read(state)
        self.model.load_state_dict(saved["model"])
        self._take_rates(saved["optimizer"])

    def state(self, *, whole: bool) -> bytes:
        """Return the weights, and the optimizer's state if `whole`."""
        saved = {"model": self.model.state_dict()}
        if whole:
            optimizer = self.optimizer.state_dict()
            groups = zip(optimizer["param_groups"], self._base_rates, strict=True)
            saved["optimizer"] = optimizer | {"param_groups": [group | {"lr": rate} for group, rate in groups]}
        file = io.BytesIO()
        torch.save(saved, file)
        return file.getvalue()

    def train(self, run: Run) -> None:
        """Train and validate epoch by epoch."""
        run.describe(self.job.inputs.describe(run.rows.kinds))
        for epoch in run.epochs:
            record = self._train(run, epoch)
            # Running statistics (BatchNorm) are each rank's own until here; validation and checkpoint need one.
            hvd.broadcast_parameters(dict(self.model.named_buffers()), root_rank=0)
            if run.validation_steps:
                record |= self._validate(run)
            outputs = self.judge.outputs
            shapes = None if outputs is None else [(each.dtype, each.shape) for each in outputs]
            run.finish(epoch, record, shapes)

    def _train(self, run: Run, epoch: int) -> Record:
        torch.manual_seed(run.seed(epoch))
        self.model.train()
        run.begin(epoch)
        meter, batches = Meter(self.judge.names), run.batches(epoch)
        for step in range(run.steps):
            with meter.waiting():
                batch = next(batches)
            left = run.steps - step + self._pending
            loss = self._backward(batch, meter, min(self.job.passes, left))
            self._pending += 1
            if self._pending == self.job.passes or step + 1 == run.steps:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self._pending = 0
            run.done(batch.rows, loss, meter.wait)
        means, speed = meter.over_ranks(sum_over_ranks, run.size)
        return means | speed

    def _backward(self, batch: ShardBatch, meter: Meter, passes: int) -> float | None:
        # Without rows there is no gradient here, which counts as zeros.
        if not batch.rows:
            return None
        loss, scores = self.judge(batch)
        # The optimizer averages over ranks; the weight makes that the mean over all rows of the step.
        (loss * (batch.weight / passes)).backward()
        meter.add(batch.rows, [loss.item(), *scores])
        return loss.item()

    def _validate(self, run: Run) -> Record:
        self.model.eval()
        meter = Meter(self.judge.names)
        with torch.no_grad():
            for batch in run.validation_batches():
                if batch.rows:
                    loss, scores = self.judge(batch)
                    meter.add(batch.rows, [loss.item(), *scores])
        means, _ = meter.over_ranks(sum_over_ranks, run.size)
        return {f"val_{name}": mean for name, mean in means.items()}

    def _take_rates(self, state: dict[str, Any]) -> None:
        """Load the optimizer's state, and multiply the learning rates in it by the number of ranks."""
        self.optimizer.load_state_dict(state)
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * hvd.size()


class Judge:
    """Turns a batch's columns into the model's inputs, and its outputs into a loss and scores."""

    def __init__(self, job: TorchJob) -> None:
        self.job = job
        self.names = ["loss", *score_names(job.metrics, job.label_cols)]
        self.outputs: list[Output] | None = None  # of the last batch

    def __call__(self, batch: ShardBatch) -> tuple[Tensor, list[float]]:
        """Return the batch's mean loss and its scores, in the order of `names`."""
        job = self.job
        pairs = self.pairs(batch, self.predict(job.model, batch))
        weights = None if job.weight_col is None else torch.from_numpy(batch.columns[job.weight_col])
        weighted = zip(job.losses, job.loss_weights, pairs, strict=True)
        loss = torch.stack([weight * _mean_loss(loss, *pair, weights) for loss, weight, pair in weighted]).sum()
        with torch.no_grad():
            scores = [float(metric(*pair)) for pair in pairs for metric in job.metrics]
        return loss, scores

    def predict(self, model: torch.nn.Module, batch: ShardBatch) -> list[Tensor]:
        """Return the model's outputs, one per label."""
        columns, inputs = self.job.inputs.columns, self.job.inputs
        outputs = outputs_of(
            model(*[inputs.tensor(index, batch.columns[name]) for index, name in enumerate(columns)]),
            self.job.label_cols,
        )
        self.outputs = [Output.of(output) for output in outputs]
        return outputs

    def pairs(self, batch: ShardBatch, outputs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return each output with its label, as the loss takes them."""
        shapes = self.job.label_shapes or (None,) * len(outputs)
        return [
            (output, fit_label(batch.columns[name], output, self.job.inputs.dtype, shape))
            for name, output, shape in zip(self.job.label_cols, outputs, shapes, strict=True)
        ]


def weights_of(state: bytes) -> dict[str, Any]:
    """Return the model's weights in a checkpoint's state."""
    weights: dict[str, Any] = _read(state)["model"]
    return weights


def _read(state: bytes) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    return saved


def score_names(metrics: Sequence[Metric], label_cols: Sequence[str]) -> list[str]:
    """Name each score: the metric's own name, with the label's when there are several labels; no name comes twice."""
    names = distinct([getattr(metric, "__name__", type(metric).__name__).strip("<>") for metric in metrics])
    if len(label_cols) == 1:
        return names
    return [f"{label}_{name}" for label in label_cols for name in names]


def distinct(names: Sequence[str]) -> list[str]:
    """Number the names that occur again, or that are the loss's."""
    given: list[str] = []
    for name in names:
        number, free = 1, name
        while free == "loss" or free in given:
            number, free = number + 1, f"{name}_{number + 1}"
        given.append(free)
    return given


def _mean_loss(loss: Loss, output: Tensor, label: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean over rows; with weights that of each row's loss times its weight."""
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
