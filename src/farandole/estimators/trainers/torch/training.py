"""Trainer of PyTorch models: what each rank of a `TorchEstimator` runs."""

import io
from contextlib import nullcontext
from dataclasses import replace
from typing import NotRequired, TypedDict

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

import farandole.torch as hvd
from farandole.data import ShardBatch
from farandole.estimators.trainers.gpus import seen_by_torch
from farandole.estimators.trainers.report import Meter, Record
from farandole.estimators.trainers.run import Run, sum_over_ranks
from farandole.estimators.trainers.run import train as train_with
from farandole.estimators.trainers.torch.callbacks import Callbacks
from farandole.estimators.trainers.torch.devices import device_of, on_cpu, to_device
from farandole.estimators.trainers.torch.judge import Judge, TorchJob
from farandole.estimators.trainers.torch.minibatch import MinibatchStep
from farandole.estimators.trainers.torch.module import TorchModule
from farandole.estimators.trainers.torch.probe import probe
from farandole.estimators.trainers.torch.seed import seed_everything


def train(job: TorchJob) -> bytes | None:
    """Train a `TorchJob` on this rank; see `trainers.run.train`."""
    return train_with(job.plan, lambda run: TorchTrainer(job, run), gpus=seen_by_torch)


class _State(TypedDict):
    model: dict[str, Tensor]
    optimizer: NotRequired[StateDict]  # with the user's learning rates


class TorchTrainer:
    """A rank's model, optimizer and loss; a `Trainer`."""

    def __init__(self, job: TorchJob, run: Run) -> None:
        plan, losses = job.plan, job.losses.made(job.model, run)
        job, device = replace(job, losses=losses), device_of(run.gpu)
        to_device((job.model, *losses.losses, *losses.metrics), device)
        self.job, self.model, self.judge = job, job.model, Judge(job, device)
        self._module = None if plan.data_module is None else TorchModule(plan.data_module, run)
        self._probe_first = self._module is not None  # probe the model with the module's first batch
        if self._module is None:
            probe(self.judge, run, run.sample())
        # Ranks need no broadcast of the initial state: all of them unpickled the same model, or the same checkpoint.
        self.optimizer = hvd.DistributedOptimizer(
            losses.optimizer,
            named_parameters=self.model.named_parameters(),
            compression=plan.compression or hvd.Compression.none,
            backward_passes_per_step=plan.passes,
        )
        self._take_rates(losses.optimizer.state_dict())
        self.optimizer.zero_grad()
        self._passes = plan.passes
        self._pending = 0  # batches since the last step of the optimizer
        self._callbacks = Callbacks(job.callbacks)
        self._minibatch_step = None
        if job.train_minibatch is not None:
            self._minibatch_step = MinibatchStep(job.train_minibatch, self.judge, run)

    def restore(self, state: bytes) -> None:
        """Load weights and optimizer. It loads only tensors and plain values, so a foreign file runs no code."""
        saved = _read(state)
        self.model.load_state_dict(saved["model"])
        self._take_rates(saved["optimizer"])

    def state(self, *, whole: bool) -> bytes:
        """Return the weights, and the optimizer's state if `whole`; any machine can load them, with GPUs or without."""
        saved: _State = {"model": self.model.state_dict()}
        if whole:
            optimizer = self.optimizer.state_dict()
            groups = zip(optimizer["param_groups"], self._unscaled(), strict=True)
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
        loss = self._backward(batch, meter, min(self._passes, left + self._pending))
        self._pending += 1
        if self._pending == self._passes or left == 1:
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

    def _unscaled(self) -> list[float]:
        """Return the learning rates for one rank; exactly the user's as long as no step or callback changes them."""
        rates = zip((group["lr"] for group in self.optimizer.param_groups), self._base_rates, strict=True)
        return [base if now == base * hvd.size() else now / hvd.size() for now, base in rates]

    def _take_rates(self, state: StateDict) -> None:
        """Load the optimizer's state, and multiply the learning rates in it by the number of ranks."""
        self.optimizer.load_state_dict(state)
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * hvd.size()


def weights_of(state: bytes) -> dict[str, Tensor]:
    """Return the model's weights in a checkpoint's state."""
    return _read(state)["model"]


def _read(state: bytes) -> _State:
    saved: _State = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    return saved
