"""Parameters that all estimators share, with Horovod's names and defaults."""

from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from pyspark.ml.param import Param, Params
from pyspark.resource import ResourceProfile

from farandole.errors import ConfigError
from farandole.estimators import checks
from farandole.estimators.backend import Backend
from farandole.estimators.data_module import PetastormDataModule
from farandole.estimators.foreign import ForeignParams
from farandole.estimators.history import EpochLogger
from farandole.estimators.store import FilesystemStore

T = TypeVar("T")


def param(name: str, doc: str, check: Callable[[object], T]) -> "Param[T]":
    """Return a parameter. `check` converts its values and raises `ConfigError` for wrong ones."""
    return Param(Params._dummy(), name, doc, typeConverter=check)


class CheckedParams(Params):
    """Parameters whose values are checked when they are read, including those that are passed to `fit`."""

    def _value(self, param: "Param[T]") -> T | None:
        # fit(df, {param: value}) bypasses the setters, so its values are checked here.
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
    """Parameters of an estimator, each with a setter and a getter as in pyspark.ml.

    Setters raise `ConfigError` for wrong values.
    """

    num_proc = param(
        "num_proc",
        "number of ranks; default: one per slot of Spark, or per core without Spark",
        checks.at_least("num_proc", 1),
    )
    backend = param(
        "backend", "SparkBackend, or an object that runs a function on its ranks; in place of num_proc", checks.backend
    )
    feature_cols = param(
        "feature_cols", "columns that the model takes, one per input", checks.names_of_columns("feature_cols")
    )
    label_cols = param(
        "label_cols",
        "columns that the loss compares with the outputs, one per output",
        checks.names_of_columns("label_cols"),
    )
    sample_weight_col = param(
        "sample_weight_col", "column of numbers, the weights of the rows' losses", checks.text("sample_weight_col")
    )
    label_shapes = param(
        "label_shapes",
        "shape of each label, -1 first; default: the shape of its output",
        checks.shapes("label_shapes", "label column"),
    )
    loss_weights = param("loss_weights", "weight of each label's loss; default: equal weights", checks.weights)
    validation = param(
        "validation", "fraction of the rows that validate, or a column that is true for them", checks.validation
    )
    batch_size = param("batch_size", "rows per step and rank", checks.at_least("batch_size", 1))
    val_batch_size = param(
        "val_batch_size",
        "rows per step and rank in validation; default: batch_size",
        checks.at_least("val_batch_size", 1),
    )
    epochs = param("epochs", "number of epochs, counted over all fits of the run", checks.at_least("epochs", 1))
    train_steps_per_epoch = param(
        "train_steps_per_epoch",
        "steps of an epoch; default: one pass over all rows",
        checks.at_least("train_steps_per_epoch", 1),
    )
    validation_steps_per_epoch = param(
        "validation_steps_per_epoch",
        "steps of a validation; default: one pass over all rows",
        checks.at_least("validation_steps_per_epoch", 1),
    )
    backward_passes_per_step = param(
        "backward_passes_per_step",
        "batches whose gradients are averaged before a step",
        checks.at_least("backward_passes_per_step", 1),
    )
    gradient_compression = param(
        "gradient_compression",
        "Compression of the framework's binding, for the exchange of gradients",
        lambda value: value,
    )
    transformation_fn = param(
        "transformation_fn",
        "function that takes and returns a row, a dict; it runs on the ranks",
        checks.transformation,
    )
    transformation_edit_fields = param(
        "transformation_edit_fields",
        "(name, type, shape, nullable) of columns that transformation_fn changes or adds",
        checks.edit_fields,
    )
    transformation_removed_fields = param(
        "transformation_removed_fields",
        "further columns that transformation_fn takes and that batches do not have",
        checks.names_of_columns("transformation_removed_fields"),
    )
    inmemory_cache_all = param(
        "inmemory_cache_all",
        "keep each rank's rows in memory, after transformation_fn",
        checks.flag("inmemory_cache_all"),
    )
    compress_sparse_cols = param(
        "compress_sparse_cols", "keep vectors sparse on disk and in transit", checks.flag("compress_sparse_cols")
    )
    data_module = param("data_module", "subclass of DataModule, which makes each rank's batches", checks.data_module)
    use_gpu = param(
        "use_gpu",
        "True: each rank computes on its own GPU, or fit fails; False: on the CPU; None: on GPUs if every rank has one",
        checks.flag("use_gpu"),
    )
    shuffle = param("shuffle", "shuffle each rank's rows in each epoch", checks.flag("shuffle"))
    random_seed = param(
        "random_seed",
        "seed of the order of rows, the validation split and the ranks; default: random",
        checks.at_least("random_seed", 0),
    )
    store = param("store", "store of checkpoints and logs; default: nothing is written", checks.store)
    run_id = param("run_id", "name of the run in the store; fitting again resumes it", checks.text("run_id"))
    max_attempts = param(
        "max_attempts",
        "attempts of one fit, the first one included; 1: the first failure ends it",
        checks.at_least("max_attempts", 1),
    )
    ranks_per_task = param(
        "ranks_per_task",
        "ranks of each Spark task; they divide its GPUs among themselves",
        checks.at_least("ranks_per_task", 1),
    )
    resource_profile = param(
        "resource_profile",
        "resources of each task; default: those of Spark's configuration",
        checks.profile("resource_profile"),
    )
    loggers = param("loggers", "objects whose log_epoch the driver calls with the values of each epoch", checks.loggers)
    verbose = param("verbose", "0 quiet, 1 progress, 2 all output of the ranks as well", checks.verbose)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(batch_size=32, epochs=1, backward_passes_per_step=1, shuffle=True, verbose=1, max_attempts=4)
        self._setDefault(inmemory_cache_all=False, compress_sparse_cols=False, use_gpu=None, ranks_per_task=1)

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

    def setBackend(self, value: Backend | None) -> Self:
        return self._set(backend=value)

    def getBackend(self) -> Backend | None:
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
        """Return the class of the data module; None if batches are the rank's rows, unchanged."""
        return None if self.getDataModule() is PetastormDataModule else self.getDataModule()

    def setUseGpu(self, value: bool | None) -> Self:
        return self._set(use_gpu=value)

    def getUseGpu(self) -> bool | None:
        """Return None, the default, if the ranks compute on GPUs where every rank has one."""
        return self._value(self.use_gpu)

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
    """Raise `ConfigError` for parameters of any framework that do not go together; `losses` is the number of losses."""
    labels = estimator.getLabelCols()
    if losses not in (1, len(labels)):
        raise ConfigError("loss", f"has {losses} functions for {len(labels)} label columns")
    for setting, given in (("loss_weights", estimator.getLossWeights()), ("label_shapes", estimator.getLabelShapes())):
        if given is not None and len(given) != len(labels):
            items = setting.partition("_")[2]
            raise ConfigError(setting, f"has {len(given)} {items} for {len(labels)} label columns")
    removed = estimator.getTransformationRemovedFields() or []
    wanted = [*estimator.getFeatureCols(), *labels, estimator.getSampleWeightCol()]
    if estimator.getTransformationFn() is None and (removed or estimator.getTransformationEditFields()):
        raise ConfigError("transformation_fn", "is not set, but transformation_edit_fields or _removed_fields are")
    if ended := [name for name in wanted if name is not None and name in removed]:
        raise ConfigError("transformation_removed_fields", f"holds {', '.join(ended)}, which the model is trained on")
    if estimator.getBackend() is not None and estimator.getNumProc() is not None:
        raise ConfigError("backend", "is set, and num_proc as well; set one of them")
