"""Trial of the model and the loss with one row before training, for errors that name columns and shapes."""

import itertools
import traceback
from collections.abc import Callable, Mapping

import cloudpickle
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from farandole.data import ShardBatch
from farandole.errors import ConfigError
from farandole.estimators.trainers.first_row import SHAPE_ERRORS, first_line, refused_model
from farandole.estimators.trainers.run import Run
from farandole.estimators.trainers.torch.judge import Judge
from farandole.estimators.trainers.torch.losses import Loss
from farandole.spark.driver.messages import log_to_driver


def probe(judge: Judge, run: Run, sample: ShardBatch | None) -> None:
    """Run copies of the first row of `sample` through the model and the loss; do nothing if `sample` is None.

    Raises `ConfigError` for a model or a loss that does not take the columns' shapes, and for a label that torch's own
    losses would broadcast against the output. Logs a warning if a loss of the user's does so.
    """
    if sample is None:
        return
    job = judge.job
    rows = _row_count(sample)
    batch = ShardBatch({name: values[:1].repeat(rows, 0) for name, values in sample.columns.items()}, rows, 1.0)
    # The probe runs a copy, so that lazy layers of the model itself stay uninitialized.
    model = cloudpickle.loads(cloudpickle.dumps(job.model)).eval()
    with torch.inference_mode():
        try:
            outputs = judge.predict(model, batch)
        except ConfigError:
            raise
        except SHAPE_ERRORS as error:
            raise refused_model(_located(error), job.inputs.describe(run.rows.kinds)) from error
        for place, (output, label) in enumerate(judge.pairs(batch, outputs)):
            _check(job.losses.losses[place], judge.label_cols[place], output, label)


def _check(loss: Loss, name: str, output: Tensor, label: Tensor) -> None:
    shapes = f"label {name!r} has the shape {_shape(label)}, the model's output {_shape(output)}, without the rows"
    own = (getattr(loss, "__module__", None) or type(loss).__module__).startswith("torch.nn")
    of_classes = getattr(loss, "__name__", type(loss).__name__).replace("_", "").lower() in _OF_CLASSES
    if own and of_classes and output.dim() > 1 and output.shape[1] == 1:
        raise ConfigError("loss", f"compares classes, but the model gives one number per row; {shapes}")
    if own and not of_classes and label.numel() != output.numel() and label.shape != output.shape:
        raise ConfigError("label_cols", f"{shapes}; the loss would broadcast one against the other: make them equal")
    with _Broadcasting(len(label)) as broadcasting:
        try:
            value: object = loss(output, label)
        except SHAPE_ERRORS as error:
            raise ConfigError("loss", f"fails on the first row: {_located(error)}; {shapes}") from error
    if not isinstance(value, Tensor):
        raise ConfigError("loss", f"has to return a tensor, got {type(value).__name__}")
    if broadcasting.shapes is not None:
        log_to_driver(
            f"warning: the loss of {name!r} compares every row with every other one: it combines tensors of "
            f"{broadcasting.shapes} for {len(label)} rows; {shapes}"
        )


_OF_CLASSES = ("crossentropy", "crossentropyloss", "nllloss")


class _Broadcasting(TorchDispatchMode):
    """Records the first element-wise operation that broadcasts its arguments to rows x rows numbers."""

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows = rows
        self.shapes: str | None = None

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        given = [each for each in args if isinstance(each, Tensor)]
        if isinstance(result, Tensor) and len(given) > 1 and self.shapes is None and "mm" not in str(func):
            spread = list(result.shape).count(self._rows) > 1
            if spread and all(list(each.shape).count(self._rows) < 2 for each in given):
                self.shapes = " and ".join(str(list(each.shape)) for each in given)
        return result


def _row_count(sample: ShardBatch) -> int:
    """Return a number of rows that no dimension of the columns has, so that it identifies the dimension of rows."""
    taken = {size for values in sample.columns.values() for size in values.shape}
    return next(number for number in itertools.count(5, 2) if number not in taken)


def _located(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    place = f" ({last.filename}:{last.lineno})" if last is not None else ""
    return first_line(error) + place


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape[1:]))
