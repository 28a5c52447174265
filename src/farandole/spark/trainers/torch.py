"""Trains a PyTorch model on a DataFrame's rows: what each rank of a `TorchEstimator` runs."""

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

import farandole.torch as hvd
from farandole.data import ShardBatch
from farandole.errors import ConfigError
from farandole.spark.child import shard
from farandole.spark.logs import log_to_driver, send
from farandole.spark.progress import Progress
from farandole.spark.store import FilesystemStore
from farandole.spark.trainers.checkpoint import Checkpoint
from farandole.spark.trainers.report import Curves, Meter, Record
from farandole.spark.trainers.rows import RowsWanted, open_rows
from farandole.spark.trainers.torch_tensors import Inputs, Output, fit_label, outputs_of, spell

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Metric: TypeAlias = Callable[[Tensor, Tensor], Tensor | float]


@dataclass(frozen=True, kw_only=True)
class TorchJob:
    """All that the ranks need; pickled as one object, so that the optimizer still updates this model's parameters."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    losses: tuple[Loss, ...]
    loss_weights: tuple[float, ...]
    metrics: tuple[Metric, ...]
    inputs: Inputs
    label_cols: tuple[str, ...]
    rows: RowsWanted
    epochs: int
    start: Checkpoint  # what the driver knows: the seed, and how many epochs are finished
    store: FilesystemStore | None
    run_id: str
    verbose: int


def train(job: TorchJob) -> bytes | None:
    """Train until `job.epochs` epochs are finished, starting after the last one that the store holds.

    Returns the last checkpoint, without the optimizer, on rank 0. Raises `DataError` for rows that no tensor holds,
    `ConfigError` when rank 0 and the driver see different stores.
    """
    hvd.init()
    try:
        training = Training(job)
        training.run()
        return replace(training.checkpoint, optimizer=None).dump() if hvd.rank() == 0 else None
    finally:
        hvd.shutdown()


class Training:
    """One rank's part of a run."""

    def __init__(self, job: TorchJob) -> None:
        self.job = job
        self.checkpoint = _agree_on_start(job)
        path = shard()
        assert path is not None, "an estimator's job has a DataFrame"
        self.rows = open_rows(path, job.rows, seed=self.checkpoint.seed, rank=hvd.rank(), gather=hvd.allgather_object)
        self.model = job.model
        self.judge = Judge(job)
        # Ranks need no broadcast of the initial state: all of them unpickled the same model, or the same checkpoint.
        if self.checkpoint.model is not None:
            self.model.load_state_dict(self.checkpoint.model)
        self.optimizer = hvd.DistributedOptimizer(job.optimizer, named_parameters=self.model.named_parameters())
        self.optimizer.load_state_dict(self.checkpoint.optimizer or job.optimizer.state_dict())
        self.base_rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * hvd.size()
        self.curves = Curves(job.store, job.run_id) if job.store is not None and hvd.rank() == 0 else None

    def run(self) -> None:
        """Train and validate epoch by epoch; after each one rank 0 writes the checkpoint."""
        if hvd.rank() == 0 and self.job.verbose:
            log_to_driver(self._describe())
        try:
            for epoch in range(self.checkpoint.epoch, self.job.epochs):
                record = self._train(epoch)
                # Running statistics (BatchNorm) are each rank's own until here; validation and checkpoint need one.
                hvd.broadcast_parameters(dict(self.model.named_buffers()), root_rank=0)
                if self.rows.validate is not None:
                    record |= self._validate()
                self._finish(epoch, record)
        finally:
            if self.curves is not None:
                self.curves.close()

    def _train(self, epoch: int) -> Record:
        torch.manual_seed(_rank_seed(self.checkpoint.seed, epoch, hvd.rank()))
        self.model.train()
        meter = Meter(self.judge.names)
        steps = self.rows.train.plan.steps
        progress = Progress(epochs=self.job.epochs, steps=steps, epoch=epoch)
        batches = self.rows.train.epoch(epoch)
        for step in range(steps):
            with meter.waiting():
                batch = next(batches)
            loss = self._step(batch, meter)
            progress.step(rows=batch.rows, loss=loss, waited=meter.wait)
            if self.curves is not None and loss is not None:
                self.curves.add_step(loss, self.checkpoint.step + step + 1)
        means, speed = meter.over_ranks(_sum_over_ranks, hvd.size())
        return {"epoch": epoch + 1, "steps": steps} | means | speed

    def _step(self, batch: ShardBatch, meter: Meter) -> float | None:
        self.optimizer.zero_grad()
        values: list[float] = []
        if batch.rows:
            loss, scores = self.judge(batch)
            # The optimizer averages over ranks; the weight makes that the mean over all rows of the step.
            (loss * batch.weight).backward()
            values = [loss.item(), *scores]
            meter.add(batch.rows, values)
        # Without rows there is no gradient here, which counts as zeros.
        self.optimizer.step()
        return values[0] if values else None

    def _validate(self) -> Record:
        assert self.rows.validate is not None
        self.model.eval()
        meter = Meter(self.judge.names)
        with torch.no_grad():
            for batch in self.rows.validate.epoch(0):
                if batch.rows:
                    loss, scores = self.judge(batch)
                    meter.add(batch.rows, [loss.item(), *scores])
        means, _ = meter.over_ranks(_sum_over_ranks, hvd.size())
        return {f"val_{name}": mean for name, mean in means.items()}

    def _finish(self, epoch: int, record: Record) -> None:
        # A rank that never had a row has seen no output.
        outputs = next(seen for seen in hvd.allgather_object(self.judge.outputs) if seen is not None)
        before, best = self.checkpoint, self.checkpoint.best
        improved = "val_loss" in record and (best is None or record["val_loss"] < best["val_loss"])
        self.checkpoint = Checkpoint(
            epoch=epoch + 1,
            step=before.step + self.rows.train.plan.steps,
            seed=before.seed,
            model=self.model.state_dict(),
            optimizer=self._unscaled_optimizer(),
            history=[*before.history, record],
            best=record if improved else best,
            outputs=[(output.dtype, list(output.shape)) for output in outputs],
        )
        if hvd.rank() != 0:
            return
        send("epoch", dict(record))
        if self.curves is not None:
            self.curves.add_epoch(record, self.checkpoint.step)
        if self.job.store is not None:
            content = self.checkpoint.dump()
            self.job.store.write(self.job.store.get_checkpoint_path(self.job.run_id), content)
            if improved:
                self.job.store.write(self.job.store.get_best_path(self.job.run_id), content)

    def _unscaled_optimizer(self) -> dict[str, object]:
        state: dict[str, object] = self.optimizer.state_dict()
        groups = state["param_groups"]
        assert isinstance(groups, list)
        state["param_groups"] = [group | {"lr": rate} for group, rate in zip(groups, self.base_rates, strict=True)]
        return state

    def _describe(self) -> str:
        plan, kinds, inputs = self.rows.train.plan, self.rows.kinds, self.job.inputs
        features = ", ".join(f"{each} {kinds[each]} as {spell(inputs.dtype)}" for each in inputs.columns)
        labels = ", ".join(f"{each} {kinds[each]}" for each in self.job.label_cols)
        held = 0 if self.rows.validate is None else self.rows.validate.plan.total
        text = (
            f"{self.job.run_id}: {plan.total} rows train, {held} validate; {plan.steps} steps per epoch on "
            f"{hvd.size()} ranks; features {features}; labels {labels}; seed {self.checkpoint.seed}"
        )
        if self.checkpoint.epoch:
            text += f"; resumed after epoch {self.checkpoint.epoch}"
        if held == 0 and (self.job.rows.validation or self.job.rows.validation_col):
            text += "; validation was asked for, but no row was chosen for it"
        return text


