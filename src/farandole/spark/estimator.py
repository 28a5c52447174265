"""Fits a model to a DataFrame on the ranks of one Spark barrier stage; what all frameworks' estimators share."""

import logging
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from pyspark.ml import Estimator, Model
from pyspark.sql import DataFrame

from farandole.config import Config
from farandole.errors import ConfigError, DataError, RankFailed
from farandole.spark.barrier import run_barrier_job
from farandole.spark.display import Display
from farandole.spark.feed import Feed, plan_feed
from farandole.spark.params import EstimatorParams
from farandole.spark.slots import all_slots
from farandole.spark.store import FilesystemStore
from farandole.spark.trainers.rows import RowsWanted

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Model)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One call of `fit`, with all its settings settled."""

    run_id: str
    store: FilesystemStore | None
    feed: Feed
    rows: RowsWanted
    epochs: int
    seed: int
    finished: int  # epochs that the store's checkpoint holds
    verbose: int


class DataFrameEstimator(Estimator[M], EstimatorParams):
    """Feeds a DataFrame's rows to ranks, every row exactly once per epoch, and returns the model that they trained.

    A checkpoint is bytes here; each framework has its own content.
    """

    _prefix: ClassVar[str]  # of the names of runs that the user did not name

    @abstractmethod
    def _check(self) -> None:
        """Raise `ConfigError` for parameters that do not go together."""

    @abstractmethod
    def _read(self, checkpoint: bytes) -> tuple[int, int]:
        """Return how many epochs a checkpoint holds, and the run's seed."""

    @abstractmethod
    def _task(self, fit: Fit) -> Callable[[], bytes | None]:
        """Return what each rank runs; rank 0 returns the last checkpoint."""

    @abstractmethod
    def _model(self, fit: Fit, checkpoint: bytes) -> M:
        """Return the model in a checkpoint."""

    def _fit(self, dataset: DataFrame) -> M:
        self._check()
        validation = self.getValidation()
        feed = plan_feed(
            dataset.schema,
            features=self.getFeatureCols(),
            labels=self.getLabelCols(),
            validation=validation if isinstance(validation, str) else None,
        )
        fit, saved = self._settle(feed, validation)
        if saved is not None and fit.finished >= fit.epochs:
            log.info("%s: all %d epochs are finished already", fit.run_id, fit.epochs)
            return self._model(fit, saved)
        return self._model(fit, self._run(fit, dataset))

    def _settle(self, feed: Feed, validation: float | str | None) -> tuple[Fit, bytes | None]:
        store, asked_seed = self.getStore(), self.getRandomSeed()
        run_id = self.getRunId() or f"{self._prefix}_{int(time.time())}"
        saved = None if store is None else store.read(store.get_checkpoint_path(run_id))
        seed = secrets.randbits(31) if asked_seed is None else asked_seed
        finished = 0
        if saved is not None:
            finished, seed = self._read(saved)
            if asked_seed not in (None, seed):
                raise ConfigError("random_seed", f"is {asked_seed}, but {run_id} was started with {seed}")
        rows = RowsWanted(
            columns=feed.columns,
            validation=validation if isinstance(validation, float) else None,
            validation_col=feed.validation_col,
            batch_size=self.getBatchSize(),
            val_batch_size=self.getValBatchSize(),
            shuffle=self.getShuffle(),
        )
        fit = Fit(
            run_id=run_id,
            store=store,
            feed=feed,
            rows=rows,
            epochs=self.getEpochs(),
            seed=seed,
            finished=finished,
            verbose=self.getVerbose(),
        )
        return fit, saved

    def _run(self, fit: Fit, dataset: DataFrame) -> bytes:
        spark = dataset.sparkSession
        num_proc = self.getNumProc() or all_slots(spark, patience=Config.from_environment().start_timeout)
        task = self._task(fit)
        display = Display(f"{type(self).__name__} {fit.run_id}") if fit.verbose else None
        try:
            with display or nullcontext():
                values = run_barrier_job(
                    spark,
                    task,
                    num_proc=num_proc,
                    dataframe=fit.feed.frame(dataset, num_proc),
                    description=f"{type(self).__name__} {fit.run_id}: {num_proc} ranks",
                    verbosity="all" if fit.verbose > 1 else "log_callback_only",
                    on_message=display.hear if display is not None else None,
                    results="first",
                )
        except RankFailed as failure:
            # What is wrong with the rows or the settings is the caller's to mend, and says so without a rank.
            if isinstance(failure.__cause__, (DataError, ConfigError)):
                raise failure.__cause__ from None
            raise
        trained = values[0]
        assert trained is not None
        path = None if fit.store is None else fit.store.get_checkpoint_path(fit.run_id)
        if fit.store is not None and path is not None and fit.store.read(path) is None:
            log.warning("rank 0 wrote %s, which the driver does not see; use a store that all hosts share", path)
        return trained
