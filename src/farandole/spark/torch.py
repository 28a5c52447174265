"""PyTorch on Spark DataFrames: `TorchEstimator(...).fit(df)` gives a `TorchModel`, whose `transform` predicts."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

import cloudpickle

from farandole.errors import ConfigError
from farandole.extras import importing

with importing(__name__):
    import pandas as pd
    import torch

    from farandole.spark.estimator import DataFrameEstimator, Fit
    from farandole.spark.params import param, refuse_unknown
    from farandole.spark.store import FilesystemStore
    from farandole.spark.trainers.checkpoint import Checkpoint
    from farandole.spark.trainers.torch import Loss, Metric, TorchJob, train
    from farandole.spark.trainers.torch_predict import Predictor, column_type
    from farandole.spark.trainers.torch_tensors import Inputs, Output, dtype_of
    from farandole.spark.transformer import DataFrameModel

__all__ = ["TorchEstimator", "TorchModel"]


def _model(value: object) -> torch.nn.Module:
    if not isinstance(value, torch.nn.Module):
        raise ConfigError("model", f"must be a torch.nn.Module, got {type(value).__name__}")
    return value


def _optimizer(value: object) -> torch.optim.Optimizer:
    if not isinstance(value, torch.optim.Optimizer):
        raise ConfigError("optimizer", f"must be a torch.optim.Optimizer, got {type(value).__name__}")
    return value


def _functions(name: str) -> Callable[[object], list[Callable[..., torch.Tensor]]]:
    def check(value: object) -> list[Callable[..., torch.Tensor]]:
        given = list(value) if isinstance(value, (list, tuple)) else [value]
        functions = [each for each in given if callable(each)]
        if len(functions) != len(given):
            raise ConfigError(name, f"must be a function of (output, label), or a list of them, got {value!r}")
        return functions

    return check


def _weights(value: object) -> list[float]:
    weights = list(value) if isinstance(value, (list, tuple)) else []
    if not weights or not all(isinstance(each, (int, float)) and each >= 0 for each in weights):
        raise ConfigError("loss_weights", f"must be a list of numbers >= 0, got {value!r}")
    return [float(each) for each in weights]


def _shapes(value: object) -> list[tuple[int, ...]]:
    shapes = [tuple(each) for each in value] if isinstance(value, (list, tuple)) else []
    if not shapes or not all(shape and shape[0] == -1 and min(shape[1:], default=1) > 0 for shape in shapes):
        raise ConfigError("input_shapes", f"must be one shape per feature column, -1 first, got {value!r}")
    return shapes


class TorchEstimator(DataFrameEstimator["TorchModel"]):
    """Trains a `torch.nn.Module` on a DataFrame's rows, on `num_proc` ranks.

    The model takes one tensor per feature column, in the type of its parameters, and gives one output per label
    column; `loss` is called with (output, label). The learning rate is multiplied by the number of ranks, and the
    gradient is the mean over all rows of a step. With a `store` each epoch leaves a checkpoint, and fitting again under
    the same `run_id` goes on after the last one; `epochs` counts those of all fits. Without one, nothing is written.
    Layers that normalize over a batch (BatchNorm) see a rank's own rows: keep `batch_size` well above 1 for them.

    `fit` blocks until the ranks have ended; raises `ConfigError`, `DataError` and `SlotsError` before anything runs,
    `DataError` for null or ragged rows once they are read, `RankFailed` for what else a rank raises.
    """

    _prefix = "pytorch"

    model = param("model", "the torch.nn.Module to train", _model)
    optimizer = param("optimizer", "made from the model's parameters", _optimizer)
    loss = param("loss", "function of (output, label), one for all labels or one each", _functions("loss"))
    loss_weights = param("loss_weights", "share of each label's loss; equal shares", _weights)
    metrics = param("metrics", "functions of (output, label) to report as well", _functions("metrics"))
    input_shapes = param("input_shapes", "shape of each input, -1 first; (rows,) or (rows, length)", _shapes)

    def __init__(
        self,
        *,
        num_proc: int | None = None,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Loss | Sequence[Loss] | None = None,
        loss_weights: Sequence[float] | None = None,
        metrics: Sequence[Metric] | None = None,
        feature_cols: Sequence[str] | None = None,
        label_cols: Sequence[str] | None = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        validation: float | str | None = None,
        batch_size: int | None = None,
        val_batch_size: int | None = None,
        epochs: int | None = None,
        shuffle: bool | None = None,
        random_seed: int | None = None,
        store: FilesystemStore | None = None,
        run_id: str | None = None,
        verbose: int | None = None,
        **others: object,
    ) -> None:
        """Set parameters by name. Of horovod.spark's others some are ignored, with a warning, the rest refused."""
        given = {name: value for name, value in locals().items() if name not in ("self", "others", "__class__")}
        super().__init__()
        self._set(**{name: value for name, value in given.items() if value is not None})
        refuse_unknown({name for name, value in others.items() if value is not None}, given)

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

    def setLossWeights(self, value: Sequence[float] | None) -> Self:
        return self._set(loss_weights=value)

    def getLossWeights(self) -> list[float] | None:
        return self._value(self.loss_weights)

    def setMetrics(self, value: Sequence[Metric]) -> Self:
        return self._set(metrics=value)

    def getMetrics(self) -> list[Metric]:
        metrics = self._value(self.metrics)
        return [] if metrics is None else [*metrics]

    def setInputShapes(self, value: Sequence[Sequence[int]] | None) -> Self:
        return self._set(input_shapes=value)

    def getInputShapes(self) -> list[tuple[int, ...]] | None:
        return self._value(self.input_shapes)

    def _check(self) -> None:
        features, labels, shapes = self.getFeatureCols(), self.getLabelCols(), self.getInputShapes()
        if shapes is not None and len(shapes) != len(features):
            raise ConfigError("input_shapes", f"has {len(shapes)} shapes for {len(features)} feature columns")
        if len(self.getLoss()) not in (1, len(labels)):
            raise ConfigError("loss", f"has {len(self.getLoss())} functions for {len(labels)} label columns")
        weights = self.getLossWeights()
        if weights is not None and len(weights) != len(labels):
            raise ConfigError("loss_weights", f"has {len(weights)} weights for {len(labels)} label columns")
        dtype_of(self.getModel())
        of_model = {id(parameter) for parameter in self.getModel().parameters()}
        updated = [parameter for group in self.getOptimizer().param_groups for parameter in group["params"]]
        if not all(id(parameter) in of_model for parameter in updated):
            raise ConfigError(
                "optimizer", "updates parameters that are not the model's; make it from model.parameters()"
            )

    def _read(self, checkpoint: bytes) -> tuple[int, int]:
        saved = Checkpoint.load(checkpoint)
        return saved.epoch, saved.seed

    def _task(self, fit: Fit) -> Callable[[], bytes | None]:
        losses, labels = self.getLoss(), self.getLabelCols()
        weights = self.getLossWeights() or [1.0 / len(labels)] * len(labels)
        job = TorchJob(
            model=self.getModel(),
            optimizer=self.getOptimizer(),
            losses=tuple(losses if len(losses) == len(labels) else losses * len(labels)),
            loss_weights=tuple(weights),
            metrics=tuple(self.getMetrics()),
            label_cols=tuple(labels),
            inputs=self._inputs(),
            rows=fit.rows,
            epochs=fit.epochs,
            start=Checkpoint(epoch=fit.finished, seed=fit.seed),
            store=fit.store,
            run_id=fit.run_id,
            verbose=fit.verbose,
        )
        return functools.partial(train, job)

    def _model(self, fit: Fit, checkpoint: bytes) -> "TorchModel":
        saved = Checkpoint.load(checkpoint)
        assert saved.model is not None and saved.outputs is not None
        # A copy: fitting again, with another seed for example, starts from the weights that the user gave.
        model = copy.deepcopy(self.getModel())
        model.load_state_dict(saved.model)
        return TorchModel(
            model=model,
            feature_columns=self.getFeatureCols(),
            label_columns=self.getLabelCols(),
            input_shapes=self.getInputShapes(),
            outputs=[Output(dtype, tuple(shape)) for dtype, shape in saved.outputs],
            history=saved.history,
            run_id=fit.run_id,
        )

    def _inputs(self) -> Inputs:
        return _inputs(self.getModel(), self.getFeatureCols(), self.getInputShapes())


