"""Parameters that a `LightningEstimator` has besides those of a `TorchEstimator`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from farandole.errors import ConfigError
from farandole.estimators import checks
from farandole.estimators.params import CheckedParams, param
from farandole.lightning.packages import package_of

__all__ = ["LightningParams", "check_package", "check_trainer_args"]

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


class LightningParams(CheckedParams):
    """Parameters of Lightning's trainer, callbacks and loaders."""

    callbacks = param("callbacks", "Lightning callbacks, which run on every rank", checks.objects("callbacks"))
    trainer_args = param(
        "trainer_args", "further arguments of Lightning's Trainer, by name", lambda value: _args(value)
    )
    logger = param("logger", "Lightning logger; default: the event file in the store", lambda value: value)
    log_every_n_steps = param(
        "log_every_n_steps", "steps between two logged values", checks.at_least("log_every_n_steps", 1)
    )
    profiler = param("profiler", "Lightning profiler, or its name", lambda value: value)
    num_gpus = param(
        "num_gpus", "GPUs of a rank: 1 means use_gpu=True, 0 means use_gpu=False", lambda value: _gpus(value)
    )
    data_module = param(
        "data_module",
        "class of LightningDataModule; each rank makes one with train_loader and val_loader of its rows",
        lambda value: _class(value),
    )
    loader_num_epochs = param(
        "loader_num_epochs",
        "no effect: the loaders have as many epochs as are trained",
        checks.at_least("loader_num_epochs", 1),
    )
    terminate_on_nan = param(
        "terminate_on_nan", "end the fit when a loss is not finite", checks.flag("terminate_on_nan")
    )
    debug_data_loader = param("debug_data_loader", "show each batch", checks.flag("debug_data_loader"))
    train_async_data_loader_queue_size = param(
        "train_async_data_loader_queue_size",
        "batches that a thread makes ahead: a number, or a share of an epoch's steps",
        lambda value: _queue("train_async_data_loader_queue_size", value),
    )
    val_async_data_loader_queue_size = param(
        "val_async_data_loader_queue_size",
        "batches that a thread makes ahead in validation: a number, or a share of its steps",
        lambda value: _queue("val_async_data_loader_queue_size", value),
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(log_every_n_steps=50, terminate_on_nan=False, debug_data_loader=False)

    def setCallbacks(self, value: Sequence[Any] | None) -> Self:
        return self._set(callbacks=value)

    def getCallbacks(self) -> list[Any]:
        return self._value(self.callbacks) or []

    def setTrainerArgs(self, value: Mapping[str, Any] | None) -> Self:
        return self._set(trainer_args=value)

    def getTrainerArgs(self) -> dict[str, Any] | None:
        return self._value(self.trainer_args)

    def setLogger(self, value: Any | None) -> Self:
        return self._set(logger=value)

    def getLogger(self) -> Any | None:
        return self._value(self.logger)

    def setLogEveryNSteps(self, value: int) -> Self:
        return self._set(log_every_n_steps=value)

    def getLogEveryNSteps(self) -> int:
        return self._required(self.log_every_n_steps)

    def setProfiler(self, value: Any | None) -> Self:
        return self._set(profiler=value)

    def getProfiler(self) -> Any | None:
        return self._value(self.profiler)

    def setNumGPUs(self, value: int | None) -> Self:
        return self._set(num_gpus=value)

    def getNumGPUs(self) -> int | None:
        return self._value(self.num_gpus)

    def setLoaderNumEpochs(self, value: int | None) -> Self:
        return self._set(loader_num_epochs=value)

    def getLoaderNumEpochs(self) -> int | None:
        return self._value(self.loader_num_epochs)

    def setTerminateOnNan(self, value: bool) -> Self:
        return self._set(terminate_on_nan=value)

    def getTerminateOnNan(self) -> bool:
        return self._required(self.terminate_on_nan)

    def setDebugDataLoader(self, value: bool) -> Self:
        return self._set(debug_data_loader=value)

    def getDebugDataLoader(self) -> bool:
        return self._required(self.debug_data_loader)

    def setTrainAsyncDataLoaderQueueSize(self, value: float | None) -> Self:
        return self._set(train_async_data_loader_queue_size=value)

    def getTrainAsyncDataLoaderQueueSize(self) -> float | None:
        return self._value(self.train_async_data_loader_queue_size)

    def setValAsyncDataLoaderQueueSize(self, value: float | None) -> Self:
        return self._set(val_async_data_loader_queue_size=value)

    def getValAsyncDataLoaderQueueSize(self) -> float | None:
        return self._value(self.val_async_data_loader_queue_size)


def check_package(package: Any, callbacks: Sequence[Any]) -> None:
    """Raise `ConfigError` for callbacks of another package than `package`, whose trainer takes only its own."""
    for each in callbacks:
        if isinstance(each, package.Callback):
            continue
        other = package_of(each, "Callback")
        kind = type(each).__name__ if other is None else f"a {type(each).__name__} of {other.__name__}"
        raise ConfigError("callbacks", f"must be callbacks of {package.__name__}, as the model's class is; got {kind}")


def check_trainer_args(package: Any, given: Mapping[str, Any]) -> None:
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


def _args(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigError("trainer_args", f"must be a dict with names as keys, got {value!r}")
    return dict(value)


def _gpus(value: object) -> int:
    if value not in (0, 1) or not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError("num_gpus", f"must be 0 or 1, got {value!r}: a rank computes on one GPU; start more ranks")
    return value


def _class(value: object) -> Callable[..., Any]:
    if not callable(value):
        raise ConfigError("data_module", f"must be a class of LightningDataModule, got {value!r}")
    return value


def _queue(name: str, value: object) -> float:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not whole and not (isinstance(value, float) and 0 <= value <= 1):
        raise ConfigError(name, f"must be a number of batches >= 0 or a share of the steps in [0, 1], got {value!r}")
    assert isinstance(value, (int, float))
    return value
