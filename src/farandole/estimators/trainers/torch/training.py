"""Trainer of PyTorch models: what each rank of a `TorchEstimator` runs."""

import io
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

import farandole.torch as hvd
from farandole.data import ShardBatch
from farandole.estimators.trainers.report import Meter, Record
from farandole.estimators.trainers.run import Run, RunPlan, sum_over_ranks
from farandole.estimators.trainers.run import train as train_with
from farandole.estimators.trainers.torch.callbacks import Callbacks
from farandole.estimators.trainers.torch.devices import CPU, device_of, on_cpu, to_device, visible_gpus
from farandole.estimators.trainers.torch.losses import Loss, made_loss, mean_loss
from farandole.estimators.trainers.torch.minibatch import MinibatchStep, TrainMinibatch
from farandole.estimators.trainers.torch.module import TorchModule
from farandole.estimators.trainers.torch.probe import probe
from farandole.estimators.trainers.torch.seed import seed_everything
from farandole.estimators.trainers.torch.tensors import Inputs, Output, as_output, fit_label, label_tensor, outputs_of

Metric: TypeAlias = Callable[[Tensor, Tensor], Tensor | float]


@dataclass(frozen=True, kw_only=True)
class TorchJob:
    """The settings of a fit; pickled as one object, so that the optimizer still updates this model's parameters."""

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
    loss_constructors: tuple[Callable[..., Loss], ...] = ()  # functions that make `losses` on the ranks
    train_minibatch: TrainMinibatch | None = None  # in place of the trainer's own step
    callbacks: tuple[Any, ...] = ()
    data_module: Callable[..., Any] | None = None  # makes the batches

    @property
    def label_cols(self) -> tuple[str, ...]:
        """The columns that the outputs are compared with."""
        return self.plan.label_cols


def train(job: TorchJob) -> bytes | None:
    """Train a `TorchJob` on this rank; see `trainers.run.train`."""
    return train_with(job.plan, lambda run: TorchTrainer(job, run), gpus=visible_gpus)


