"""Model functions of TensorFlow on Spark DataFrames: `HorovodEstimator(...).fit(df)` returns a `TFTransformer`."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

from farandole.errors import ConfigError
from farandole.extras import importing
from farandole.masking import mask

with importing("farandole.spark.tensorflow"):
    from pyspark.ml import Estimator
    from pyspark.ml.param import Param
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame

    from farandole.estimators import checks
    from farandole.estimators.checked_params import CheckedParams, Parameter, optional, required
    from farandole.estimators.feed import plan_feed
    from farandole.estimators.folders import Folder
    from farandole.estimators.params import EstimatorParams
    from farandole.estimators.persistence import PARAMETERS, Facts, Saved, dumped_parameters, loaded_parameters
    from farandole.estimators.run_lock import RunLock
    from farandole.estimators.store import FilesystemStore, Store
    from farandole.estimators.tf_transformer import TFInputGraph, TFTransformer
    from farandole.estimators.trainers.keras.model import DumpedModel, choose_backend
    from farandole.estimators.trainers.model_fn.folder import local_path
    from farandole.estimators.trainers.model_fn.frozen_graph import FrozenGraph
    from farandole.estimators.trainers.model_fn.job import ModelFnJob
    from farandole.estimators.trainers.model_fn.loop import train
    from farandole.estimators.trainers.rows import RowsWanted
    from farandole.estimators.training_job import run_training_job
    from farandole.spark.jobs.slots import all_slots
    from farandole.spark.jobs.task_settings import TaskSettings
    from farandole.spark.rows.column_names import check_names

__all__ = ["HorovodEstimator", "TFInputGraph", "TFTransformer"]


def _is_model(value: object) -> bool:
    # Keras is not imported for this check: if it is not loaded, no object is a Keras model.
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(value, keras.Model)


def _features(value: object) -> dict[str, str]:
    given = checks.mapping(value)
    keys = [each for each in given.values() if isinstance(each, str)]
    if not given or len(set(keys)) < len(given):
        raise checks.Refused(f"must map columns to distinct keys of features, got {value!r}")
    return dict(zip(given, keys, strict=True))


def _folder(value: object) -> str:
    given = checks.text(value)
    # Names of folders may hold "@" and ":". The scheme may be a chain, as "simplecache::sftp".
    url = urlsplit("" if given.startswith("file:") else f"//{given.partition('://')[2]}")
    if url.password is not None or mask(f"?{url.query}") != f"?{url.query}":
        raise checks.Refused(f"{mask(given)!r} holds credentials; give them by the environment instead")
    store = FilesystemStore(given)
    # Ranks have other working directories. The URL of a remote folder stays whole: it names host and account.
    return local_path(store) if store.is_local else given


def _seconds(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise checks.Refused(f"must be a number of seconds > 0, got {value!r}")
    return float(value)


# Names of a training job's settings -> this estimator's names.
_OWN_NAMES = {
    "num_proc": "numProc",
    "ranks_per_task": "ranksPerTask",
    "resource_profile": "resourceProfile",
    "run_id": "modelDir",
}


class HorovodEstimator(Estimator["TFTransformer"], CheckedParams, Saved):
    """Trains a model function of TensorFlow 1 on a DataFrame's rows, up to step `maxSteps` of the run in `modelDir`.

    `modelFn(features, labels, mode, params[, config])` returns a `farandole.tensorflow.estimator.EstimatorSpec`, and
    wraps its optimizer in `hvd.DistributedOptimizer`. `modelFn` may also be a compiled Keras model, or a function
    `modelFn(params)` that returns one. A step takes `batchSize` rows of each rank. Rows whose `isValidationCol` is true
    are for the evaluation of each checkpoint, not for training. `fit` continues after the last checkpoint in
    `modelDir`; it trains nothing if that has `maxSteps` steps.
    """

    modelFn: Parameter[Callable[..., object], Callable[..., object]] = Parameter(
        "function of (features, labels, mode, params[, config])",
        checks.function("a function of (features, labels, mode, params) or a keras.Model"),  # which is callable, too
    )
    setModelFn, getModelFn = required(modelFn)

    featureMapping: Parameter[Mapping[str, str], dict[str, str]] = Parameter("column -> key in features", _features)
    setFeatureMapping, getFeatureMapping = required(featureMapping)

    modelDir: Parameter[str, str] = Parameter("folder or URL of checkpoints, event files and exports", _folder)
    setModelDir, getModelDir = required(modelDir)

    labelCol: Parameter[str, str] = Parameter("column of labels", checks.text)
    setLabelCol, getLabelCol = required(labelCol)

    batchSize: Parameter[int, int] = Parameter("rows per step and rank", checks.at_least(1), default=32)
    setBatchSize, getBatchSize = required(batchSize)

    maxSteps: Parameter[int, int] = Parameter("steps of all fits together", checks.at_least(1))
    setMaxSteps, getMaxSteps = required(maxSteps)

    isValidationCol: Parameter[str, str] = Parameter("boolean column; its true rows validate", checks.text)
    setIsValidationCol, getIsValidationCol = optional(isValidationCol)

    modelFnParams: Parameter[Mapping[str, object], dict[str, object]] = Parameter(
        "argument params of the model function", checks.mapping, default={}
    )
    setModelFnParams, getModelFnParams = required(modelFnParams)

    saveCheckpointsSecs: Parameter[float, float] = Parameter("seconds between checkpoints", _seconds, default=600.0)
    setSaveCheckpointsSecs, getSaveCheckpointsSecs = required(saveCheckpointsSecs)

    numProc: Parameter[int, int] = Parameter("number of ranks; default: one per slot of Spark", checks.at_least(1))
    setNumProc, getNumProc = optional(numProc)

    seed: Parameter[int, int] = Parameter(
        "seed of the order of rows and of TensorFlow's operations", checks.at_least(0), default=0
    )
    setSeed, getSeed = required(seed)

    maxAttempts: Parameter[int, int] = Parameter(EstimatorParams.max_attempts.doc, checks.at_least(1), default=4)
    setMaxAttempts, getMaxAttempts = required(maxAttempts)

    ranksPerTask: Parameter[int, int] = Parameter(EstimatorParams.ranks_per_task.doc, checks.at_least(1), default=1)
    setRanksPerTask, getRanksPerTask = required(ranksPerTask)

    resourceProfile: Parameter[ResourceProfile, ResourceProfile] = Parameter(
        EstimatorParams.resource_profile.doc, checks.profile
    )
    setResourceProfile, getResourceProfile = optional(resourceProfile)

    verbose: Parameter[int, int] = Parameter(EstimatorParams.verbose.doc, checks.verbose, default=1)
    setVerbose, getVerbose = required(verbose)

    def _contents(self) -> tuple[dict[str, object], dict[str, bytes]]:
        given = self._value(self.modelFn)
        if not _is_model(given):
            return {}, {PARAMETERS: dumped_parameters(self)}
        # Keras' own pickles can be read only where custom classes are registered.
        plain = self.copy({self.modelFn: DumpedModel.of(given).load})
        return {"keras": True}, {PARAMETERS: dumped_parameters(plain)}

    @classmethod
    def _revived(cls, facts: Facts, folder: Folder) -> Self:
        if facts.get("keras"):
            choose_backend("tensorflow")
        values = loaded_parameters(folder.read(PARAMETERS))
        if facts.get("keras"):
            values["modelFn"] = values["modelFn"]()  # type: ignore[operator]
        return cls()._set(**values)

    def _task(self, job: ModelFnJob) -> Callable[[], FrozenGraph | None]:
        """Return the function that each rank calls."""
        return functools.partial(train, job)

    def fitMultiple(
        self, dataset: DataFrame, paramMaps: Sequence[Mapping[Param[Any], Any]]
    ) -> Iterator[tuple[int, "TFTransformer"]]:
        """Return an iterator over (index, model) for the maps of parameters, as pyspark.ml does.

        Raises `ConfigError` unless each map has a `modelDir` of its own: a fit would resume another one's run."""
        own = {given.get(self.modelDir) for given in paramMaps}
        if None in own or len(own) < len(paramMaps):
            raise ConfigError(
                "modelDir", "holds one run, which each of several fits would resume; give each a modelDir of its own"
            )
        fits: Iterator[tuple[int, TFTransformer]] = super().fitMultiple(dataset, paramMaps)  # type: ignore[arg-type]
        return fits

    def _fit(self, dataset: DataFrame) -> TFTransformer:
        store = Store.create(self.getModelDir())
        try:
            with RunLock(store, store.root) as owner:
                return self._trained(dataset, store, owner)
        except ConfigError as error:
            if error.setting in _OWN_NAMES:
                raise ConfigError(_OWN_NAMES[error.setting], error.problem) from error
            raise

    def _trained(self, dataset: DataFrame, store: FilesystemStore, owner: str) -> TFTransformer:
        features, label = self.getFeatureMapping(), self.getLabelCol()
        validation = self.getIsValidationCol()
        feed = plan_feed(dataset.schema, features=list(features), labels=[label], validation=validation, texts=True)
        check_names(dataset, [*feed.columns, *([] if validation is None else [validation])])
        rows = RowsWanted(
            columns=feed.columns,
            validation=None,
            validation_col=feed.validation_col,
            batch_size=self.getBatchSize(),
            val_batch_size=self.getBatchSize(),
            shuffle=True,
            by_content=True,
        )
        job = ModelFnJob(
            model_fn=DumpedModel.of(self.getModelFn()) if _is_model(self.getModelFn()) else self.getModelFn(),
            params=self.getModelFnParams(),
            features=features,
            label_col=label,
            rows=rows,
            store=store,
            owner=owner,
            model_dir=self.getModelDir(),
            max_steps=self.getMaxSteps(),
            save_secs=self.getSaveCheckpointsSecs(),
            seed=self.getSeed(),
            verbose=self.getVerbose(),
        )
        spark = dataset.sparkSession
        tasks = TaskSettings(profile=self.getResourceProfile(), ranks_per_task=self.getRanksPerTask())
        ranks = self.getNumProc() or all_slots(
            spark, patience=tasks.patience, profile=tasks.profile, ranks_per_task=tasks.ranks_per_task
        )
        frozen = run_training_job(
            spark,
            self._task(job),
            dataframe=feed.frame(dataset, ranks),
            name=f"HorovodEstimator {self.getModelDir()}",
            num_proc=ranks,
            verbose=job.verbose,
            env={"KERAS_BACKEND": "tensorflow"},
            max_attempts=self.getMaxAttempts(),
            tasks=tasks,
            shows_epochs=False,  # its "epoch" messages report checkpoints, which count as progress
        )
        by_key = {key: column for column, key in features.items()}
        return TFTransformer(
            tfInputGraph=TFInputGraph(frozen),
            inputMapping={by_key[key]: port.tensor for key, port in frozen.inputs.items()},
            outputMapping={port.tensor: key for key, port in frozen.outputs.items()},
        )
