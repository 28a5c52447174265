"""PyTorch on Spark DataFrames: `TorchEstimator(...).fit(df)` returns a `TorchModel`, whose `transform` predicts."""

import copy
import functools
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import cloudpickle

from farandole.errors import ConfigError
from farandole.extras import importing

with importing("farandole.spark.torch"):
    import pandas as pd
    import torch
    from pyspark.resource import ResourceProfile
    from pyspark.sql import DataFrame

    from farandole.estimators import checks
    from farandole.estimators.backend import Backend
    from farandole.estimators.estimator import DataFrameEstimator
    from farandole.estimators.folders import Folder
    from farandole.estimators.history import NO_SCORES, EpochLogger
    from farandole.estimators.params import check_together, param
    from farandole.estimators.predictions.batches import column_type
    from farandole.estimators.predictions.torch import Predictor
    from farandole.estimators.store import FilesystemStore
    from farandole.estimators.trainers.checkpoint import Checkpoint
    from farandole.estimators.trainers.run import RunPlan
    from farandole.estimators.trainers.torch.callbacks import METHODS
    from farandole.estimators.trainers.torch.losses import Loss
    from farandole.estimators.trainers.torch.minibatch import TrainMinibatch
    from farandole.estimators.trainers.torch.tensors import Inputs, dtype_of
    from farandole.estimators.trainers.torch.training import Metric, TorchJob, train, weights_of
    from farandole.estimators.transformer import DataFrameModel, first_row

__all__ = ["TorchEstimator", "TorchModel"]

_FILE = "model.pt"  # of a saved TorchModel; torch.load reads it


def _model(value: object) -> torch.nn.Module:
    if not isinstance(value, torch.nn.Module):
        raise ConfigError("model", f"must be a torch.nn.Module, got {type(value).__name__}")
    return value


def _optimizer(value: object) -> torch.optim.Optimizer:
    if not isinstance(value, torch.optim.Optimizer):
        raise ConfigError("optimizer", f"must be a torch.optim.Optimizer, got {type(value).__name__}")
    return value


def _minibatch(value: object) -> TrainMinibatch:
    if not callable(value):
        raise ConfigError(
            "train_minibatch_fn",
            "must be a function of (model, optimizer, transform_outputs, loss_fn, inputs, labels, sample_weights), got "
            f"{value!r}",
        )
    return value


def _callbacks(value: object) -> list[Any]:
    given = checks.objects("callbacks")(value)
    for each in given:
        if not callable(each) and not any(hasattr(each, method) for method in METHODS):
            raise ConfigError(
                "callbacks", f"must be functions of (epoch, values) or have one of {', '.join(METHODS)}, got {each!r}"
            )
    return given


def check_device(model: torch.nn.Module) -> None:
    """Raise `ConfigError` for a model that is not on the CPU."""
    elsewhere = {str(each.device) for each in model.parameters() if each.device.type != "cpu"}
    if elsewhere:
        raise ConfigError(
            "model",
            f"is on {', '.join(sorted(elsewhere))}, which the ranks may not have; move it with .cpu(), and each rank "
            "moves it to its own GPU",
        )


