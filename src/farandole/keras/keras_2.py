"""Optimizers, models and files of tf_keras, which is Keras 2. It runs on TensorFlow only.

Both kinds of its optimizers, current and legacy, add up the gradients of replicas in a separate method, before they are
clipped and before a loss scaler checks them for infinities. The ranks' gradients are reduced in that method."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import keras
import tensorflow as tf
import tf_keras

from farandole.keras.backend import Model, Optimizer, Schedule, Tensor, Variable
from farandole.keras.exchange import Exchange, keyed
from farandole.keras.front import Front, mix_in
from farandole.keras.generation import Distribution
from farandole.keras.saved_files import with_maker
from farandole.tensorflow.aggregation import Aggregation
from farandole.tensorflow.reducer import identify, spread_infinities
from farandole.tensorflow.tracing import as_written

Pairs: TypeAlias = list[tuple[Tensor | None, Variable]]

has_legacy = True
library: ModuleType = tf_keras
LEGACY: type[Optimizer] = tf_keras.optimizers.legacy.Optimizer
KINDS: tuple[type, ...] = (tf_keras.optimizers.Optimizer, LEGACY)
_SEVERAL_PASSES = "backward_passes_per_step > 1 and a LossScaleOptimizer of Keras 2 do not go together"


class _Front(Front):
    _aggregation: Aggregation  # an attribute of the class, like the exchange

    def _key_of(self, variable: Variable) -> Hashable:
        return identify(variable)

    @classmethod
    def _wrap_another(cls, optimizer: Optimizer) -> Optimizer:
        return _wrap(optimizer, cls._exchange.again(), cls._aggregation.again())


class _Distributed(_Front):
    """Class in front of an optimizer that reduces gradients before they are clipped and applied.

    Gradients of several passes are reduced in the last pass."""

    # Attributes of the class, like the exchange.
    _is_applying = False  # a call of apply_gradients is running
    _has_joined = False  # it has reduced

    @as_written
    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Tensor | None, Variable]], name: str | None = None, **options: bool
    ) -> tf.Operation | None:
        """Reduce the gradients, unless Keras' `options` mark them as reduced, and apply them.

        Blocks in eager mode until every rank has taken part. All passes of a step but the last only add up gradients
        and increment the iterations."""
        reduced = options.get("skip_gradients_aggregation") or not options.get("experimental_aggregate_gradients", True)
        apply = super().apply_gradients  # type: ignore[misc]  # of the user's class
        if reduced:
            return apply(grads_and_vars, name=name, **options)
        pairs = list(grads_and_vars)
        if self._aggregation.passes == 1:
            type(self)._has_joined = all(gradient is None for gradient, _ in pairs)
            type(self)._is_applying = True
            try:
                applied = apply(pairs, name=name, **options)
            finally:
                type(self)._is_applying = False
            if not self._has_joined:
                raise RuntimeError(
                    f"{type(self).__name__}.apply_gradients adds up no gradients of replicas, so those of ranks "
                    "were not reduced either; let it call its base class, or train with a DistributedGradientTape"
                )
            return applied
        gradients, variables = zip(*pairs, strict=True)
        if self._exchange.options.sparse_as_dense:
            gradients = tuple(None if each is None else tf.convert_to_tensor(each) for each in gradients)
        with tf.init_scope():  # a branch of a condition cannot make variables
            _build(self, variables)
        sums = self._aggregation.add(gradients, variables, lambda sums: self._reduce(sums, variables))

        def step() -> None:
            apply(list(zip(sums, variables, strict=True)), name=name, experimental_aggregate_gradients=False)

        def skip() -> None:
            self.iterations.assign_add(1)  # type: ignore[attr-defined]

        return self._aggregation.apply(sums, step, skip)

    def _join(self, pairs: Pairs) -> Pairs:
        if self._aggregation.passes > 1:
            raise ValueError(_SEVERAL_PASSES)
        type(self)._has_joined = True
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        if not self._is_applying and not self._exchange.alone:
            # A loss scaler calls this to check the result. All ranks have to skip the same steps.
            local = [identify(variable) in self._exchange.local for variable in variables]
            gradients = spread_infinities(gradients, local)
        return list(zip(self._reduce(gradients, variables), variables, strict=True))

    def _reduce(self, gradients: Sequence[Tensor | None], variables: Sequence[Variable]) -> list[Tensor]:
        return self._exchange.reduce(gradients, [identify(variable) for variable in variables])


class _Current(_Distributed):
    @as_written
    def aggregate_gradients(self, grads_and_vars: Pairs) -> Pairs:
        """Add up the gradients of replicas, and reduce them over all ranks."""
        return self._join(super().aggregate_gradients(grads_and_vars))  # type: ignore[misc]


class _Legacy(_Distributed):
    @as_written
    def _aggregate_gradients(self, grads_and_vars: Pairs) -> Pairs:
        return self._join(super()._aggregate_gradients(grads_and_vars))  # type: ignore[misc]


class _Scaled(_Front):
    """Class in front of a loss scaler, whose inner optimizer exchanges gradients."""


def distribute(optimizer: Optimizer, how: Distribution) -> Optimizer:
    """See `Generation`."""
    if keras.backend.backend() != "tensorflow":
        raise ValueError(f"tf_keras runs on TensorFlow, but KERAS_BACKEND is {keras.backend.backend()}: leave it out")
    for each in (optimizer, getattr(optimizer, "inner_optimizer", optimizer)):
        if not isinstance(each, KINDS):
            raise TypeError(f"expected an optimizer of tf_keras {tf_keras.__version__}, got {type(each).__name__}")
        if isinstance(each, Front):
            raise ValueError(f"the {type(each).__name__} is distributed already")
    groups = keyed(how.groups, identify)
    exchange = Exchange(how.options, name=how.name, groups=groups, scale_local=how.scale_local)
    return _wrap(optimizer, exchange, Aggregation(how.passes, how.average))


def build(optimizer: Optimizer, trained: Sequence[Variable]) -> list[Variable]:
    """See `Generation`."""
    _build(optimizer, trained)
    held: list[Variable] = optimizer.variables()  # a method of legacy optimizers, and a callable list of others
    return held


def has_schedule(optimizer: Optimizer) -> bool:
    """See `Generation`."""
    return isinstance(rate(optimizer), tf_keras.optimizers.schedules.LearningRateSchedule)


def rate(optimizer: Optimizer) -> Variable | Schedule:
    """See `Generation`."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner._hyper["learning_rate"] if isinstance(inner, LEGACY) else inner._learning_rate


