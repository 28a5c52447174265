"""Callback and logger that report a Lightning trainer's steps and values to a run."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from farandole.estimators.trainers.lightning.data import Loader
from farandole.estimators.trainers.lightning.strategy import InSteps
from farandole.estimators.trainers.report import Meter
from farandole.estimators.trainers.run import Run
from farandole.estimators.trainers.torch.seed import seed_everything

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers.logger import Logger
else:
    Callback = Logger = object  # the package's own are bases of the classes that are made of these


class _Trainer(Protocol):
    run: Run
    meter: Meter
    loss: list[float]
    strategy: InSteps
    loader: Loader


def epochs_callback(package: ModuleType, trainer: _Trainer) -> "Callback":
    """Return the callback that runs before the user's."""
    kind: Callable[[_Trainer], Callback] = type("Epochs", (_Epochs, package.Callback), {})
    return kind(trainer)


def curves_logger(package: ModuleType, run: Run) -> "Logger":
    """Return a logger that adds to the curves in the store."""
    kind: Callable[[Run], Logger] = type("CurvesLogger", (_CurvesLogger, package.loggers.logger.Logger), {})
    return kind(run)


class _Epochs(Callback):
    """Seeds each epoch, so that a resumed run equals an uninterrupted one, and reports its steps."""

    def __init__(self, trainer: _Trainer) -> None:
        super().__init__()
        self._trainer = trainer

    def on_train_epoch_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Seed the epoch, and begin to count its steps."""
        mine = self._trainer
        epoch = trainer.current_epoch
        seed_everything(mine.run.seed(epoch))
        mine.run.begin(epoch)
        mine.meter, mine.loss = Meter(()), [0.0, 0.0]
        mine.loader.meter = mine.meter

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Report the step."""
        mine, strategy = self._trainer, self._trainer.strategy
        loss = strategy.loss.item() if strategy.loss is not None and strategy.rows else None
        if loss is not None:
            mine.loss[0] += loss * strategy.rows
            mine.loss[1] += strategy.rows
        mine.meter.add(strategy.rows, ())
        mine.run.done(strategy.rows, loss, mine.meter.wait)


class _CurvesLogger(Logger):
    """Writes the values that the module logs to the run's event file, beside the curves of the epochs."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    @property
    def name(self) -> str:
        """Return the run's name."""
        return self._run.plan.run_id

    @property
    def version(self) -> int:
        """Return 0: each attempt of a run has its own event file, without a version."""
        return 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add the values to the curves, on rank 0."""
        points = {f"logged/{name}": value for name, value in metrics.items() if name != "epoch"}
        if points and self._run.rank == 0:
            self._run.add_points(points, step or 0)

    def log_hyperparams(self, params: object, *args: object, **kwargs: object) -> None:
        """Do nothing: an event file has no simple place for hyperparameters."""