class TorchModel(DataFrameModel):
    """A trained model; `transform` adds one column per label, a number or an array for each row."""

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        feature_columns: Sequence[str],
        label_columns: Sequence[str],
        outputs: Sequence[Output],
        input_shapes: Sequence[Sequence[int]] | None = None,
        history: Sequence[Mapping[str, float]] = (),
        run_id: str = "",
    ) -> None:
        super().__init__(feature_columns=feature_columns, label_columns=label_columns, history=history, run_id=run_id)
        self._model, self._outputs, self._shapes = model, list(outputs), input_shapes

    def getModel(self) -> torch.nn.Module:
        return self._model

    def _predictor(
        self, names: Sequence[str]
    ) -> tuple[Callable[[Iterator[tuple[pd.Series, ...]]], Iterator[pd.DataFrame]], list[str]]:
        predictor = Predictor(
            model=cloudpickle.dumps(self._model),
            inputs=_inputs(self._model, self.getFeatureColumns(), self._shapes),
            label_cols=tuple(self.getLabelColumns()),
            names=tuple(names),
        )
        return predictor, [column_type(output.dtype, output.shape) for output in self._outputs]


def _inputs(model: torch.nn.Module, features: Sequence[str], shapes: Sequence[Sequence[int]] | None) -> Inputs:
    return Inputs(
        columns=tuple(features),
        shapes=None if shapes is None else tuple(tuple(shape) for shape in shapes),
        dtype=dtype_of(model),
    )
