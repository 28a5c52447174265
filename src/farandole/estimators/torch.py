"""PyTorch on Spark DataFrames: `TorchEstimator(...).fit(df)` returns a `TorchModel`, whose `transform` predicts."""

import copy
import functools
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Self, TypeVar

import cloudpickle

from farandole.errors import ConfigError
from farandole.extras import importing

with importing("farandole.spark.torch"):
    import torch

    from farandole.estimators import checks
    from farandole.estimators.checked_params import Parameter, optional, required
    from farandole.estimators.estimator import DataFrameEstimator
    from farandole.estimators.folders import Folder
    from farandole.estimators.history import NO_SCORES
    from farandole.estimators.params import check_together
    from farandole.estimators.persistence import Facts
    from farandole.estimators.predictions.batches import BatchPredictor
    from farandole.estimators.predictions.torch import Predictor
    from farandole.estimators.trainers.checkpoint import Checkpoint
    from farandole.estimators.trainers.run import RunPlan
    from farandole.estimators.trainers.torch.callbacks import METHODS
    from farandole.estimators.trainers.torch.judge import TorchJob, TrainMinibatch
    from farandole.estimators.trainers.torch.losses import Loss, Losses, Metric
    from farandole.estimators.trainers.torch.tensors import Inputs, check_parameters, dtype_of
    from farandole.estimators.trainers.torch.training import train, weights_of
    from farandole.estimators.transformer import DataFrameModel

F = TypeVar("F")

_FILE = "model.pt"  # of a saved TorchModel; torch.load reads it


