"""Base class of all estimators, which fit a model to rows on the ranks of a Spark barrier stage or of this machine."""

import json
import logging
import os
import secrets
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

from pyspark.ml import Estimator
from pyspark.ml.param import Param
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from farandole.cores import available_cores
from farandole.errors import ConfigError
from farandole.estimators.backend import Backend, SparkBackend
from farandole.estimators.feed import Feed, plan_feed, plan_transformed_feed, quoted
from farandole.estimators.folders import Folder, overwrite
from farandole.estimators.history import EpochLog
from farandole.estimators.local_rows import as_files, is_local
from farandole.estimators.params import EstimatorParams
from farandole.estimators.parquet_feed import StoredRows
from farandole.estimators.persistence import PARAMETERS, Facts, Saved, dumped_parameters, loaded_parameters
from farandole.estimators.run_lock import RunLock
from farandole.estimators.trainers.checkpoint import Checkpoint, last_checkpoint, restoring
from farandole.estimators.trainers.rows import RowsWanted
from farandole.estimators.trainers.run import RunPlan
from farandole.estimators.trainers.transformation import Transformation
from farandole.estimators.training_job import run_on_backend, run_training_job
from farandole.estimators.transformer import DataFrameModel
from farandole.launch.environment import without_torch
from farandole.spark.jobs.session import active_session
from farandole.spark.jobs.slots import all_slots
from farandole.spark.jobs.task_settings import TaskSettings
from farandole.spark.rows.column_names import check_names

log = logging.getLogger(__name__)

ParamMap: TypeAlias = dict[Param[Any], Any]
M = TypeVar("M", bound=DataFrameModel[Any])

_NO_TASKS = (
    "is for tasks of Spark; the ranks of a fit without Spark are processes of this machine, and those of a backend of "
    "your own are its processes: leave it out"
)


