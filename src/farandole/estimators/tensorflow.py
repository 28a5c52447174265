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
    from farandole.estimators.feed import plan_feed
    from farandole.estimators.folders import Folder
    from farandole.estimators.foreign import refuse_unknown
    from farandole.estimators.params import CheckedParams, param
    from farandole.estimators.persistence import PARAMETERS, Saved, dumped_parameters, loaded_parameters
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

__all__ = ["HorovodEstimator", "TFInputGraph", "TFTransformer"]


def _function(value: object) -> Any:
    if not callable(value):  # a Keras model is callable, too
        raise ConfigError(
            "modelFn", f"must be a function of (features, labels, mode, params) or a keras.Model, got {value!r}"
        )
    return value


def _is_model(value: object) -> bool:
    # Keras is not imported for this check: if it is not loaded, no object is a Keras model.
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(value, keras.Model)


def _features(value: object) -> dict[str, str]:
    given = checks.mapping("featureMapping")(value)
    keys = list(given.values())
    if not given or not all(isinstance(each, str) for each in keys) or len(set(keys)) < len(keys):
        raise ConfigError("featureMapping", f"must map columns to distinct keys of features, got {value!r}")
    return given


def _folder(value: object) -> str:
    given = checks.text("modelDir")(value)
    # Names of folders may hold "@" and ":". The scheme may be a chain, as "simplecache::sftp".
    url = urlsplit("" if given.startswith("file:") else f"//{given.partition('://')[2]}")
    if url.password is not None or mask(f"?{url.query}") != f"?{url.query}":
        raise ConfigError("modelDir", f"{mask(given)!r} holds credentials; give them by the environment instead")
    store = FilesystemStore(given)
    # Ranks have other working directories. The URL of a remote folder stays whole: it names host and account.
    return local_path(store) if store.is_local else given


