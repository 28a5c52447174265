"""The parameters that all estimators share: names and defaults that Horovod's users know, checked when they are set."""

from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from pyspark.ml.param import Param, Params
from pyspark.resource import ResourceProfile

from farandole.errors import ConfigError
from farandole.spark import checks
from farandole.spark.backend import SparkBackend
from farandole.spark.data_module import PetastormDataModule
from farandole.spark.foreign import ForeignParams
from farandole.spark.history import EpochLogger
from farandole.spark.store import FilesystemStore

T = TypeVar("T")


def param(name: str, doc: str, check: Callable[[object], T]) -> "Param[T]":
    """Return a parameter whose values `check` makes right, or refuses with `ConfigError`."""
    return Param(Params._dummy(), name, doc, typeConverter=check)


class CheckedParams(Params):
    """Parameters that are read with a check of their values, also of those that `fit` is given."""

    def _value(self, param: "Param[T]") -> T | None:
        # Values given to fit(df, {param: value}) come past the setters, so they are checked here.
        if not self.isDefined(param):
            return None
        value = self.getOrDefault(param)
        return None if value is None else param.typeConverter(value)

    def _required(self, param: "Param[T]") -> T:
        value = self._value(param)
        if value is None:
            raise ConfigError(param.name, f"is not set: {param.doc}")
        return value


