"""Parameters that all estimators share, with Horovod's names and defaults."""

from collections.abc import Callable, Sequence

from pyspark.resource import ResourceProfile

from farandole.errors import ConfigError
from farandole.estimators import checks
from farandole.estimators.backend import Backend
from farandole.estimators.checked_params import Parameter, optional, required
from farandole.estimators.data_module import PetastormDataModule
from farandole.estimators.foreign import ForeignParams
from farandole.estimators.history import EpochLogger
from farandole.estimators.store import FilesystemStore


class EstimatorParams(ForeignParams):
    """Parameters of an estimator, each with a setter and a getter as in pyspark.ml.

    Setters raise `ConfigError` for wrong values.
    """

    num_proc: Parameter[int, int] = Parameter(
        "number of ranks; default: one per slot of Spark, or per core without Spark", checks.at_least(1)
    )
    setNumProc, getNumProc = optional(num_proc)

    backend: Parameter[Backend, Backend] = Parameter(
        "SparkBackend, or an object that runs a function on its ranks; in place of num_proc", checks.backend
    )
    setBackend, getBackend = optional(backend)

    feature_cols: Parameter[Sequence[str], list[str]] = Parameter(
        "columns that the model takes, one per input", checks.names_of_columns
    )
    setFeatureCols, getFeatureCols = required(feature_cols)

    label_cols: Parameter[Sequence[str], list[str]] = Parameter(
        "columns that the loss compares with the outputs, one per output", checks.names_of_columns
    )
    setLabelCols, getLabelCols = required(label_cols)

    sample_weight_col: Parameter[str, str] = Parameter(
        "column of numbers, the weights of the rows' losses, not of their metrics", checks.text
    )
    setSampleWeightCol, getSampleWeightCol = optional(sample_weight_col)

    label_shapes: Parameter[Sequence[Sequence[int]], list[tuple[int, ...]]] = Parameter(
        "shape of each label, -1 first; default: the shape of its output", checks.shapes("label column")
    )
    setLabelShapes, getLabelShapes = optional(label_shapes)

    loss_weights: Parameter[Sequence[float], list[float]] = Parameter(
        "weight of each label's loss; default: equal weights", checks.weights
    )
    setLossWeights, getLossWeights = optional(loss_weights)

    validation: Parameter[float | str, float | str] = Parameter(
        "fraction of the rows that validate, or a column that is true for them", checks.validation
    )
    setValidation, getValidation = optional(validation)

    batch_size: Parameter[int, int] = Parameter("rows per step and rank", checks.at_least(1), default=32)
    setBatchSize, getBatchSize = required(batch_size)

    val_batch_size: Parameter[int, int] = Parameter(
        "rows per step and rank in validation; default: batch_size", checks.at_least(1)
    )
    setValBatchSize = optional(val_batch_size)[0]

    def getValBatchSize(self) -> int:
        return self._value(self.val_batch_size) or self.getBatchSize()

    epochs: Parameter[int, int] = Parameter(
        "number of epochs, counted over all fits of the run", checks.at_least(1), default=1
    )
    setEpochs, getEpochs = required(epochs)

    train_steps_per_epoch: Parameter[int, int] = Parameter(
        "steps of an epoch; default: one pass over all rows", checks.at_least(1)
    )
    setTrainStepsPerEpoch, getTrainStepsPerEpoch = optional(train_steps_per_epoch)

    validation_steps_per_epoch: Parameter[int, int] = Parameter(
        "steps of a validation; default: one pass over all rows", checks.at_least(1)
    )
    setValidationStepsPerEpoch, getValidationStepsPerEpoch = optional(validation_steps_per_epoch)

    backward_passes_per_step: Parameter[int, int] = Parameter(
        "batches whose gradients are averaged before a step", checks.at_least(1), default=1
    )
    setBackwardPassesPerStep, getBackwardPassesPerStep = required(backward_passes_per_step)

    gradient_compression: Parameter[object, object] = Parameter(
        "Compression of the framework's binding, for the exchange of gradients", checks.anything
    )
    setGradientCompression, getGradientCompression = optional(gradient_compression)

    transformation_fn: Parameter[Callable[[dict[str, object]], object], Callable[..., object]] = Parameter(
        "function that takes and returns a row, a dict; it runs on the ranks",
        checks.function("a function of a row, which is a dict"),
    )
    setTransformationFn, getTransformationFn = optional(transformation_fn)

    transformation_edit_fields: Parameter[Sequence[Sequence[object]], list[tuple[object, ...]]] = Parameter(
        "(name, type, shape, nullable) of columns that transformation_fn changes or adds", checks.edit_fields
    )
    setTransformationEditFields, getTransformationEditFields = optional(transformation_edit_fields)

    transformation_removed_fields: Parameter[Sequence[str], list[str]] = Parameter(
        "further columns that transformation_fn takes and that batches do not have", checks.names_of_columns
    )
    setTransformationRemovedFields, getTransformationRemovedFields = optional(transformation_removed_fields)

    inmemory_cache_all: Parameter[bool, bool] = Parameter(
        "keep each rank's rows in memory, after transformation_fn", checks.flag, default=False
    )
    setInMemoryCacheAll, getInMemoryCacheAll = required(inmemory_cache_all)

    compress_sparse_cols: Parameter[bool, bool] = Parameter(
        "keep vectors sparse on disk and in transit", checks.flag, default=False
    )
    setCompressSparseCols, getCompressSparseCols = required(compress_sparse_cols)

    data_module: Parameter[Callable[..., object], Callable[..., object]] = Parameter(
        "subclass of DataModule, which makes each rank's batches", checks.data_module
    )
    setDataModule, getDataModule = optional(data_module)

    def _batch_maker(self) -> Callable[..., object] | None:
        """Return the class of the data module; None if batches are the rank's rows, unchanged."""
        return None if self.getDataModule() is PetastormDataModule else self.getDataModule()

    use_gpu: Parameter[bool, bool] = Parameter(
        "True: each rank computes on its own GPU, or fit fails; False: on the CPU; None: on GPUs if every rank has one",
        checks.flag,
        default=None,
    )
    setUseGpu, getUseGpu = optional(use_gpu)

    shuffle: Parameter[bool, bool] = Parameter("shuffle each rank's rows in each epoch", checks.flag, default=True)
    setShuffle, getShuffle = required(shuffle)

    random_seed: Parameter[int, int] = Parameter(
        "seed of the order of rows, the validation split and the ranks; default: random", checks.at_least(0)
    )
    setRandomSeed, getRandomSeed = optional(random_seed)

    store: Parameter[FilesystemStore, FilesystemStore] = Parameter(
        "store of checkpoints and logs; default: nothing is written", checks.store
    )
    setStore, getStore = optional(store)

    run_id: Parameter[str, str] = Parameter("name of the run in the store; fitting again resumes it", checks.text)
    setRunId, getRunId = optional(run_id)

    max_attempts: Parameter[int, int] = Parameter(
        "attempts of one fit, the first one included; 1: the first failure ends it", checks.at_least(1), default=4
    )
    setMaxAttempts, getMaxAttempts = required(max_attempts)

    ranks_per_task: Parameter[int, int] = Parameter(
        "ranks of each Spark task; they divide its GPUs among themselves", checks.at_least(1), default=1
    )
    setRanksPerTask, getRanksPerTask = required(ranks_per_task)

    resource_profile: Parameter[ResourceProfile, ResourceProfile] = Parameter(
        "resources of each task; default: those of Spark's configuration", checks.profile
    )
    setResourceProfile, getResourceProfile = optional(resource_profile)

    loggers: Parameter[Sequence[EpochLogger], list[EpochLogger]] = Parameter(
        "objects whose log_epoch the driver calls with the values of each epoch", checks.loggers
    )
    setLoggers, getLoggers = optional(loggers, list)

    verbose: Parameter[int, int] = Parameter(
        "0 quiet, 1 progress, 2 all output of the ranks as well", checks.verbose, default=1
    )
    setVerbose, getVerbose = required(verbose)


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