def _seconds(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise ConfigError("saveCheckpointsSecs", f"must be a number of seconds > 0, got {value!r}")
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

    modelFn = param("modelFn", "function of (features, labels, mode, params[, config])", _function)
    featureMapping = param("featureMapping", "column -> key in features", _features)
    modelDir = param("modelDir", "folder or URL of checkpoints, event files and exports", _folder)
    labelCol = param("labelCol", "column of labels", checks.text("labelCol"))
    batchSize = param("batchSize", "rows per step and rank", checks.at_least("batchSize", 1))
    maxSteps = param("maxSteps", "steps of all fits together", checks.at_least("maxSteps", 1))
    isValidationCol = param("isValidationCol", "boolean column; its true rows validate", checks.text("isValidationCol"))
    modelFnParams = param("modelFnParams", "argument params of the model function", checks.mapping("modelFnParams"))
    saveCheckpointsSecs = param("saveCheckpointsSecs", "seconds between checkpoints; default: 600", _seconds)
    numProc = param("numProc", "number of ranks; default: one per slot of Spark", checks.at_least("numProc", 1))
    seed = param(
        "seed", "seed of the order of rows and of TensorFlow's operations; default: 0", checks.at_least("seed", 0)
    )
    maxAttempts = param(
        "maxAttempts",
        "attempts of one fit, the first one included; 1: the first failure ends it",
        checks.at_least("maxAttempts", 1),
    )
    ranksPerTask = param(
        "ranksPerTask",
        "ranks of each Spark task; they divide its GPUs among themselves",
        checks.at_least("ranksPerTask", 1),
    )
    resourceProfile = param(
        "resourceProfile",
        "resources of each task; default: those of Spark's configuration",
        checks.profile("resourceProfile"),
    )
    verbose = param("verbose", "0 quiet, 1 progress, 2 all output of the ranks as well", checks.verbose)

    def __init__(
        self,
        *,
        modelFn: Callable[..., Any] | None = None,
        featureMapping: Mapping[str, str] | None = None,
        modelDir: str | None = None,
        labelCol: str | None = None,
        batchSize: int = 32,
        maxSteps: int | None = None,
        isValidationCol: str | None = None,
        modelFnParams: Mapping[str, Any] | None = None,
        saveCheckpointsSecs: float | None = None,
        numProc: int | None = None,
        seed: int | None = None,
        maxAttempts: int | None = None,
        ranksPerTask: int | None = None,
        resourceProfile: ResourceProfile | None = None,
        verbose: int | None = None,
        **others: object,
    ) -> None:
        """Set parameters by name; raises `ConfigError` for unknown names."""
        given = {name: value for name, value in locals().items() if name not in ("self", "others", "__class__")}
        super().__init__()
        self._setDefault(batchSize=32, modelFnParams={}, saveCheckpointsSecs=600.0, seed=0, maxAttempts=4, verbose=1)
        self._setDefault(ranksPerTask=1)
        self._set(**{name: value for name, value in given.items() if value is not None})
        refuse_unknown({name for name, value in others.items() if value is not None}, given)

    def setModelFn(self, value: Callable[..., Any]) -> Self:
        return self._set(modelFn=value)

    def getModelFn(self) -> Callable[..., Any]:
        given: Callable[..., Any] = self._required(self.modelFn)
        return given

    def setFeatureMapping(self, value: Mapping[str, str]) -> Self:
        return self._set(featureMapping=value)

    def getFeatureMapping(self) -> dict[str, str]:
        return self._required(self.featureMapping)

    def setModelDir(self, value: str) -> Self:
        return self._set(modelDir=value)

    def getModelDir(self) -> str:
        return self._required(self.modelDir)

    def setLabelCol(self, value: str) -> Self:
        return self._set(labelCol=value)

    def getLabelCol(self) -> str:
        return self._required(self.labelCol)

    def setBatchSize(self, value: int) -> Self:
        return self._set(batchSize=value)

    def getBatchSize(self) -> int:
        return self._required(self.batchSize)

    def setMaxSteps(self, value: int) -> Self:
        return self._set(maxSteps=value)

    def getMaxSteps(self) -> int:
        return self._required(self.maxSteps)

    def setIsValidationCol(self, value: str | None) -> Self:
        return self._set(isValidationCol=value)

    def getIsValidationCol(self) -> str | None:
        return self._value(self.isValidationCol)

    def setModelFnParams(self, value: Mapping[str, Any]) -> Self:
        return self._set(modelFnParams=value)

    def getModelFnParams(self) -> dict[str, Any]:
        return self._required(self.modelFnParams)

    def setSaveCheckpointsSecs(self, value: float) -> Self:
        return self._set(saveCheckpointsSecs=value)

    def getSaveCheckpointsSecs(self) -> float:
        return self._required(self.saveCheckpointsSecs)

    def setNumProc(self, value: int | None) -> Self:
        return self._set(numProc=value)

    def getNumProc(self) -> int | None:
        return self._value(self.numProc)

    def setSeed(self, value: int) -> Self:
        return self._set(seed=value)

    def getSeed(self) -> int:
        return self._required(self.seed)

    def setMaxAttempts(self, value: int) -> Self:
        return self._set(maxAttempts=value)

    def getMaxAttempts(self) -> int:
        return self._required(self.maxAttempts)

    def setRanksPerTask(self, value: int) -> Self:
        return self._set(ranksPerTask=value)

    def getRanksPerTask(self) -> int:
        return self._required(self.ranksPerTask)

    def setResourceProfile(self, value: ResourceProfile | None) -> Self:
        return self._set(resourceProfile=value)

    def getResourceProfile(self) -> ResourceProfile | None:
        return self._value(self.resourceProfile)

    def setVerbose(self, value: int) -> Self:
        return self._set(verbose=value)

    def getVerbose(self) -> int:
        return self._required(self.verbose)

    def _contents(self) -> tuple[dict[str, object], dict[str, bytes]]:
        given = self._value(self.modelFn)
        if not _is_model(given):
            return {}, {PARAMETERS: dumped_parameters(self)}
        # Keras' own pickles can be read only where custom classes are registered.
        plain = self.copy({self.modelFn: DumpedModel.of(given).load})
        return {"keras": True}, {PARAMETERS: dumped_parameters(plain)}

    @classmethod
    def _revived(cls, facts: Mapping[str, Any], folder: Folder) -> Self:
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
        feed = plan_feed(dataset.schema, features=list(features), labels=[label], validation=self.getIsValidationCol())
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
