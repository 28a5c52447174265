"""Parameters that a `LightningEstimator` has besides those of a `TorchEstimator`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from farandole.errors import ConfigError
from farandole.estimators import checks
from farandole.estimators.checked_params import CheckedParams, Parameter, optional, required
from farandole.lightning.packages import package_of

# Arguments of Lightning's Trainer that the estimator sets, each with the parameter to use instead or the reason.
_SETTLED: Mapping[str, str] = {
    "accelerator": "set use_gpu",
    "accumulate_grad_batches": "set backward_passes_per_step",
    "barebones": "epochs must be reported",
    "callbacks": "set callbacks",
    "default_root_dir": "files are written to the store",
    "devices": "set num_proc",
    "enable_checkpointing": "give a ModelCheckpoint among callbacks",
    "fast_dev_run": "set train_steps_per_epoch",
    "limit_train_batches": "set train_steps_per_epoch",
    "limit_val_batches": "set validation_steps_per_epoch",
    "log_every_n_steps": "set log_every_n_steps",
    "logger": "set logger",
    "max_epochs": "set epochs",
    "max_steps": "set epochs and train_steps_per_epoch",
    "num_nodes": "set num_proc",
    "overfit_batches": "set train_steps_per_epoch",
    "profiler": "set profiler",
    "reload_dataloaders_every_n_epochs": "each epoch has an order of its own",
    "strategy": "the estimator connects the ranks",
    "sync_batchnorm": "use farandole.torch.SyncBatchNorm in the module",
    "use_distributed_sampler": "each rank has rows of its own",
}


def _gpus(value: object) -> int:
    if value not in (0, 1) or not isinstance(value, int) or isinstance(value, bool):
        raise checks.Refused(f"must be 0 or 1, got {value!r}: a rank computes on one GPU; start more ranks")
    return value


def _queue(value: object) -> float:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not whole and not (isinstance(value, float) and 0 <= value <= 1):
        raise checks.Refused(f"must be a number of batches >= 0 or a share of the steps in [0, 1], got {value!r}")
    assert isinstance(value, (int, float))
    return value


class LightningParams(CheckedParams):
    """Parameters of Lightning's trainer, callbacks and loaders."""

    callbacks: Parameter[Sequence[object], list[object]] = Parameter(
        "Lightning callbacks, which run on every rank", checks.objects
    )
    setCallbacks, getCallbacks = optional(callbacks, list)

    trainer_args: Parameter[Mapping[str, object], dict[str, object]] = Parameter(
        "further arguments of Lightning's Trainer, by name", checks.mapping
    )
    setTrainerArgs, getTrainerArgs = optional(trainer_args)

    logger: Parameter[object, object] = Parameter(
        "Lightning logger; default: the event file in the store", checks.anything
    )
    setLogger, getLogger = optional(logger)

    log_every_n_steps: Parameter[int, int] = Parameter(
        "steps between two logged values", checks.at_least(1), default=50
    )
    setLogEveryNSteps, getLogEveryNSteps = required(log_every_n_steps)

    profiler: Parameter[object, object] = Parameter("Lightning profiler, or its name", checks.anything)
    setProfiler, getProfiler = optional(profiler)

    num_gpus: Parameter[int, int] = Parameter("GPUs of a rank: 1 means use_gpu=True, 0 means use_gpu=False", _gpus)
    setNumGPUs, getNumGPUs = optional(num_gpus)

    data_module: Parameter[Callable[..., object], Callable[..., object]] = Parameter(
        "class of LightningDataModule; each rank makes one with train_loader and val_loader of its rows",
        checks.function("a class of LightningDataModule"),
    )
    setDataModule, getDataModule = optional(data_module)

    loader_num_epochs: Parameter[int, int] = Parameter(
        "no effect: the loaders have as many epochs as are trained", checks.at_least(1)
    )
    setLoaderNumEpochs, getLoaderNumEpochs = optional(loader_num_epochs)

    terminate_on_nan: Parameter[bool, bool] = Parameter(
        "end the fit when a loss is not finite", checks.flag, default=False
    )
    setTerminateOnNan, getTerminateOnNan = required(terminate_on_nan)

    debug_data_loader: Parameter[bool, bool] = Parameter("show each batch", checks.flag, default=False)
    setDebugDataLoader, getDebugDataLoader = required(debug_data_loader)

    train_async_data_loader_queue_size: Parameter[float, float] = Parameter(
        "batches that a thread makes ahead: a number, or a share of an epoch's steps", _queue
    )
    setTrainAsyncDataLoaderQueueSize, getTrainAsyncDataLoaderQueueSize = optional(train_async_data_loader_queue_size)

    val_async_data_loader_queue_size: Parameter[float, float] = Parameter(
        "batches that a thread makes ahead in validation: a number, or a share of its steps", _queue
    )
    setValAsyncDataLoaderQueueSize, getValAsyncDataLoaderQueueSize = optional(val_async_data_loader_queue_size)


def check_package(package: ModuleType, callbacks: Sequence[object]) -> None:
    """Raise `ConfigError` for callbacks of another package than `package`, whose trainer takes only its own."""
    for each in callbacks:
        if isinstance(each, package.Callback):
            continue
        other = package_of(each, "Callback")
        kind = type(each).__name__ if other is None else f"a {type(each).__name__} of {other.__name__}"
        raise ConfigError("callbacks", f"must be callbacks of {package.__name__}, as the model's class is; got {kind}")


def check_trainer_args(package: ModuleType, given: Mapping[str, object]) -> None:
    """Raise `ConfigError` for arguments that the trainer of `package` does not know, or that the estimator sets."""
    settled = [f"{name}: {_SETTLED[name]}" for name in sorted(given) if name in _SETTLED]
    if settled:
        raise ConfigError("trainer_args", f"may not hold arguments that the estimator gives: {'; '.join(settled)}")
    known = inspect.signature(package.Trainer).parameters
    unknown = [name for name in sorted(given) if name not in known]
    if unknown:
        raise ConfigError(
            "trainer_args",
            f"holds {', '.join(unknown)}, which the Trainer of {package.__name__} {package.__version__} does not know; "
            f"it knows {', '.join(name for name in known if name not in _SETTLED)}",
        )
