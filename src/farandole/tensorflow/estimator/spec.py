"""Result, modes and settings of a model function."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import tensorflow as tf

from farandole.tensorflow.estimator.export import ExportOutput, PredictOutput

Tensor: TypeAlias = tf.Tensor
Operation: TypeAlias = tf.Operation | tf.Tensor
Metric: TypeAlias = tuple[Tensor, Operation]  # value, update
Predictions: TypeAlias = Tensor | Mapping[str, Tensor]
Hook: TypeAlias = tf.compat.v1.train.SessionRunHook
Scaffold: TypeAlias = tf.compat.v1.train.Scaffold

SERVING = "serving_default"  # tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY


class ModeKeys:
    """Modes in which a model function is called."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Settings of a run, for model functions with an argument `config`."""

    model_dir: str
    save_checkpoints_secs: float
    save_summary_steps: int = 100  # steps between two points of a curve
    keep_checkpoint_max: int = 5
    tf_random_seed: int
    global_id_in_cluster: int  # the rank
    num_worker_replicas: int  # the number of ranks

    @property
    def is_chief(self) -> bool:
        """Return True on the rank that writes checkpoints and summaries, rank 0."""
        return self.global_id_in_cluster == 0

    @property
    def task_id(self) -> int:
        """The rank."""
        return self.global_id_in_cluster


class _Fields(NamedTuple):
    mode: str
    predictions: Predictions | None
    loss: Tensor | None
    train_op: Operation | None
    eval_metric_ops: dict[str, Metric]
    export_outputs: dict[str, ExportOutput]
    training_chief_hooks: tuple[Hook, ...]
    training_hooks: tuple[Hook, ...]
    scaffold: Scaffold | None
    evaluation_hooks: tuple[Hook, ...]
    prediction_hooks: tuple[Hook, ...]


class EstimatorSpec(_Fields):
    """Tensors and operations that a model function returns in one of its modes; a named tuple.

    Training needs `loss` and `train_op`, evaluation `loss`, prediction `predictions`. `eval_metric_ops` holds pairs
    (value, update) of `tf.compat.v1.metrics`. Without `export_outputs` the predictions are exported. Raises
    `ValueError` for a missing field or one of the wrong type.
    """

    __slots__ = ()

    def __new__(
        cls,
        mode: str,
        predictions: Predictions | None = None,
        loss: Tensor | float | None = None,
        train_op: Operation | None = None,
        eval_metric_ops: Mapping[str, Metric] | None = None,
        export_outputs: Mapping[str, ExportOutput] | None = None,
        training_chief_hooks: Sequence[Hook] | None = None,
        training_hooks: Sequence[Hook] | None = None,
        scaffold: Scaffold | None = None,
        evaluation_hooks: Sequence[Hook] | None = None,
        prediction_hooks: Sequence[Hook] | None = None,
    ) -> Self:
        """Check the fields that `mode` needs."""
        needed: dict[str, tuple[str, ...]] = {
            ModeKeys.TRAIN: ("loss", "train_op"),
            ModeKeys.EVAL: ("loss",),
            ModeKeys.PREDICT: ("predictions",),
        }
        if mode not in needed:
            raise ValueError(f"mode must be one of {', '.join(map(repr, needed))}, got {mode!r}")
        given = {"loss": loss, "train_op": train_op, "predictions": predictions}
        missing = [name for name in needed[mode] if given[name] is None]
        if missing:
            raise ValueError(f"mode {mode!r} needs {' and '.join(missing)}")
        hooks = (training_chief_hooks, training_hooks, evaluation_hooks, prediction_hooks)
        chief, training, evaluation, prediction = (_hooks(each) for each in hooks)
        return super().__new__(
            cls,
            mode,
            predictions,
            None if loss is None else _scalar(loss),
            train_op,
            {name: _metric(name, pair) for name, pair in (eval_metric_ops or {}).items()},
            _exported(export_outputs, predictions if mode == ModeKeys.PREDICT else None),
            chief,
            training,
            scaffold,
            evaluation,
            prediction,
        )


def _scalar(loss: Tensor | float) -> Tensor:
    shape = tf.convert_to_tensor(loss).shape
    if shape.rank not in (None, 0) and shape.num_elements() != 1:
        raise ValueError(f"loss must be one number, the mean over the batch; it has the shape {shape}")
    return tf.reshape(loss, [])


def _metric(name: str, pair: object) -> Metric:
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ValueError(
            f"eval_metric_ops[{name!r}] must be a pair (value, update) of tf.compat.v1.metrics, got "
            f"{type(pair).__name__}"
        )
    return pair


def _hooks(given: Sequence[Hook] | None) -> tuple[Hook, ...]:
    hooks = tuple(given or ())
    for each in hooks:
        if not isinstance(each, tf.compat.v1.train.SessionRunHook):
            raise ValueError(f"hooks must be of tf.compat.v1.train.SessionRunHook, got {type(each).__name__}")
    return hooks


def _exported(given: Mapping[str, ExportOutput] | None, predictions: Predictions | None) -> dict[str, ExportOutput]:
    if given is None:
        return {} if predictions is None else {SERVING: PredictOutput(predictions)}
    for name, each in given.items():
        if not isinstance(each, ExportOutput):
            raise ValueError(f"export_outputs[{name!r}] must be a PredictOutput or its like, got {type(each).__name__}")
    outputs = dict(given)
    if len(outputs) == 1:
        outputs.setdefault(SERVING, next(iter(outputs.values())))
    return outputs
