"""Trainer of Lightning modules: what each rank of a `LightningEstimator` runs."""

import importlib
import logging
import math
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import cloudpickle
import torch

import farandole.torch as hvd
from farandole.core.operations.objects import allgather_object, broadcast_object
from farandole.errors import ConfigError
from farandole.estimators.trainers.first_row import SHAPE_ERRORS, first_line, refused_model
from farandole.estimators.trainers.gpus import seen_by_torch
from farandole.estimators.trainers.lightning.callbacks import curves_logger, epochs_callback
from farandole.estimators.trainers.lightning.data import Loader, Tensors, queue_length
from farandole.estimators.trainers.lightning.files import BestWeights, LightningState, Saved, dumped, loaded, moved
from farandole.estimators.trainers.lightning.plain import wrapped
from farandole.estimators.trainers.lightning.strategy import KEPT, InSteps
from farandole.estimators.trainers.mirror import StoredFolder
from farandole.estimators.trainers.module_batches import module_arguments
from farandole.estimators.trainers.report import Meter, Record
from farandole.estimators.trainers.run import Run, RunPlan, sum_over_ranks
from farandole.estimators.trainers.run import train as train_with
from farandole.estimators.trainers.torch.losses import Losses
from farandole.estimators.trainers.torch.seed import seed_everything
from farandole.estimators.trainers.torch.tensors import Output, outputs_of
from farandole.lightning.packages import FABRICS
from farandole.lightning.ranks import strategy_class

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric

# Warnings about a folder with other files, epochs shorter than log_every_n_steps, Slurm's commands, and from torch.
_KNOWN = (
    "Checkpoint directory .* exists and is not empty",
    "The number of training batches .* is smaller than the logging interval",
    "The `srun` command is available",
    "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
)


@dataclass(frozen=True, kw_only=True)
class LightningJob:
    """The settings of a fit; pickled as one object, so that an optimizer still updates this model's parameters."""

    plan: RunPlan
    package: str  # the Lightning package of the model
    model: torch.nn.Module
    losses: Losses | None  # None for a LightningModule, which has its own
    tensors: Tensors
    callbacks: tuple[object, ...]
    logger: object  # None: log to the curves in the store
    profiler: object
    log_every_n_steps: int
    trainer_args: Mapping[str, object]
    queues: tuple[float | None, float | None]  # of training and validation
    debug_data_loader: bool
    terminate_on_nan: bool


def train(job: LightningJob) -> bytes | None:
    """Train a `LightningJob` on this rank; see `trainers.run.train`."""
    with ExitStack() as stack:
        return train_with(job.plan, lambda run: LightningTrainer(job, run, stack), gpus=seen_by_torch)