class TorchTrainer:
    """A rank's model, optimizer and loss; a `Trainer`."""

    def __init__(self, job: TorchJob, run: Run) -> None:
        if job.loss_constructors:
            job = replace(job, losses=made_losses(job.loss_constructors, job.model, run))
        device = device_of(run.gpu)
        to_device((job.model, *job.losses, *job.metrics), device)
        self.job, self.model, self.judge = job, job.model, Judge(job, device)
        self._module = None if job.data_module is None else TorchModule(job.data_module, run)
        self._probe_first = self._module is not None  # probe the model with the module's first batch
        if self._module is None:
            probe(self.judge, run, run.sample())
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
        self._callbacks = Callbacks(job.callbacks)
        self._minibatch_step = None
        if job.train_minibatch is not None:
            self._minibatch_step = MinibatchStep(job.train_minibatch, self.judge, job.label_cols, run)

    def restore(self, state: bytes) -> None:
        """Load weights and optimizer. It loads only tensors and plain values, so a foreign file runs no code."""
        saved = _read(state)
        self.model.load_state_dict(saved["model"])
        self._take_rates(saved["optimizer"])

    def state(self, *, whole: bool) -> bytes:
        """Return the weights, and the optimizer's state if `whole`; any machine can load them, with GPUs or without."""
        saved = {"model": self.model.state_dict()}
        if whole:
            optimizer = self.optimizer.state_dict()
            groups = zip(optimizer["param_groups"], self._base_rates, strict=True)
            saved["optimizer"] = optimizer | {"param_groups": [group | {"lr": rate} for group, rate in groups]}
        file = io.BytesIO()
        torch.save(on_cpu(saved), file)
        return file.getvalue()

    def train(self, run: Run) -> None:
        """Train and validate epoch by epoch, until a callback stops all ranks."""
        with nullcontext() if self._module is None else self._module.opened():
            self._train_epochs(run)

    def _train_epochs(self, run: Run) -> None:
        run.describe(self.job.inputs.describe(run.rows.kinds))
        self._callbacks.call("set_model", self.model)
        self._callbacks.call("on_train_begin", {})
        for epoch in run.epochs:
            self._callbacks.call("on_epoch_begin", epoch, {})
            record = self._train(run, epoch)
            # Running statistics (BatchNorm) differ between ranks; validation and checkpoint use rank 0's.
            hvd.broadcast_parameters(dict(self.model.named_buffers()), root_rank=0)
            if run.validation_steps:
                record |= self._validate(run)
            outputs = self.judge.outputs
            shapes = None if outputs is None else [(each.dtype, each.shape) for each in outputs]
            stops = self._callbacks.end_epoch(epoch, record)
            run.finish(epoch, record, shapes, stopped=stops)
            if stops:
                break
        self._callbacks.call("on_train_end", {})

    def _train(self, run: Run, epoch: int) -> Record:
        seed_everything(run.seed(epoch))
        self.model.train()
        run.begin(epoch)
        meter = Meter(self.judge.names)
        batches = run.batches(epoch) if self._module is None else self._module.epoch(epoch)
        for step in range(run.steps):
            with meter.waiting():
                batch = next(batches)
            if self._probe_first:
                probe(self.judge, run, batch)
                self._probe_first = False
            loss = self._step(batch, meter, run.steps - step)
            run.done(batch.rows, loss, meter.wait)
            self._callbacks.call("on_train_batch_end", step, {} if loss is None else {"loss": loss})
        means, speed = meter.over_ranks(sum_over_ranks, run.size)
        return means | speed

    def _step(self, batch: ShardBatch, meter: Meter, left: int) -> float | None:
        """Train on a batch, `left` batches before the end of the epoch; return its loss, None without rows."""
        if self._minibatch_step is not None:
            made = self._minibatch_step(self.model, self.optimizer, batch)
            if made is None:
                return None
            meter.add(batch.rows, [made[0], *made[1]])
            return made[0]
        loss = self._backward(batch, meter, min(self.job.passes, left + self._pending))
        self._pending += 1
        if self._pending == self.job.passes or left == 1:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._pending = 0
        return loss

    def _backward(self, batch: ShardBatch, meter: Meter, passes: int) -> float | None:
        # A rank without rows has no gradient, which counts as zeros.
        if not batch.rows:
            return None
        loss, scores = self.judge(batch)
        # The optimizer averages over ranks; with the weight the average is the mean over all rows of the step.
        (loss * (batch.weight / passes)).backward()
        meter.add(batch.rows, [loss.item(), *scores])
        return loss.item()

    def _validate(self, run: Run) -> Record:
        self.model.eval()
        meter = Meter(self.judge.names)
        with torch.no_grad():
            for batch in run.validation_batches() if self._module is None else self._module.validation():
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

    def __init__(self, job: TorchJob, device: torch.device = CPU) -> None:
        self.job, self.device = job, device
        self.names = ["loss", *score_names(job.metrics, job.label_cols)]
        self.outputs: list[Output] | None = None  # of the last batch

    def __call__(self, batch: ShardBatch) -> tuple[Tensor, list[float]]:
        """Return the batch's mean loss and its scores, in the order of `names`."""
        pairs = self.pairs(batch, self.predict(self.job.model, batch))
        return self.loss(pairs, self.weights(batch)), self.scores(pairs)

    def loss(self, pairs: Sequence[tuple[Tensor, Tensor]], weights: Tensor | None) -> Tensor:
        """Return the mean loss over rows, summed over the labels with their weights."""
        weighted = zip(self.job.losses, self.job.loss_weights, pairs, strict=True)
        return torch.stack([weight * mean_loss(loss, *pair, weights) for loss, weight, pair in weighted]).sum()

    def scores(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
        """Return the values of the metrics, in the order of `names`; record the types and shapes of the outputs."""
        self.outputs = [Output.of(output) for output, _ in pairs]
        with torch.no_grad():
            return [float(metric(*pair)) for pair in pairs for metric in self.job.metrics]

    def predict(self, model: torch.nn.Module, batch: ShardBatch) -> list[Tensor]:
        """Return the model's outputs, one per label."""
        return outputs_of(model(*self.inputs(batch)), self.job.label_cols)

    def inputs(self, batch: ShardBatch) -> list[Tensor]:
        """Return the model's inputs, one per feature column."""
        inputs = self.job.inputs
        tensors = (inputs.tensor(index, batch.columns[name]) for index, name in enumerate(inputs.columns))
        return [each.to(self.device) for each in tensors]

    def labels(self, batch: ShardBatch) -> list[Tensor]:
        """Return the labels, before any output is known."""
        shapes = self.job.label_shapes or (None,) * len(self.job.label_cols)
        return [
            label_tensor(batch.columns[name], self.job.inputs.dtype, shape).to(self.device)
            for name, shape in zip(self.job.label_cols, shapes, strict=True)
        ]

    def fitted(self, labels: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return labels in the shapes of their outputs, if they have as many numbers and no label shapes are set."""
        if self.job.label_shapes is not None:
            return list(labels)
        return [as_output(label, output) for label, output in zip(labels, outputs, strict=True)]

    def weights(self, batch: ShardBatch) -> Tensor | None:
        """Return the weights of the rows; None if all rows count the same."""
        column = self.job.weight_col
        return None if column is None else torch.from_numpy(batch.columns[column]).to(self.device)

    def pairs(self, batch: ShardBatch, outputs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return each output with its label, as the loss takes them."""
        shapes = self.job.label_shapes or (None,) * len(outputs)
        return [
            (output, fit_label(batch.columns[name], output, self.job.inputs.dtype, shape).to(self.device))
            for name, output, shape in zip(self.job.label_cols, outputs, shapes, strict=True)
        ]


def made_losses(constructors: Sequence[Callable[..., Loss]], model: torch.nn.Module, run: Run) -> tuple[Loss, ...]:
    """Return the losses that `loss_constructors` make on this rank."""
    held = run.rows.validate
    offered = {
        "model": model,
        "torch": torch,
        "hvd": hvd,
        "train_rows": run.rows.train.plan.total,
        "val_rows": 0 if held is None else held.plan.total,
    }
    return tuple(made_loss(each, offered) for each in constructors)


def weights_of(state: bytes) -> dict[str, Any]:
    """Return the model's weights in a checkpoint's state."""
    weights: dict[str, Any] = _read(state)["model"]
    return weights


def _read(state: bytes) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    return saved


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
