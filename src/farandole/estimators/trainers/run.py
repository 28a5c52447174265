"""A rank's part of an estimator's run, shared by the trainers of all frameworks: rows, reports and checkpoints."""

import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from farandole.core.operations.objects import allgather_object, broadcast_object
from farandole.core.public import init, rank, shutdown, size
from farandole.data import Number, ShardBatch
from farandole.errors import ConfigError
from farandole.estimators.run_lock import require_owner
from farandole.estimators.store import FilesystemStore
from farandole.estimators.trainers.checkpoint import Checkpoint, digest, last_checkpoint, restoring, write_checkpoint
from farandole.estimators.trainers.gpus import Look, choose_gpu, no_gpus
from farandole.estimators.trainers.report import Curves, Record
from farandole.estimators.trainers.rows import RowsWanted, open_rows
from farandole.spark.driver.messages import log_to_driver, send
from farandole.spark.driver.progress import Progress
from farandole.spark.jobs.child import shard

if TYPE_CHECKING:
    from farandole.estimators.trainers.parquet_rows import ParquetRows

_STAND_IN_ROWS = 2  # layers that normalize over a batch refuse to train on a single row


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Settings of a run that do not depend on the framework; the same on every rank."""

    run_id: str
    store: FilesystemStore | None
    rows: RowsWanted
    label_cols: tuple[str, ...]
    epochs: int
    train_steps: int | None  # steps of an epoch; None: every row once
    validation_steps: int | None
    start: Checkpoint  # as the driver has found it; it holds the seed and the number of finished epochs
    verbose: int
    owner: str = ""  # token of the fit that has locked the run
    use_gpu: bool | None = False  # None: if every rank has a GPU
    files: "ParquetRows | None" = None  # files that the ranks read instead of being fed rows
    weight_col: str | None = None
    label_shapes: tuple[tuple[int, ...], ...] | None = None  # -1 first, for the rows
    compression: Any = None  # `Compression` of the framework's binding
    passes: int = 1  # batches whose gradients are averaged before a step
    data_module: Callable[..., object] | None = None  # makes the batches


class Trainer(Protocol):
    """One framework's part of a rank's run; `RunPlan` and `Run` are the same for all frameworks."""

    def restore(self, state: bytes) -> None:
        """Load the weights and the optimizer from a result of `state`, made on any rank with any number of ranks."""

    def train(self, run: "Run") -> None:
        """Train the remaining epochs; call `run.finish` after each, on every rank."""

    def state(self, *, whole: bool) -> bytes:
        """Return the weights; with `whole` also the optimizer, with the user's learning rate."""


def train(
    plan: RunPlan, make: Callable[["Run"], Trainer], path: Path | None = None, *, gpus: Look = no_gpus
) -> bytes | None:
    """Train until `plan.epochs` epochs are finished, starting after the last epoch in the store.

    `path` is the file with the rank's rows, by default the file that its Spark task was fed. `gpus` counts the
    framework's GPUs. Returns the last checkpoint, without the optimizer, on rank 0, and None on other ranks. Raises
    `DataError` for rows that no tensor can hold, `ConfigError` if rank 0 and the driver see different stores, or if
    GPUs are wanted and missing. A collective.
    """
    init()
    try:
        gpu = choose_gpu(plan.use_gpu, gpus)
        run = _opened(plan, path, gpu)
        try:
            trainer = make(run)
            if run.checkpoint.state is not None:
                with restoring(plan.store, plan.run_id):
                    trainer.restore(run.checkpoint.state)
            run.trainer = trainer
            trainer.train(run)
            run.seal()
        finally:
            run.close()
        return replace(run.checkpoint, state=trainer.state(whole=False)).dump() if rank() == 0 else None
    finally:
        shutdown()


def _opened(plan: RunPlan, path: Path | None, gpu: int | None) -> "Run":
    files = plan.files
    if files is None:
        return Run(plan, path, gpu)
    # Imported here: the modules for Parquet load slowly, and ranks that are fed rows do not need them.
    from farandole.estimators.trainers.parquet_rows import lay_out

    laid_out = lay_out(files, rank=rank(), size=size())  # a failure ends this rank, and the others lose their peer
    try:
        return Run(plan, Path(f"/proc/self/fd/{laid_out.file.fileno()}"), gpu)
    finally:
        laid_out.close()  # the rows stay mapped