class DataFrameEstimator(Estimator[M], EstimatorParams, Saved):
    """Estimator that feeds a DataFrame's rows to ranks, each row exactly once per epoch, and returns the trained model.

    A subclass adds the parameters and the trainer of its framework. Ranks, rows, checkpoints, reports and saving are
    the same for all frameworks.
    """

    _kind: ClassVar[str]  # stored with each run: other kinds cannot read its state. Generated run ids begin with it

    @abstractmethod
    def _check(self) -> None:
        """Raise `ConfigError` for parameters that do not go together."""

    @abstractmethod
    def _task(self, plan: RunPlan) -> Callable[[], bytes | None]:
        """Return the function that each rank calls: `trainers.run.train` with the framework's trainer."""

    @abstractmethod
    def _trained(self, run_id: str, checkpoint: Checkpoint) -> M:
        """Return the model in a checkpoint."""

    def _environment(self) -> dict[str, str]:
        """Return the environment variables of the ranks."""
        # Frameworks use the GPUs that they see, so ranks on the CPU must see none.
        hidden = {} if self._wanted_gpu() is not False else {"CUDA_VISIBLE_DEVICES": ""}
        backend = self._spark_backend()
        return without_torch(hidden if backend is None else {**hidden, **backend.tasks().env})

    def _spark_backend(self) -> SparkBackend | None:
        backend = self.getBackend()
        return backend if isinstance(backend, SparkBackend) and backend.is_plain else None

    def _own_backend(self) -> Backend | None:
        """Return the backend if it runs the ranks by itself."""
        return None if self._spark_backend() is not None else self.getBackend()

    def _wanted_gpu(self) -> bool | None:
        """Return whether the ranks compute on GPUs; None: they do if every rank has one."""
        return self.getUseGpu()

    def _contents(self) -> tuple[dict[str, object], dict[str, bytes]]:
        return {}, {PARAMETERS: dumped_parameters(self)}

    @classmethod
    def _revived(cls, facts: Facts, folder: Folder) -> Self:
        estimator = cls()
        estimator._set(**loaded_parameters(folder.read(PARAMETERS)))
        return estimator

    def fit_on_parquet(self, params: ParamMap | None = None, dataset_idx: int | None = None) -> M:
        """Fit to the Parquet files in the store's folders `intermediate_train_data` and `intermediate_val_data`.

        `dataset_idx` selects numbered folders, such as `intermediate_train_data.0`. The second folder has the rows for
        validation and may be missing. Each rank reads its share of the files itself, from any URL that fsspec serves.
        Blocks until the ranks have ended. Raises `ConfigError` without a store or without training rows, `SourceError`
        for files that cannot be read, `DataError` for their columns, and the errors of `fit`."""
        if params:
            return self.copy(params).fit_on_parquet(dataset_idx=dataset_idx)
        store = self.getStore()
        if store is None:
            raise ConfigError("store", "is not set; fit_on_parquet reads the Parquet files in it")
        return self._fit_files(StoredRows.of_store(store, dataset_idx), active_session())

    def _fit_files(self, stored: StoredRows, spark: SparkSession | None) -> M:
        """Fit to the rows of files that the ranks read themselves."""
        self._tasks(spark=spark is not None)
        validation = stored.validation(self.getValidation())
        self._check()
        feed = self._feed(stored.schema(self._columns_to_read()), validation if isinstance(validation, str) else None)
        with self._planned_run(replace(feed, validation_col=stored.validation_name(feed)), validation) as (plan, saved):
            rows = replace(plan.rows, by_content=stored.by_content)
            planned = replace(plan, rows=rows, files=stored.planned(feed))
            return self._train_rest(planned, saved, spark, None)._trained_on(feed.schema)

    def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[ParamMap]) -> Iterator[tuple[int, M]]:
        """Return an iterator over (index, model) for the maps of parameters, as pyspark.ml does.

        Raises `ConfigError` if several fits would share a run id in the store: a fit would resume another one's run.
        Warns of values with which pyspark.ml cannot save the grid of a `CrossValidator`."""
        own = [given[self.run_id] for given in paramMaps if given.get(self.run_id) is not None]
        # Even a single map may stand for several fits: a CrossValidator calls this method for each fold.
        shared = self.getRunId() is not None and not all(self.run_id in given for given in paramMaps)
        if self.getStore() is not None and (shared or len(set(own)) < len(own)):
            raise ConfigError("run_id", "names one run, which each of several fits would resume; leave it out")
        _warn_of_unsaved(paramMaps)
        fits: Iterator[tuple[int, M]] = super().fitMultiple(dataset, paramMaps)
        return fits

    def _fit(self, dataset: Any) -> M:
        """Fit to a Spark DataFrame or, without Spark, to rows of a type that `local_rows` accepts."""
        if not isinstance(dataset, DataFrame):
            return self._fit_without_spark(dataset)
        self._tasks(spark=True)
        self._check()
        validation = self.getValidation()
        feed = self._feed(dataset.schema, validation if isinstance(validation, str) else None)
        check_names(dataset, [*feed.columns, *([validation] if isinstance(validation, str) else ())])
        if self._own_backend() is not None:
            return self._fit_written(dataset)
        with self._planned_run(feed, validation) as (plan, saved):
            model = self._train_rest(plan, saved, dataset.sparkSession, lambda ranks: feed.frame(dataset, ranks))
            return model._trained_on(feed.schema)

    def _fit_written(self, dataset: DataFrame) -> M:
        """Fit on the ranks of a user's backend, for which Spark writes the rows to the store."""
        store, validation = self.getStore(), self.getValidation()
        if store is None:
            raise ConfigError("store", "is not set; the ranks of a backend of your own read the rows from it")
        needed = dict.fromkeys([*self._columns_to_read(), *([validation] if isinstance(validation, str) else ())])
        url = store.url(f"{store.get_train_data_path()}.{secrets.token_hex(8)}")
        spark = dataset.sparkSession
        try:
            dataset.select(*[quoted(name) for name in needed if name in dataset.columns]).write.parquet(url)
            return self._fit_files(StoredRows(url, None, store.storage_options, by_content=True), spark)
        finally:
            overwrite(spark, url)

    def _fit_without_spark(self, dataset: object) -> M:
        if not is_local(dataset):
            raise TypeError(
                "fit takes a Spark DataFrame, a pandas DataFrame, an Arrow table, or the path or URL of Parquet files, "
                f"got {type(dataset).__name__}"
            )
        self._tasks(spark=False)
        store, validation = self.getStore(), self.getValidation()
        needed = [*self._columns_to_read(), *([validation] if isinstance(validation, str) else ())]
        with as_files(dataset, needed) as url:
            options = {} if store is None else store.storage_options
            # Rows in memory are shared out by content, as a Spark DataFrame's; files by row groups, as a store's.
            is_path = isinstance(dataset, (str, os.PathLike))
            return self._fit_files(StoredRows(url, None, options, by_content=not is_path), None)

    def _train_rest(
        self,
        plan: RunPlan,
        saved: Checkpoint | None,
        spark: SparkSession | None,
        frame: Callable[[int], DataFrame] | None,
    ) -> M:
        """Train the remaining epochs; return the model. `frame` returns the rows for a number of ranks; None: files."""
        if saved is not None and (saved.epoch >= plan.epochs or saved.stopped):
            how = "a callback stopped the run" if saved.stopped else "all of them are finished"
            remedy = "set a new run_id" if saved.stopped else "raise epochs, or set a new run_id,"
            log.warning(
                "%s: no epoch is left after %d, as %s; the model has the stored weights: %s to train",
                plan.run_id, saved.epoch, how, remedy,
            )  # fmt: skip
            return self._trained(plan.run_id, saved)
        return self._trained(plan.run_id, self._run(plan, spark, frame))

    def _feed(self, schema: StructType, validation: str | None) -> Feed:
        compressed, weight = self.getCompressSparseCols(), self.getSampleWeightCol()
        features, labels = self.getFeatureCols(), self.getLabelCols()
        if self.getTransformationFn() is None:
            return plan_feed(
                schema, features=features, labels=labels, weight=weight, validation=validation, compressed=compressed
            )
        return plan_transformed_feed(
            schema,
            wanted=self._batch_columns(),
            edited=[str(each[0]) for each in self.getTransformationEditFields() or ()],
            removed=self.getTransformationRemovedFields() or [],
            validation=validation,
            compressed=compressed,
        )

    def _batch_columns(self) -> tuple[str, ...]:
        """Return the columns of a batch."""
        weight = self.getSampleWeightCol()
        return tuple(dict.fromkeys([*self.getFeatureCols(), *self.getLabelCols(), *([weight] if weight else [])]))

    def _columns_to_read(self) -> tuple[str, ...]:
        """Return the columns to read. The data may lack those that `transformation_fn` adds."""
        return (*self._batch_columns(), *(self.getTransformationRemovedFields() or ()))

    def _transformation(self, feed: Feed) -> Transformation | None:
        function = self.getTransformationFn()
        if function is None:
            return None
        return Transformation(
            function=function,
            edit_fields=tuple(self.getTransformationEditFields() or ()),
            removed_fields=tuple(self.getTransformationRemovedFields() or ()),
            fed=feed.columns,
            weight=self.getSampleWeightCol(),
        )

    @contextmanager
    def _planned_run(self, feed: Feed, validation: float | str | None) -> Iterator[tuple[RunPlan, Checkpoint | None]]:
        """Lock the run in the store; yield its plan, and its checkpoint, None if there is none.

        Raises `ConfigError` if another fit of this run is going on, if the run is of another kind of estimator or has
        another seed, and `SourceError` for damaged checkpoints."""
        store = self.getStore()
        # The random part separates fits that start in the same second, as in a grid of parameters.
        run_id = self.getRunId() or f"{self._kind}_{int(time.time())}_{secrets.token_hex(3)}"
        with nullcontext("") if store is None else RunLock(store, store.get_run_path(run_id)) as owner:
            plan, saved = self._plan_run(feed, validation, run_id)
            yield replace(plan, owner=owner), saved

    def _plan_run(self, feed: Feed, validation: float | str | None, run_id: str) -> tuple[RunPlan, Checkpoint | None]:
        store, asked_seed, shapes = self.getStore(), self.getRandomSeed(), self.getLabelShapes()
        saved = None if store is None else last_checkpoint(store, run_id, log.warning)
        seed = secrets.randbits(31) if asked_seed is None else asked_seed
        if saved is not None:
            if saved.kind not in ("", self._kind):
                raise ConfigError("run_id", f"{run_id!r} is a run of a {saved.kind} estimator; choose another name")
            with restoring(store, run_id):
                self._trained(run_id, saved)  # before any rank starts
            seed = saved.seed
            if asked_seed not in (None, seed):
                raise ConfigError("random_seed", f"is {asked_seed}, but {run_id} was started with {seed}")
        rows = RowsWanted(
            columns=self._batch_columns(),
            validation=validation if isinstance(validation, float) else None,
            validation_col=feed.validation_col,
            batch_size=self.getBatchSize(),
            val_batch_size=self.getValBatchSize(),
            shuffle=self.getShuffle(),
            transformation=self._transformation(feed),
            keep=self.getInMemoryCacheAll(),
            by_content=True,
        )
        plan = RunPlan(
            run_id=run_id,
            store=store,
            rows=rows,
            label_cols=tuple(self.getLabelCols()),
            epochs=self.getEpochs(),
            train_steps=self.getTrainStepsPerEpoch(),
            validation_steps=self.getValidationStepsPerEpoch(),
            start=Checkpoint(kind=self._kind, epoch=0 if saved is None else saved.epoch, seed=seed),
            verbose=self.getVerbose(),
            use_gpu=self._wanted_gpu(),
            weight_col=self.getSampleWeightCol(),
            label_shapes=None if shapes is None else tuple(shapes),
            compression=self.getGradientCompression(),
            passes=self.getBackwardPassesPerStep(),
            data_module=self._batch_maker(),
        )
        return plan, saved

    def _tasks(self, *, spark: bool) -> TaskSettings:
        """Return the settings of the Spark tasks from the parameters and the backend.

        Raises `ConfigError` for a setting that both contain and, without Spark, for a setting that needs its tasks."""
        backend, profile, ranks = self._spark_backend(), self.getResourceProfile(), self.getRanksPerTask()
        spark = spark and self._own_backend() is None
        given = TaskSettings() if backend is None else backend.tasks()
        twice = {
            "resource_profile": profile is not None and given.profile is not None,
            "ranks_per_task": ranks != 1 and given.ranks_per_task != 1,
        }
        settled = replace(given, profile=profile or given.profile, ranks_per_task=max(ranks, given.ranks_per_task))
        needs_spark = {
            "resource_profile": settled.profile is not None,
            "ranks_per_task": settled.ranks_per_task != 1,
        }
        for name in twice:
            if twice[name]:
                raise ConfigError(name, "is set, and given to the backend as well; set one of them")
            if needs_spark[name] and not spark:
                raise ConfigError(name, _NO_TASKS)
        return settled

    def _ranks(self, spark: SparkSession | None, tasks: TaskSettings) -> int:
        backend = self.getBackend()
        if backend is not None:
            return backend.num_processes()
        if spark is None:
            return self.getNumProc() or available_cores()
        return self.getNumProc() or all_slots(
            spark, patience=tasks.patience, profile=tasks.profile, ranks_per_task=tasks.ranks_per_task
        )

    def _run(self, plan: RunPlan, spark: SparkSession | None, frame: Callable[[int], DataFrame] | None) -> Checkpoint:
        tasks = self._tasks(spark=spark is not None)
        ranks = self._ranks(spark, tasks)
        backend, task, env = self._own_backend(), self._task(plan), self._environment()
        with EpochLog(self.getLoggers()) as epochs:
            if backend is not None:
                trained = run_on_backend(backend, task, env)
            else:
                trained = run_training_job(
                    spark,
                    task,
                    dataframe=None if frame is None else frame(ranks),
                    name=f"{type(self).__name__} {plan.run_id}",
                    num_proc=ranks,
                    verbose=plan.verbose,
                    env=env,
                    max_attempts=self.getMaxAttempts(),
                    tasks=tasks,
                    on_epoch=epochs.add,
                )
            checkpoint = Checkpoint.load(trained)
            for record in checkpoint.history[plan.start.epoch :]:
                epochs.add(record)  # an epoch whose message was dropped; `add` ignores the others
        path = None if plan.store is None else plan.store.get_checkpoint_path(plan.run_id)
        if plan.store is not None and path is not None and not plan.store.exists(path):
            log.warning("rank 0 wrote %s, which the driver does not see; use a store that all hosts share", path)
        return checkpoint


def _warn_of_unsaved(maps: Sequence[ParamMap]) -> None:
    """Warn of parameters whose values JSON does not hold, before the fits: pyspark.ml writes a grid as JSON."""
    unsaved: set[str] = set()
    for param, value in (item for each in maps for item in each.items()):
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            unsaved.add(param.name)
    if unsaved:
        text = (
            f"a CrossValidator or TrainValidationSplit with this grid can be fitted, but not saved: JSON does not hold "
            f"the values of {', '.join(sorted(unsaved))}; save the bestModel of the fitted one"
        )
        warnings.warn(text, stacklevel=3)  # shown once, though a CrossValidator fits the grid for each fold