class TorchEstimator(DataFrameEstimator["TorchModel"]):
    """Trains a `torch.nn.Module` on a DataFrame's rows, on `num_proc` ranks.

    The model takes one tensor per feature column, in the type of its parameters, and returns one output per label
    column; `loss` is called with (output, label). The learning rate is multiplied by the number of ranks, and the
    gradient is the mean over all rows of a step. With a `store` each epoch writes a checkpoint, and another fit with
    the same `run_id` continues after the last one; `epochs` counts the epochs of all fits. Without a store nothing is
    written. Layers that normalize over a batch (BatchNorm) see a rank's own rows: keep `batch_size` well above 1.

    `fit` blocks until the ranks have ended. It raises `ConfigError`, `DataError` and `SlotsError` before anything runs,
    `DataError` for null or ragged rows when they are read, and `RankFailed` for other errors of a rank.
    """

    _kind = "pytorch"

    model = param("model", "the torch.nn.Module to train", _model)
    optimizer = param("optimizer", "torch.optim optimizer, made from the model's parameters", _optimizer)
    loss = param(
        "loss",
        "function of (output, label): one for all labels, or one per label",
        checks.functions("loss", "(output, label)"),
    )
    loss_constructors = param(
        "loss_constructors",
        "functions that make the losses on each rank, in place of loss",
        checks.functions("loss_constructors", "any of model, torch, hvd, train_rows, val_rows"),
    )
    train_minibatch_fn = param(
        "train_minibatch_fn", "function that trains on one batch, in place of the usual step", _minibatch
    )
    callbacks = param("callbacks", "functions of (epoch, values), or objects with Keras' methods", _callbacks)
    metrics = param(
        "metrics",
        "functions of (output, label) whose values are reported",
        checks.functions("metrics", "(output, label)"),
    )
    input_shapes = param(
        "input_shapes",
        "shape of each input, -1 first; (rows,) or (rows, length)",
        checks.shapes("input_shapes", "feature column"),
    )

    def __init__(
        self,
        *,
        num_proc: int | None = None,
        model: torch.nn.Module | None = None,
        backend: Backend | None = None,
        store: FilesystemStore | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Loss | Sequence[Loss] | None = None,
        loss_constructors: Callable[..., Loss] | Sequence[Callable[..., Loss]] | None = None,
        train_minibatch_fn: TrainMinibatch | None = None,
        callbacks: Sequence[Any] | None = None,
        metrics: Sequence[Metric] | None = None,
        loss_weights: Sequence[float] | None = None,
        sample_weight_col: str | None = None,
        gradient_compression: object | None = None,
        feature_cols: Sequence[str] | None = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        validation: float | str | None = None,
        label_cols: Sequence[str] | None = None,
        label_shapes: Sequence[Sequence[int]] | None = None,
        batch_size: int | None = None,
        val_batch_size: int | None = None,
        epochs: int | None = None,
        verbose: int | None = None,
        random_seed: int | None = None,
        shuffle: bool | None = None,
        run_id: str | None = None,
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        backward_passes_per_step: int | None = None,
        transformation_fn: Callable[[dict[str, Any]], Any] | None = None,
        transformation_edit_fields: Sequence[Sequence[Any]] | None = None,
        transformation_removed_fields: Sequence[str] | None = None,
        inmemory_cache_all: bool | None = None,
        compress_sparse_cols: bool | None = None,
        data_module: Callable[..., Any] | None = None,
        use_gpu: bool | None = None,
        max_attempts: int | None = None,
        ranks_per_task: int | None = None,
        resource_profile: ResourceProfile | None = None,
        loggers: Sequence[EpochLogger] | None = None,
        **others: object,
    ) -> None:
        """Set parameters by name. Parameters of horovod.spark without an effect here are ignored, with a warning."""
        given = {name: value for name, value in locals().items() if name not in ("self", "others", "__class__")}
        super().__init__()
        self._set(**{name: value for name, value in given.items() if value is not None})
        self._take_others(others, given)

    def setModel(self, value: torch.nn.Module) -> Self:
        return self._set(model=value)

    def getModel(self) -> torch.nn.Module:
        return self._required(self.model)

    def setOptimizer(self, value: torch.optim.Optimizer) -> Self:
        return self._set(optimizer=value)

    def getOptimizer(self) -> torch.optim.Optimizer:
        return self._required(self.optimizer)

    def setLoss(self, value: Loss | Sequence[Loss]) -> Self:
        return self._set(loss=value)

    def getLoss(self) -> list[Loss]:
        return self._required(self.loss)

    def setLossConstructors(self, value: Callable[..., Loss] | Sequence[Callable[..., Loss]] | None) -> Self:
        return self._set(loss_constructors=value)

    def getLossConstructors(self) -> list[Callable[..., Loss]] | None:
        return self._value(self.loss_constructors)

    def setTrainMinibatchFn(self, value: TrainMinibatch | None) -> Self:
        return self._set(train_minibatch_fn=value)

    def getTrainMinibatchFn(self) -> TrainMinibatch | None:
        return self._value(self.train_minibatch_fn)

    def setCallbacks(self, value: Sequence[Any] | None) -> Self:
        return self._set(callbacks=value)

    def getCallbacks(self) -> list[Any]:
        callbacks = self._value(self.callbacks)
        return [] if callbacks is None else callbacks

    def setMetrics(self, value: Sequence[Metric]) -> Self:
        return self._set(metrics=value)

    def getMetrics(self) -> list[Metric]:
        metrics = self._value(self.metrics)
        return [] if metrics is None else [*metrics]

    def setInputShapes(self, value: Sequence[Sequence[int]] | None) -> Self:
        return self._set(input_shapes=value)

    def getInputShapes(self) -> list[tuple[int, ...]] | None:
        return self._value(self.input_shapes)

    def _losses(self) -> list[Callable[..., Any]]:
        """Return the losses, or the functions that make them."""
        constructors = self.getLossConstructors()
        if constructors is not None and self._value(self.loss) is not None:
            raise ConfigError("loss_constructors", "is set, and loss as well; set one of them")
        return [*self.getLoss()] if constructors is None else constructors

    def _losses_of_labels(self) -> tuple[tuple[Loss, ...], tuple[Callable[..., Loss], ...], tuple[float, ...]]:
        """Return per label the losses, the constructors of losses, and the weights; one of the first two is empty."""
        losses, labels = self._losses(), self.getLabelCols()
        for_each = tuple(losses if len(losses) == len(labels) else losses * len(labels))
        weights = tuple(self.getLossWeights() or [1.0 / len(labels)] * len(labels))
        return (for_each, (), weights) if self.getLossConstructors() is None else ((), for_each, weights)

    def _check_input_shapes(self) -> None:
        features, shapes = self.getFeatureCols(), self.getInputShapes()
        if shapes is not None and len(shapes) != len(features):
            raise ConfigError("input_shapes", f"has {len(shapes)} shapes for {len(features)} feature columns")

    def _check(self) -> None:
        self._check_input_shapes()
        check_together(self, len(self._losses()))
        if self.getTrainMinibatchFn() is not None and self.getBackwardPassesPerStep() > 1:
            raise ConfigError(
                "backward_passes_per_step", "is for steps without train_minibatch_fn, which makes its own"
            )
        dtype_of(self.getModel())
        check_device(self.getModel())
        of_model = {id(parameter) for parameter in self.getModel().parameters()}
        updated = [parameter for group in self.getOptimizer().param_groups for parameter in group["params"]]
        if not all(id(parameter) in of_model for parameter in updated):
            raise ConfigError(
                "optimizer", "updates parameters that are not the model's; make it from model.parameters()"
            )

    def _task(self, plan: RunPlan) -> Callable[[], bytes | None]:
        shapes = self.getLabelShapes()
        losses, constructors, weights = self._losses_of_labels()
        job = TorchJob(
            plan=plan,
            model=self.getModel(),
            optimizer=self.getOptimizer(),
            losses=losses,
            loss_constructors=constructors,
            loss_weights=weights,
            metrics=tuple(self.getMetrics()),
            inputs=self._inputs(),
            weight_col=self.getSampleWeightCol(),
            label_shapes=None if shapes is None else tuple(shapes),
            compression=self.getGradientCompression(),
            passes=self.getBackwardPassesPerStep(),
            train_minibatch=self.getTrainMinibatchFn(),
            callbacks=tuple(self.getCallbacks()),
            data_module=self._batch_maker(),
        )
        return functools.partial(train, job)

    def _trained(self, run_id: str, checkpoint: Checkpoint) -> Any:
        assert checkpoint.state is not None and checkpoint.outputs is not None
        # A copy: fitting again, with another seed for example, starts from the weights that the user gave.
        model = copy.deepcopy(self.getModel())
        model.load_state_dict(weights_of(checkpoint.state))
        return self._fitted(model, run_id, checkpoint)

    def _fitted(self, model: torch.nn.Module, run_id: str, checkpoint: Checkpoint) -> Any:
        arguments = self._get_model_kwargs(model, checkpoint.history, None, run_id, checkpoint.outputs)
        return self.get_model_class()(**arguments)

    def get_model_class(self) -> type:
        """Return the class of the fitted model; a subclass may return another one."""
        return TorchModel

    def _get_model_kwargs(self, model: Any, history: Any, optimizer: Any, run_id: str, metadata: Any) -> dict[str, Any]:
        """Return the arguments of `get_model_class()`; `metadata` is the type and shape of each output."""
        return {
            "model": model,
            "feature_columns": self.getFeatureCols(),
            "label_columns": self.getLabelCols(),
            "input_shapes": self.getInputShapes(),
            "outputs": metadata,
            "history": history,
            "run_id": run_id,
        }

    def _made(self) -> torch.nn.Module:
        """Return the model with all of its parameters."""
        return self.getModel()

    def _inputs(self) -> Inputs:
        return _inputs(self._made(), self.getFeatureCols(), self.getInputShapes())