class Judge:
    """Turns a batch's columns into the model's inputs, and its outputs into a loss and scores."""

    def __init__(self, job: TorchJob) -> None:
        self.job = job
        self.names = ["loss", *score_names(job)]
        self.outputs: list[Output] | None = None  # of the last batch

    def __call__(self, batch: ShardBatch) -> tuple[Tensor, list[float]]:
        """Return the batch's mean loss and its scores, in the order of `names`."""
        job = self.job
        inputs = [job.inputs.tensor(index, batch.columns[name]) for index, name in enumerate(job.inputs.columns)]
        outputs = outputs_of(job.model(*inputs), job.label_cols)
        self.outputs = [Output.of(output) for output in outputs]
        pairs = [
            (output, fit_label(batch.columns[name], output, job.inputs.dtype))
            for name, output in zip(job.label_cols, outputs, strict=True)
        ]
        weighted = zip(job.losses, job.loss_weights, pairs, strict=True)
        loss = torch.stack([weight * loss(*pair) for loss, weight, pair in weighted]).sum()
        with torch.no_grad():
            scores = [float(metric(*pair)) for pair in pairs for metric in job.metrics]
        return loss, scores


def score_names(job: TorchJob) -> list[str]:
    """Name each score: the metric's own name, with the label's when there are several labels."""
    names = [getattr(metric, "__name__", type(metric).__name__) for metric in job.metrics]
    if len(job.label_cols) == 1:
        return names
    return [f"{label}_{name}" for label in job.label_cols for name in names]


def _agree_on_start(job: TorchJob) -> Checkpoint:
    content = None
    if job.store is not None and hvd.rank() == 0:
        content = job.store.read(job.store.get_checkpoint_path(job.run_id))
        finished = Checkpoint.load(content).epoch if content is not None else 0
        if finished < job.start.epoch:
            raise ConfigError(
                "store",
                f"the driver sees {job.start.epoch} finished epochs of {job.run_id}, rank 0 on {socket.gethostname()} "
                f"sees {finished}; use a store that is the same on every host",
            )
    content = hvd.broadcast_object(content, root_rank=0)
    return job.start if content is None else Checkpoint.load(content)


def _rank_seed(seed: int, epoch: int, rank: int) -> int:
    return int(np.random.SeedSequence(seed, spawn_key=(epoch, rank, 1)).generate_state(1, np.uint32)[0])


def _sum_over_ranks(values: list[float]) -> list[float]:
    summed: list[float] = hvd.allreduce(torch.tensor(values, dtype=torch.float64), op=hvd.Sum, name="meter").tolist()
    return summed