def set_schedule(optimizer: Optimizer, schedule: Schedule) -> None:
    """See `Generation`."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, LEGACY):
        inner._hyper["learning_rate"] = schedule
    else:
        inner._learning_rate = schedule


def velocities(optimizer: Optimizer) -> list[Variable]:
    """See `Generation`."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, LEGACY):
        return [slots["momentum"] for slots in inner._slots.values() if "momentum" in slots]
    if not getattr(inner, "momentum", 0):
        return []
    held: list[Variable] = getattr(inner, "momentums", None) or getattr(inner, "_momentums", [])
    return held


def sums(optimizer: Optimizer) -> list[Variable]:
    """See `Generation`. An `Aggregation` holds the sums, in variables that are not the optimizer's."""
    return []


def drop_sums(optimizer: Optimizer) -> None:
    """See `Generation`."""
    if isinstance(optimizer, _Front):
        optimizer._aggregation.clear()


def load(filepath: str | Path, objects: Mapping[str, object]) -> Model:
    """See `Generation`."""
    return tf_keras.models.load_model(filepath, custom_objects=with_maker(filepath, objects))


def _wrap(optimizer: Optimizer, exchange: Exchange, aggregation: Aggregation) -> Optimizer:
    """Return an optimizer like `optimizer` that exchanges its gradients through `exchange`."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None and aggregation.passes > 1:
        raise ValueError(_SEVERAL_PASSES)
    front: type[_Front] = _Legacy if isinstance(optimizer, LEGACY) else _Current
    if inner is not None:
        vars(optimizer)["_optimizer"] = _wrap(inner, exchange, aggregation)
        front = _Scaled
    return mix_in(front, optimizer, exchange, _aggregation=aggregation)


def _build(optimizer: Optimizer, trained: Sequence[Variable]) -> None:
    if isinstance(optimizer, LEGACY):
        optimizer._create_all_weights(trained)
    else:
        optimizer.build(trained)
        # With a schedule, this call makes the variable of the learning rate.
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if hasattr(inner, "_learning_rate"):  # a user's class may lack it
            inner._compute_current_learning_rate()