class TorchModel(DataFrameModel):
    """A trained model; `transform` adds one column per label, a number or an array for each row.

    Made by `TorchEstimator.fit`, or from any `torch.nn.Module`. `outputs` holds the type and the shape of one row of
    each output; without it the first `transform` runs the model on one row of the DataFrame.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        feature_columns: Sequence[str],
        label_columns: Sequence[str],
        outputs: Sequence[tuple[str, Sequence[int]]] | None = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        history: Sequence[Mapping[str, float]] | None = None,
        run_id: str | None = None,
    ) -> None:
        super().__init__(feature_columns=feature_columns, label_columns=label_columns, history=history, run_id=run_id)
        self._model = _model(model)
        self._shapes = None if input_shapes is None else checks.shapes("input_shapes", "feature column")(input_shapes)
        self._outputs = None if outputs is None else [(dtype, [*shape]) for dtype, shape in outputs]

    def getModel(self) -> torch.nn.Module:
        return self._model

    def setModel(self, value: torch.nn.Module) -> Self:
        """Replace the model; the outputs of the new one may have other shapes."""
        self._model, self._outputs = _model(value), None
        return self

    def getHistory(self) -> list[dict[str, object]]:
        """Return each epoch in Horovod's form: "epoch", counted from 0, "train" and, if rows validated, "validation".

        Both hold "loss" and "all_metrics", a list with the name and the value of each metric."""
        return [_as_horovod(record) for record in self.history]

    def _facts(self) -> dict[str, object]:
        return {"outputs": self._outputs, "input_shapes": self._shapes}

    def _dumped(self) -> tuple[str, bytes]:
        file = io.BytesIO()
        torch.save(self._model, file, pickle_module=cloudpickle)  # a notebook's classes go into the file
        return _FILE, file.getvalue()

    @classmethod
    def _loaded(cls, folder: Folder) -> Any:
        # Unpickles, as loading an estimator does; see SECURITY.md.
        return torch.load(io.BytesIO(folder.read(_FILE)), map_location="cpu", weights_only=False)

    def _predictor(
        self, names: Sequence[str], dataset: DataFrame
    ) -> tuple[Callable[[Iterator[tuple[pd.Series, ...]]], Iterator[pd.DataFrame]], list[str]]:
        predictor = Predictor(
            model=cloudpickle.dumps(self._model),
            inputs=_inputs(self._model, self.getFeatureColumns(), self._shapes),
            label_cols=tuple(self.getLabelColumns()),
            names=tuple(names),
        )
        if self._outputs is None:
            self._outputs = predictor.outputs(first_row(dataset, self.getFeatureColumns()))
        return predictor, [column_type(dtype, shape) for dtype, shape in self._outputs]


def _inputs(model: torch.nn.Module, features: Sequence[str], shapes: Sequence[Sequence[int]] | None) -> Inputs:
    return Inputs(
        columns=tuple(features),
        shapes=None if shapes is None else tuple(tuple(shape) for shape in shapes),
        dtype=dtype_of(model),
    )


def _as_horovod(record: Mapping[str, float]) -> dict[str, object]:
    validation = {name.removeprefix("val_"): value for name, value in record.items() if name.startswith("val_")}
    train = {name: value for name, value in record.items() if name not in NO_SCORES and not name.startswith("val_")}
    parts = {"train": train, "validation": validation} if validation else {"train": train}
    logs: dict[str, object] = {"epoch": int(record["epoch"]) - 1}
    for part, values in parts.items():
        metrics = [{name: value} for name, value in values.items() if name != "loss"]
        logs[part] = {"loss": values["loss"], "all_metrics": metrics}
    return logs