class LightningTrainer:
    """A rank's module and the `lightning.Trainer` around it; a `Trainer`."""

    def __init__(self, job: LightningJob, run: Run, stack: ExitStack) -> None:
        self.job, self.run = job, run
        self.package = importlib.import_module(job.package)
        _silence_warnings(job)
        self.outputs = _probe(job, run)
        seed_everything(run.checkpoint.seed)  # for layers that are created when training starts
        self.module = cast("LightningModule", job.model)
        if job.losses is not None:
            self.module = wrapped(self.package, job.model, job.losses, job.tensors, run)
        self.strategy = strategy_class(self.package, InSteps)(
            run=run,
            terminate_on_nan=job.terminate_on_nan,
            rate_factor=float(run.size),
            compression=job.plan.compression or hvd.Compression.none,
        )
        store = job.plan.store
        self._files = None
        if store is None:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="farandole-lightning-")))
        else:
            self._files = stack.enter_context(StoredFolder(store, store.get_run_path(job.plan.run_id)))
            self.folder = self._files.path
        self.loader = self._loader(training=True)
        self.trainer = self._trainer()
        self.meter, self.loss = Meter(()), [0.0, 0.0]  # of the epoch; the sum of the rows' losses, and the rows
        self._best, self._whole = BestWeights(), b""
        self._restored = False

    def restore(self, state: bytes) -> None:
        """Keep Lightning's checkpoint for `train`, which loads it. A collective."""
        saved = loaded(state)
        checkpoint = saved["lightning"]
        # Rank 0 writes the files, so all ranks refer to them by the paths of rank 0.
        folder = broadcast_object(str(self.folder), root_rank=0)
        checkpoint["callbacks"] = moved(checkpoint["callbacks"], saved["folder"], folder)
        self.strategy.checkpoint, self._whole, self._restored = checkpoint, state, True
        self._best.weights = saved["best"]

    def state(self, *, whole: bool) -> bytes:
        """Return the last checkpoint if `whole`, otherwise the weights of the fitted model."""
        if whole:
            return self._whole
        weights = self._best.weights or self.module.state_dict()
        return dumped({"lightning": {"state_dict": weights}, "best": None, "prefix": self._prefix})

    def train(self, run: Run) -> None:
        """Train the remaining epochs in one call of `Trainer.fit`."""
        if self._restored and not run.epochs:
            if self.job.losses is None:
                self.module.configure_model()
            self.module.load_state_dict(self.strategy.checkpoint["state_dict"])
            return
        run.describe(self.job.tensors.inputs.describe(run.rows.kinds))
        loop, ended = self.trainer.fit_loop, self.trainer.fit_loop.on_advance_end

        def end() -> None:
            ended()
            self._finish(stopped=loop.done and run.checkpoint.epoch + 1 < run.plan.epochs)

        # An epoch's checkpoint must hold the state of schedulers after the epoch, and no hook runs that late.
        loop.on_advance_end = end  # type: ignore[method-assign]
        held = self._loader(training=False) if run.validation_steps else None
        path = KEPT if self._restored else None
        if self.job.plan.data_module is None:
            self.trainer.fit(self.module, self.loader, held, ckpt_path=path)
        else:
            self.trainer.fit(self.module, datamodule=self._data_module(held), ckpt_path=path)

    @property
    def _prefix(self) -> str:
        """The prefix of the weights' names, which the user's own model does not have."""
        return "" if self.job.losses is None else "model."

    def _loader(self, *, training: bool) -> Loader:
        run, job = self.run, self.job
        if training:
            loader = Loader(lambda: run.batches(self.trainer.current_epoch), run.steps, job.tensors, run)
        else:
            loader = Loader(run.validation_batches, run.validation_steps, job.tensors, run)
        loader.queue = queue_length(job.queues[0 if training else 1], len(loader))
        loader.name = ("training" if training else "validation") if job.debug_data_loader else ""
        return loader

    def _data_module(self, held: Loader | None) -> "LightningDataModule":
        kind, run = self.job.plan.data_module, self.run
        assert kind is not None
        made: object = kind(**module_arguments(run, self.loader, held), seed=run.checkpoint.seed)
        if not isinstance(made, self.package.LightningDataModule):
            raise ConfigError("data_module", f"must make a {self.package.__name__}.LightningDataModule")
        return cast("LightningDataModule", made)

    def _trainer(self) -> "Trainer":
        job, run = self.job, self.run
        writers = [each for each in job.callbacks if isinstance(each, self.package.callbacks.Checkpoint)]
        for each in writers:
            if getattr(each, "dirpath", "") is None:
                each.dirpath = str(self.folder)
        logger = job.logger
        if logger is None:
            logger = False if run.plan.store is None else curves_logger(self.package, run)
        settings = {
            "accelerator": "cpu" if run.gpu is None else "gpu",  # the strategy takes the GPU at the local rank
            "devices": 1,
            "strategy": self.strategy,
            "max_epochs": run.plan.epochs,
            "callbacks": [epochs_callback(self.package, self), *job.callbacks],
            "enable_checkpointing": bool(writers),
            "logger": logger,
            "log_every_n_steps": job.log_every_n_steps,
            "profiler": job.profiler,
            "accumulate_grad_batches": job.plan.passes,
            "default_root_dir": str(self.folder),
            "use_distributed_sampler": False,
            "num_sanity_val_steps": 0,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        trainer: Trainer = self.package.Trainer(**{**settings, **job.trainer_args})
        profiler = getattr(trainer, "profiler", None)  # Lightning declares no such attribute
        if profiler is not None and job.profiler is not None and profiler.dirpath is None:
            profiler.dirpath = self.folder
        return trainer

    def _finish(self, stopped: bool) -> None:
        """End an epoch: report its values and write the checkpoint. A collective."""
        run, job = self.run, self.job
        self.strategy.broadcast_buffers()
        loss, rows = sum_over_ranks(self.loss)
        _, speed = self.meter.over_ranks(sum_over_ranks, run.size)
        record = self._logged() | ({"loss": loss / rows} if rows else {}) | speed
        self.trainer.save_checkpoint(KEPT)
        if run.rank == 0:
            self._best.look(job.callbacks, self.strategy.written)
            dropped = ("hyper_parameters", "hparams", "datamodule_h")  # may be any objects; the driver has them
            content = {name: each for name, each in self.strategy.checkpoint.items() if not name.startswith(dropped)}
            values: Saved = {
                "lightning": cast(LightningState, content),
                "best": self._best.weights,
                "prefix": self._prefix,
                "folder": str(self.folder),
            }
            self._whole = dumped(values, checked=not self._whole)
        run.finish(run.checkpoint.epoch, record, self.outputs, stopped=stopped)
        if self._files is not None and run.rank == 0:
            self._files.push()

    def _logged(self) -> Record:
        """Return the logged values: means over ranks, weighted by their rows. A collective."""
        taken, validated = self.meter.rows, sum(map(self.run.validation_rows, range(self.run.validation_steps)))
        logged = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        loop = self.trainer.fit_loop.epoch_loop
        held = _names_in(loop.val_loop._results) - _names_in(loop._results)  # a name in both has training's value
        weighted = {name: (value, validated if name in held else taken) for name, value in logged.items()}
        every = allgather_object(weighted)
        record = {}
        for name in dict.fromkeys(name for each in every for name in each):
            values = [each[name] for each in every if name in each]
            rows = sum(rows for _, rows in values)
            if len({value for value, _ in values}) == 1 or not rows:
                record[name] = values[0][0]
            else:
                record[name] = math.fsum(value * share for value, share in values if share) / rows
        return record


def _names_in(results: Mapping[str, "_ResultMetric"]) -> set[str]:
    """Return the names under which a loop's logged values are among the trainer's `callback_metrics`."""
    metas = [each.meta for each in results.values()]
    return {name for each in metas for name in (each.name, each.forked_name(False), each.forked_name(True))}


def _silence_warnings(job: LightningJob) -> None:
    """Silence Lightning's warnings about settings that the estimator has chosen, unless `verbose` is above 1."""
    if job.plan.verbose > 1:
        return
    for name in (*FABRICS, *FABRICS.values()):  # they share a function, which uses the logger of the last package
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in _KNOWN:
        warnings.filterwarnings("ignore", message=message)


def _probe(job: LightningJob, run: Run) -> list[tuple[str, tuple[int, ...]]] | None:
    """Run one row through a copy of the model; return the type and shape of each output.

    Returns None if there is no row or the model has no `forward`. Raises `ConfigError` for a model that does not take
    the columns."""
    sample = run.sample()
    if sample is None:
        return None
    model = cloudpickle.loads(cloudpickle.dumps(job.model))
    if job.losses is None:
        model.configure_model()  # may create layers
    model.eval()
    batch, inputs = job.tensors.of(sample), job.tensors.inputs
    try:
        with torch.inference_mode():
            outputs = outputs_of(model(*[batch[name] for name in inputs.columns]), job.tensors.label_cols)
    except ConfigError:
        raise
    except NotImplementedError:
        return None
    except SHAPE_ERRORS as error:
        raise refused_model(first_line(error), inputs.describe(run.rows.kinds)) from error
    return [(each.dtype, each.shape) for each in map(Output.of, outputs)]