class Run:
    """A rank's rows, reports and checkpoints."""

    trainer: Trainer

    def __init__(self, plan: RunPlan, path: Path | None = None, gpu: int | None = None) -> None:
        self.plan, self.rank, self.size = plan, rank(), size()
        self.gpu = gpu  # index of this rank's GPU; None: the rank computes on the CPU
        self.checkpoint = _agree_on_start(plan)
        # After a callback's stop nothing is left to train, even if that attempt failed before its end.
        self.last = self.checkpoint.epoch if self.checkpoint.stopped else plan.epochs
        path = path or shard()
        assert path is not None, "an estimator's job has a DataFrame"
        self.rows = open_rows(path, plan.rows, seed=self.checkpoint.seed, rank=self.rank, gather=allgather_object)
        self.steps = plan.train_steps or self.rows.train.plan.steps
        # The first remaining epoch, and the batches before it. `train_steps` may have been another number until now.
        self._first_place = self.checkpoint.step if plan.train_steps else self.checkpoint.epoch * self.steps
        self._first_epoch = self.checkpoint.epoch
        held = self.rows.validate
        self.validation_steps = 0 if held is None else min(held.plan.steps, plan.validation_steps or held.plan.steps)
        first = plan.store is not None and self.rank == 0
        self._curves = Curves(plan.store, plan.run_id) if first and plan.store is not None else None
        self._progress: Progress | None = None
        self._step = self.checkpoint.step
        self._diverged = False  # a loss was not finite
        self._weights: bytes | None = None  # digest of the weights after the last epoch

    @property
    def epochs(self) -> range:
        """The remaining epochs, counted from 0."""
        return range(self.checkpoint.epoch, self.last)

    def describe(self, features: str) -> None:
        """Log the numbers of rows and steps, and warnings of the rows, to the driver; only rank 0 does.

        `features` describes the types and shapes in which the model receives the columns."""
        for warning in self.rows.warnings() if self.rank == 0 else ():
            log_to_driver(warning)
        if self.rank == 0 and self.plan.verbose:
            log_to_driver(self._description(features))

    def sample(self) -> ShardBatch | None:
        """Return a batch of this rank's first row; None if it has no row to train on."""
        rows = self.rows.train.rows[:1]
        return ShardBatch(self.rows.train.take(rows), 1, 1.0) if len(rows) else None

    def stand_in(self) -> ShardBatch:
        """Return two rows for a step in which this rank has none: its first row twice, or zeros if it has no row."""
        sample = self.sample()
        if sample is not None:
            columns = {name: values.repeat(_STAND_IN_ROWS, 0) for name, values in sample.columns.items()}
        else:
            nothing = self.rows.train.take(np.empty(0, np.int64))
            columns = {name: np.zeros((_STAND_IN_ROWS, *each.shape[1:]), each.dtype) for name, each in nothing.items()}
        return ShardBatch(columns, _STAND_IN_ROWS, 0.0)

    def row_of_any(self) -> Mapping[str, NDArray[Number]]:
        """Return the columns of the first row to train on, of the first rank that has one. A collective."""
        first = next(rank for rank, rows in enumerate(self.rows.train.plan.rows) if rows)
        sample = self.sample() if self.rank == first else None
        row: Mapping[str, NDArray[Number]] = broadcast_object(
            None if sample is None else sample.columns, root_rank=first
        )
        return row

    def seed(self, epoch: int) -> int:
        """Return the seed of this rank's random generators in an epoch."""
        return int(np.random.SeedSequence(self.checkpoint.seed, spawn_key=(epoch, self.rank, 1)).generate_state(1)[0])

    def begin(self, epoch: int) -> None:
        """Begin to report the steps of an epoch."""
        self._progress = Progress(epochs=self.plan.epochs, steps=self.steps, epoch=epoch)

    def place(self, epoch: int, step: int) -> int:
        """Return the number of batches before this one since the first pass over the rows began."""
        return self._first_place + (epoch - self._first_epoch) * self.steps + step

    def batches(self, epoch: int) -> Iterator[ShardBatch]:
        """Yield `steps` batches. Every row comes once before any row comes again, whatever the length of an epoch."""
        natural = self.rows.train.plan.steps
        source = None
        for place in range(self.place(epoch, 0), self.place(epoch + 1, 0)):
            if source is None or place % natural == 0:
                source = self.rows.train.epoch(place // natural, first=place % natural)
            yield next(source)

    def rows_of(self, epoch: int, step: int) -> int:
        """Return how many rows the batch of a step has."""
        plan = self.rows.train.plan
        return plan.batch(self.rank, self.place(epoch, step) % plan.steps)

    def rows_of_all(self, epoch: int, step: int) -> int:
        """Return how many rows the batches of all ranks have in a step."""
        plan = self.rows.train.plan
        return plan.in_step(self.place(epoch, step) % plan.steps)

    def validation_rows(self, step: int) -> int:
        """Return how many rows this rank's batch of a step of the validation has."""
        held = self.rows.validate
        return 0 if held is None else held.plan.batch(self.rank, step)

    def validation_batch(self, step: int) -> ShardBatch:
        """Return this rank's batch of a step of the validation."""
        assert self.rows.validate is not None
        return next(self.rows.validate.epoch(0, first=step))

    def validation_batches(self) -> Iterator[ShardBatch]:
        """Yield `validation_steps` batches, the same ones each time."""
        if self.rows.validate is not None:
            source = self.rows.validate.epoch(0)
            for _ in range(self.validation_steps):
                yield next(source)

    def done(self, rows: int, loss: float | None, waited: float) -> None:
        """Report a step of `rows` rows, for which this rank waited `waited` seconds; `loss` is None without rows."""
        assert self._progress is not None
        self._step += 1
        self._progress.step(rows=rows, loss=loss, waited=waited)
        if loss is None:
            return
        if not math.isfinite(loss) and not self._diverged:
            self._diverged = True
            log_to_driver(
                f"the loss of rank {self.rank} is {loss} in step {self._step}; lower the learning rate, or look for "
                "extreme values in the columns"
            )
        if self._curves is not None:
            self._curves.add_step(loss, self._step)

    def add_points(self, values: Mapping[str, float], step: int) -> None:
        """Add points to rank 0's curves."""
        if self._curves is not None:
            self._curves.add(values, step)

    def finish(
        self, epoch: int, record: Record, outputs: Sequence[tuple[str, Sequence[int]]] | None, *, stopped: bool = False
    ) -> None:
        """End an epoch: rank 0 reports `record` and writes the checkpoint. A collective.

        `outputs` has the type and the shape of one row of each output; None on a rank that has seen no output yet."""
        seen = next((each for each in allgather_object(outputs) if each is not None), None)
        before, best = self.checkpoint, self.checkpoint.best
        record = {"epoch": epoch + 1, "steps": self.steps, **record}
        value = record.get("val_loss", math.nan)
        improved = math.isfinite(value) and (best is None or not value >= best["val_loss"])  # that may be NaN
        self.checkpoint = Checkpoint(
            kind=before.kind,
            epoch=epoch + 1,
            step=before.step + self.steps,
            seed=before.seed,
            history=[*before.history, record],
            best=record if improved else best,
            outputs=before.outputs if seen is None else [(dtype, [*shape]) for dtype, shape in seen],
            stopped=stopped,
        )
        if self.rank != 0:
            return
        send("epoch", dict(record))
        if self._curves is not None:
            self._curves.add_epoch(record, self.checkpoint.step)
        store, run_id = self.plan.store, self.plan.run_id
        if store is not None:
            content = replace(self.checkpoint, state=self.trainer.state(whole=True)).dump()
            if improved:
                # First: after a crash between the two files the next attempt repeats the epoch, and writes both.
                require_owner(store, store.get_run_path(run_id), self.plan.owner)
                store.write(store.get_best_path(run_id), content)
            self._write(store, content)
            if epoch + 1 == self.last and not stopped:
                self._weights = digest(self.trainer.state(whole=False))

    def seal(self) -> None:
        """Write the final weights: a callback may have restored those of an earlier epoch, or averaged some.

        A run that was not stopped keeps those of its last epoch, too, with which more epochs would continue."""
        store = self.plan.store
        if self.rank != 0 or store is None:
            return
        if self.checkpoint.stopped:
            self._write(store, replace(self.checkpoint, state=self.trainer.state(whole=True)).dump())
        elif self._weights is not None and self._weights != digest(final := self.trainer.state(whole=False)):
            saved = last_checkpoint(store, self.plan.run_id, log_to_driver)
            assert saved is not None, "the last epoch has written it"
            self._write(store, replace(saved, final=final).dump())

    def _write(self, store: FilesystemStore, content: bytes) -> None:
        require_owner(store, store.get_run_path(self.plan.run_id), self.plan.owner)
        write_checkpoint(store, self.plan.run_id, content)

    def close(self) -> None:
        """Close the curves."""
        if self._curves is not None:
            self._curves.close()

    def _description(self, features: str) -> str:
        plan, kinds = self.rows.train.plan, self.rows.kinds
        labels = ", ".join(f"{each} {kinds[each]}" for each in self.plan.label_cols)
        held = self.rows.held
        text = (
            f"{self.plan.run_id}: {plan.total} rows train, {held} validate; {self.steps} steps per epoch on "
            f"{self.size} ranks, {'on the CPU' if self.gpu is None else 'each on a GPU'}; features {features}; "
            f"labels {labels}; seed {self.checkpoint.seed}"
        )
        if self.checkpoint.epoch:
            text += f"; resumed after epoch {self.checkpoint.epoch}"
        if held == 0 and (self.plan.rows.validation or self.plan.rows.validation_col):
            text += "; validation was asked for, but no row was chosen for it"
        return text


def sum_over_ranks(values: list[float]) -> list[float]:
    """Return the sum over ranks of each value, the same bits on every rank. A collective."""
    return [math.fsum(each) for each in zip(*allgather_object(values), strict=True)]


def _agree_on_start(plan: RunPlan) -> Checkpoint:
    found = None
    if plan.store is not None and rank() == 0:
        found = last_checkpoint(plan.store, plan.run_id, lambda text: log_to_driver(f"warning: {text}"))
        finished = 0 if found is None else found.epoch
        if finished < plan.start.epoch:
            raise ConfigError(
                "store",
                f"the driver sees {plan.start.epoch} finished epochs of {plan.run_id}, rank 0 on "
                f"{socket.gethostname()} sees {finished}; use a store that is the same on every host",
            )
    found = broadcast_object(found, root_rank=0)
    return plan.start if found is None else found