class EstimatorParams(ForeignParams, CheckedParams):
    """Parameters of an estimator; `set...` and `get...` for each parameter, as pyspark.ml does it.

    Setters raise `ConfigError` for values that cannot be right.
    """

    num_proc = param("num_proc", "ranks; by default as many as Spark has slots", checks.at_least("num_proc", 1))
    backend = param("backend", "SparkBackend with the number of ranks, in place of num_proc", checks.backend)
    feature_cols = param(
        "feature_cols", "columns that the model takes, one input each", checks.names_of_columns("feature_cols")
    )
    label_cols = param(
        "label_cols", "columns that the loss compares outputs with", checks.names_of_columns("label_cols")
    )
    sample_weight_col = param(
        "sample_weight_col", "column of numbers by which rows' losses count", checks.text("sample_weight_col")
    )
    label_shapes = param(
        "label_shapes", "shape of each label, -1 first; its output's", checks.shapes("label_shapes", "label column")
    )
    loss_weights = param("loss_weights", "share of each label's loss; equal shares", checks.weights)
    validation = param("validation", "fraction of rows, or column whose true rows validate", checks.validation)
    batch_size = param("batch_size", "rows per step and rank", checks.at_least("batch_size", 1))
    val_batch_size = param("val_batch_size", "the same in validation; batch_size", checks.at_least("val_batch_size", 1))
    epochs = param(
        "epochs", "how often every row is learned, all fits of the run together", checks.at_least("epochs", 1)
    )
    train_steps_per_epoch = param(
        "train_steps_per_epoch", "steps of an epoch; every row once", checks.at_least("train_steps_per_epoch", 1)
    )
    validation_steps_per_epoch = param(
        "validation_steps_per_epoch", "the same in validation", checks.at_least("validation_steps_per_epoch", 1)
    )
    backward_passes_per_step = param(
        "backward_passes_per_step",
        "batches whose gradients are averaged before a step",
        checks.at_least("backward_passes_per_step", 1),
    )
    gradient_compression = param(
        "gradient_compression", "Compression of the binding, for gradients that travel", lambda value: value
    )
    transformation_fn = param(
        "transformation_fn", "function of a row, a dict, that returns one; on the ranks", checks.transformation
    )
    transformation_edit_fields = param(
        "transformation_edit_fields",
        "(name, type, shape, nullable) of columns that transformation_fn changes or adds",
        checks.edit_fields,
    )
    transformation_removed_fields = param(
        "transformation_removed_fields",
        "further columns that transformation_fn takes, and that end there",
        checks.names_of_columns("transformation_removed_fields"),
    )
    inmemory_cache_all = param(
        "inmemory_cache_all",
        "hold a rank's rows in memory, after transformation_fn",
        checks.flag("inmemory_cache_all"),
    )
    compress_sparse_cols = param(
        "compress_sparse_cols", "vectors stay sparse on disk and in transit", checks.flag("compress_sparse_cols")
    )
    data_module = param("data_module", "subclass of DataModule, which makes each rank's batches", checks.data_module)
    use_gpu = param(
        "use_gpu",
        "True: each rank computes on a GPU of its own, or fit fails; False: none does; on GPUs if every rank has one",
        checks.flag("use_gpu"),
    )
    shuffle = param("shuffle", "another order of a rank's rows in each epoch", checks.flag("shuffle"))
    random_seed = param("random_seed", "of orders, split and ranks; random", checks.at_least("random_seed", 0))
    store = param("store", "where checkpoints and logs are kept; nowhere", checks.store)
    run_id = param("run_id", "name of the run in the store; fitting again resumes it", checks.text("run_id"))
    max_attempts = param(
        "max_attempts",
        "times that Spark runs the ranks in one fit; 1: the first failure ends it",
        checks.at_least("max_attempts", 1),
    )
    ranks_per_task = param(
        "ranks_per_task", "ranks of each Spark task, which divide its GPUs", checks.at_least("ranks_per_task", 1)
    )
    resource_profile = param(
        "resource_profile", "needs of each task; those of the configuration", checks.profile("resource_profile")
    )
    loggers = param("loggers", "objects whose log_epoch the driver calls with the values of each epoch", checks.loggers)
    verbose = param("verbose", "0 quiet, 1 progress, 2 all output of the ranks as well", checks.verbose)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(batch_size=32, epochs=1, backward_passes_per_step=1, shuffle=True, verbose=1, max_attempts=4)
        self._setDefault(inmemory_cache_all=False, compress_sparse_cols=False, use_gpu=True, ranks_per_task=1)

    def setNumProc(self, value: int | None) -> Self:
        return self._set(num_proc=value)

    def getNumProc(self) -> int | None:
        return self._value(self.num_proc)

    def setFeatureCols(self, value: Sequence[str]) -> Self:
        return self._set(feature_cols=value)

    def getFeatureCols(self) -> list[str]:
        return self._required(self.feature_cols)

    def setLabelCols(self, value: Sequence[str]) -> Self:
        return self._set(label_cols=value)

    def getLabelCols(self) -> list[str]:
        return self._required(self.label_cols)

    def setValidation(self, value: float | str | None) -> Self:
        return self._set(validation=value)

    def getValidation(self) -> float | str | None:
        return self._value(self.validation)

    def setBatchSize(self, value: int) -> Self:
        return self._set(batch_size=value)

    def getBatchSize(self) -> int:
        return self._required(self.batch_size)

    def setValBatchSize(self, value: int | None) -> Self:
        return self._set(val_batch_size=value)

    def getValBatchSize(self) -> int:
        return self._value(self.val_batch_size) or self.getBatchSize()

    def setEpochs(self, value: int) -> Self:
        return self._set(epochs=value)

    def getEpochs(self) -> int:
        return self._required(self.epochs)

    def setBackend(self, value: SparkBackend | None) -> Self:
        return self._set(backend=value)

    def getBackend(self) -> SparkBackend | None:
        return self._value(self.backend)

    def setSampleWeightCol(self, value: str | None) -> Self:
        return self._set(sample_weight_col=value)

    def getSampleWeightCol(self) -> str | None:
        return self._value(self.sample_weight_col)

    def setLabelShapes(self, value: Sequence[Sequence[int]] | None) -> Self:
        return self._set(label_shapes=value)

    def getLabelShapes(self) -> list[tuple[int, ...]] | None:
        return self._value(self.label_shapes)

    def setLossWeights(self, value: Sequence[float] | None) -> Self:
        return self._set(loss_weights=value)

    def getLossWeights(self) -> list[float] | None:
        return self._value(self.loss_weights)

    def setTrainStepsPerEpoch(self, value: int | None) -> Self:
        return self._set(train_steps_per_epoch=value)

    def getTrainStepsPerEpoch(self) -> int | None:
        return self._value(self.train_steps_per_epoch)

    def setValidationStepsPerEpoch(self, value: int | None) -> Self:
        return self._set(validation_steps_per_epoch=value)

    def getValidationStepsPerEpoch(self) -> int | None:
        return self._value(self.validation_steps_per_epoch)

    def setBackwardPassesPerStep(self, value: int) -> Self:
        return self._set(backward_passes_per_step=value)

    def getBackwardPassesPerStep(self) -> int:
        return self._required(self.backward_passes_per_step)

    def setGradientCompression(self, value: object | None) -> Self:
        return self._set(gradient_compression=value)

    def getGradientCompression(self) -> object | None:
        return self._value(self.gradient_compression)

    def setTransformationFn(self, value: Callable[[dict[str, object]], object] | None) -> Self:
        return self._set(transformation_fn=value)

    def getTransformationFn(self) -> Callable[[dict[str, object]], object] | None:
        return self._value(self.transformation_fn)

    def setTransformationEditFields(self, value: Sequence[Sequence[object]] | None) -> Self:
        return self._set(transformation_edit_fields=value)

    def getTransformationEditFields(self) -> list[tuple[object, ...]] | None:
        return self._value(self.transformation_edit_fields)

    def setTransformationRemovedFields(self, value: Sequence[str] | None) -> Self:
        return self._set(transformation_removed_fields=value)

    def getTransformationRemovedFields(self) -> list[str] | None:
        return self._value(self.transformation_removed_fields)

    def setInMemoryCacheAll(self, value: bool) -> Self:
        return self._set(inmemory_cache_all=value)

    def getInMemoryCacheAll(self) -> bool:
        return self._required(self.inmemory_cache_all)

    def setCompressSparseCols(self, value: bool) -> Self:
        return self._set(compress_sparse_cols=value)

    def getCompressSparseCols(self) -> bool:
        return self._required(self.compress_sparse_cols)

    def setDataModule(self, value: Callable[..., object] | None) -> Self:
        return self._set(data_module=value)

    def getDataModule(self) -> Callable[..., object] | None:
        return self._value(self.data_module)

    def _batch_maker(self) -> Callable[..., object] | None:
        """Return what makes batches; None if they are the rank's rows as they are."""
        return None if self.getDataModule() is PetastormDataModule else self.getDataModule()

    def setUseGpu(self, value: bool) -> Self:
        return self._set(use_gpu=value)

    def getUseGpu(self) -> bool:
        return self._required(self.use_gpu)

    def setShuffle(self, value: bool) -> Self:
        return self._set(shuffle=value)

    def getShuffle(self) -> bool:
        return self._required(self.shuffle)

    def setRandomSeed(self, value: int | None) -> Self:
        return self._set(random_seed=value)

    def getRandomSeed(self) -> int | None:
        return self._value(self.random_seed)

    def setStore(self, value: FilesystemStore | None) -> Self:
        return self._set(store=value)

    def getStore(self) -> FilesystemStore | None:
        return self._value(self.store)

    def setRunId(self, value: str | None) -> Self:
        return self._set(run_id=value)

    def getRunId(self) -> str | None:
        return self._value(self.run_id)

    def setMaxAttempts(self, value: int) -> Self:
        return self._set(max_attempts=value)

    def getMaxAttempts(self) -> int:
        return self._required(self.max_attempts)

    def setRanksPerTask(self, value: int) -> Self:
        return self._set(ranks_per_task=value)

    def getRanksPerTask(self) -> int:
        return self._required(self.ranks_per_task)

    def setResourceProfile(self, value: ResourceProfile | None) -> Self:
        return self._set(resource_profile=value)

    def getResourceProfile(self) -> ResourceProfile | None:
        return self._value(self.resource_profile)

    def setLoggers(self, value: Sequence[EpochLogger] | None) -> Self:
        return self._set(loggers=value)

    def getLoggers(self) -> list[EpochLogger]:
        return self._value(self.loggers) or []

    def setVerbose(self, value: int) -> Self:
        return self._set(verbose=value)

    def getVerbose(self) -> int:
        return self._required(self.verbose)