def _callbacks(value: object) -> list[object]:
    given = checks.objects(value)
    for each in given:
        if not callable(each) and not any(hasattr(each, method) for method in METHODS):
            raise checks.Refused(
                f"must be functions of (epoch, values) or have one of {', '.join(METHODS)}, got {each!r}"
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

    model: Parameter[torch.nn.Module, torch.nn.Module] = Parameter(
        "the torch.nn.Module to train",
        checks.instance_of(torch.nn.Module, "a torch.nn.Module", named=checks.type_name),
    )
    setModel, getModel = required(model)

    optimizer: Parameter[torch.optim.Optimizer, torch.optim.Optimizer] = Parameter(
        "torch.optim optimizer, made from the model's parameters",
        checks.instance_of(torch.optim.Optimizer, "a torch.optim.Optimizer", named=checks.type_name),
    )
    setOptimizer, getOptimizer = required(optimizer)

    loss: Parameter[Loss | Sequence[Loss], list[Loss]] = Parameter(
        "function of (output, label): one for all labels, or one per label", checks.functions("(output, label)")
    )
    setLoss, getLoss = required(loss)

    loss_constructors: Parameter[Callable[..., Loss] | Sequence[Callable[..., Loss]], list[Callable[..., Loss]]] = (
        Parameter(
            "functions that make the losses on each rank, in place of loss",
            checks.functions("any of model, torch, hvd, train_rows, val_rows", classes=True),
        )
    )
    setLossConstructors, getLossConstructors = optional(loss_constructors)

    train_minibatch_fn: Parameter[TrainMinibatch, TrainMinibatch] = Parameter(
        "function that trains on one batch, in place of the usual step",
        checks.function("a function of (model, optimizer, transform_outputs, loss_fn, inputs, labels, sample_weights)"),
    )
    setTrainMinibatchFn, getTrainMinibatchFn = optional(train_minibatch_fn)

    callbacks: Parameter[Sequence[object], list[object]] = Parameter(
        "functions of (epoch, values), or objects with Keras' methods", _callbacks
    )
    setCallbacks, getCallbacks = optional(callbacks, list)

    metrics: Parameter[Sequence[Metric], list[Metric]] = Parameter(
        "functions of (output, label) whose values are reported", checks.functions("(output, label)")
    )
    setMetrics, getMetrics = optional(metrics, list)

    input_shapes: Parameter[Sequence[Sequence[int]], list[tuple[int, ...]]] = Parameter(
        "shape of each input, -1 first; (rows,) or (rows, length)", checks.shapes("feature column")
    )
    setInputShapes, getInputShapes = optional(input_shapes)

    def _loss_functions(self) -> Sequence[Callable[..., object]]:
        """Return the losses, or the functions that make them."""
        constructors = self.getLossConstructors()
        if constructors is not None and self._value(self.loss) is not None:
            raise ConfigError("loss_constructors", "is set, and loss as well; set one of them")
        return self.getLoss() if constructors is None else constructors

    def _losses(self) -> Losses:
        constructors, labels = self.getLossConstructors(), self.getLabelCols()
        return Losses(
            optimizer=self.getOptimizer(),
            losses=_for_each(labels, self.getLoss()) if constructors is None else (),
            constructors=_for_each(labels, constructors or []),
            weights=tuple(self.getLossWeights() or [1.0 / len(labels)] * len(labels)),
            metrics=tuple(self.getMetrics()),
        )

    def _check_input_shapes(self) -> None:
        features, shapes = self.getFeatureCols(), self.getInputShapes()
        if shapes is not None and len(shapes) != len(features):
            raise ConfigError("input_shapes", f"has {len(shapes)} shapes for {len(features)} feature columns")

    def _check(self) -> None:
        self._check_input_shapes()
        check_together(self, len(self._loss_functions()))
        if self.getTrainMinibatchFn() is not None and self.getBackwardPassesPerStep() > 1:
            raise ConfigError(
                "backward_passes_per_step", "is for steps without train_minibatch_fn, which makes its own"
            )
        check_parameters(self.getModel())
        check_device(self.getModel())
        of_model = {id(parameter) for parameter in self.getModel().parameters()}
        updated = [parameter for group in self.getOptimizer().param_groups for parameter in group["params"]]
        if not all(id(parameter) in of_model for parameter in updated):
            raise ConfigError(
                "optimizer", "updates parameters that are not the model's; make it from model.parameters()"
            )

    def _task(self, plan: RunPlan) -> Callable[[], bytes | None]:
        job = TorchJob(
            plan=plan,
            model=self.getModel(),
            losses=self._losses(),
            inputs=self._inputs(),
            train_minibatch=self.getTrainMinibatchFn(),
            callbacks=tuple(self.getCallbacks()),
        )
        return functools.partial(train, job)

    def _trained(self, run_id: str, checkpoint: Checkpoint) -> "TorchModel":
        assert checkpoint.outputs is not None
        # A copy: fitting again, with another seed for example, starts from the weights that the user gave.
        model = copy.deepcopy(self.getModel())
        model.load_state_dict(weights_of(checkpoint.weights))
        return self._fitted(model, run_id, checkpoint)

    def _fitted(self, model: torch.nn.Module, run_id: str, checkpoint: Checkpoint) -> "TorchModel":
        arguments = self._get_model_kwargs(model, checkpoint.history, None, run_id, checkpoint.outputs)
        made: TorchModel = self.get_model_class()(**arguments)
        return made

    def get_model_class(self) -> type:
        """Return the class of the fitted model; a subclass may return another one."""
        return TorchModel

    def _get_model_kwargs(
        self, model: torch.nn.Module, history: object, optimizer: object, run_id: str, metadata: object
    ) -> dict[str, object]:
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


class TorchModel(DataFrameModel[torch.nn.Module]):
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
        super().__init__(
            model=model, feature_columns=feature_columns, label_columns=label_columns, outputs=outputs,
            history=history, run_id=run_id,
        )  # fmt: skip
        self._shapes = None if input_shapes is None else TorchEstimator.input_shapes.checked(input_shapes)

    @staticmethod
    def _checked(model: torch.nn.Module) -> torch.nn.Module:
        return TorchEstimator.model.checked(model)

    def getHistory(self) -> list[dict[str, object]]:
        """Return each epoch in Horovod's form: "epoch", counted from 0, "train" and, if rows validated, "validation".

        Both hold "loss" and "all_metrics", a list with the name and the value of each metric."""
        return [_as_horovod(record) for record in self.history]

    def _facts(self) -> dict[str, object]:
        return {"input_shapes": self._shapes}

    def _dumped(self) -> dict[str, bytes]:
        file = io.BytesIO()
        torch.save(self._model, file, pickle_module=cloudpickle)  # a notebook's classes go into the file
        return {_FILE: file.getvalue()}

    @classmethod
    def _revived(cls, facts: Facts, folder: Folder) -> Self:
        # Unpickles, as loading an estimator does; see SECURITY.md.
        model = torch.load(io.BytesIO(folder.read(_FILE)), map_location="cpu", weights_only=False)
        return cls(model=model, **facts)

    def _predictor(self, names: Sequence[str]) -> BatchPredictor:
        return Predictor(
            model=cloudpickle.dumps(self._model),
            inputs=_inputs(self._model, self.getFeatureColumns(), self._shapes),
            label_cols=tuple(self.getLabelColumns()),
            names=tuple(names),
        )


def _for_each(labels: Sequence[str], functions: list[F]) -> tuple[F, ...]:
    return tuple(functions * len(labels) if len(functions) == 1 else functions)


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