def check_together(estimator: EstimatorParams, losses: int) -> None:
    """Raise `ConfigError` for parameters that do not go together, whatever the framework; `losses` is their number."""
    labels = estimator.getLabelCols()
    if losses not in (1, len(labels)):
        raise ConfigError("loss", f"has {losses} functions for {len(labels)} label columns")
    for setting, given in (("loss_weights", estimator.getLossWeights()), ("label_shapes", estimator.getLabelShapes())):
        if given is not None and len(given) != len(labels):
            what = setting.partition("_")[2]
            raise ConfigError(setting, f"has {len(given)} {what} for {len(labels)} label columns")
    removed = estimator.getTransformationRemovedFields() or []
    wanted = [*estimator.getFeatureCols(), *labels, estimator.getSampleWeightCol()]
    if estimator.getTransformationFn() is None and (removed or estimator.getTransformationEditFields()):
        raise ConfigError("transformation_fn", "is not set, but transformation_edit_fields or _removed_fields are")
    if ended := [name for name in wanted if name is not None and name in removed]:
        raise ConfigError("transformation_removed_fields", f"holds {', '.join(ended)}, which the model is trained on")
    if estimator.getBackend() is not None and estimator.getNumProc() is not None:
        raise ConfigError("backend", "is set, and num_proc as well; set one of them")
