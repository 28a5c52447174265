"""Optimizers, models and files of Keras 3, on each of its backends."""

from collections.abc import Hashable, Sequence
from types import ModuleType

import keras
from keras.optimizers import LossScaleOptimizer

from farandole.keras.backend import Optimizer, Schedule, Tensor, Variable
from farandole.keras.exchange import Exchange, keyed
from farandole.keras.front import Front, mix_in
from farandole.keras.generation import Distribution
from farandole.keras.saved_files import load

__all__ = [
    "KINDS",
    "Distributed",
    "ScaledDistributed",
    "build",
    "distribute",
    "drop_sums",
    "has_legacy",
    "has_schedule",
    "library",
    "load",
    "rate",
    "set_schedule",
    "sums",
    "take_scaler_in_front",
    "velocities",
]

has_legacy = False
library: ModuleType = keras
KINDS: tuple[type, ...] = (keras.optimizers.Optimizer,)
_WITH_STEPS = (keras.optimizers.SGD, keras.optimizers.RMSprop)  # the momentum of others, as of Muon, holds no rate


class _Front(Front, keras.optimizers.Optimizer):  # type: ignore[misc]  # Keras ships no types
    def _key_of(self, variable: Variable) -> Hashable:
        key: Hashable = self._var_key(variable)
        return key

    @classmethod
    def _wrap_another(cls, optimizer: Optimizer) -> Optimizer:
        return _wrap(optimizer, cls._exchange.again())


class Distributed(_Front):
    """Class in front of an optimizer that reduces gradients before they are clipped and applied.

    Gradients of several passes are reduced in the last pass."""

    def apply(self, grads: Sequence[Tensor], trainable_variables: Sequence[Variable] | None = None) -> None:
        """Reduce and apply the gradients; with several passes per step, in the last pass.

        Blocks until every rank has taken part, unless it is only traced."""
        if self._exchange.held_by_another:
            raise RuntimeError(
                f"this distributed {type(self).__name__} was given to another optimizer, such as the "
                "LossScaleOptimizer that compile() makes for mixed_float16, which skips steps on some ranks only: call "
                "DistributedOptimizer(LossScaleOptimizer(...)), or use one of farandole.keras.callbacks in fit()"
            )
        grads = list(grads)
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if trainable_variables is not None and len(grads) != len(variables):
            raise ValueError(f"{len(grads)} gradients were given for {len(variables)} variables")
        # Otherwise Keras raises an error for the number of gradients.
        if len(grads) == len(variables):
            keys = [self._var_key(variable) for variable in variables]
            if self.gradient_accumulation_steps:
                accumulated = [
                    grad is not None and not self._overwrite_variable_with_gradient(variable)
                    for grad, variable in zip(grads, variables, strict=True)
                ]
                self._exchange.pending = [
                    key if is_kept else None for key, is_kept in zip(keys, accumulated, strict=True)
                ]
            else:
                grads = self._exchange.reduce(grads, keys)
        super().apply(grads, trainable_variables)

    def _clip_gradients(self, grads: list[Tensor]) -> list[Tensor]:
        """Reduce accumulated gradients: Keras calls this with them when an update is due."""
        keys, self._exchange.pending = self._exchange.pending, None
        if keys is not None:
            grads = self._reduce_sums(grads, keys)
        clipped: list[Tensor] = super()._clip_gradients(grads)
        return clipped

    def _reduce_sums(self, grads: list[Tensor], keys: list[Hashable | None]) -> list[Tensor]:
        passes = self.gradient_accumulation_steps
        if self._exchange.summed:
            grads = [grad * passes for grad in grads]
        held = iter(grads)
        given = [None if key is None else next(held) for key in keys]

        def reduce() -> list[Tensor]:
            return [grad for grad in self._exchange.reduce(given, keys) if grad is not None]

        if keras.backend.backend() != "jax":
            return reduce()
        # On JAX, whose functions have no state, Keras computes an update in each pass and drops it unless it is due.
        due = (self._iterations + 1) % passes == 0
        reduced: list[Tensor] = keras.ops.cond(due, reduce, lambda: list(grads))
        return reduced

    def __setattr__(self, name: str, value: object) -> None:
        # Keras' LossScaleOptimizer makes this assignment when it wraps an optimizer.
        if name == "loss_scale_factor" and value is None:
            self._exchange.held_by_another = True
        super().__setattr__(name, value)


class ScaledDistributed(_Front):
    """Class in front of a loss scaler, so that either all ranks skip a step or none; the inner one is `Distributed`."""

    def check_finite(self, grads: Sequence[Tensor]) -> Tensor:
        """Return whether the gradients are finite on all ranks; blocks as `apply` does."""
        return self._exchange.agree(super().check_finite(grads))


def distribute(optimizer: Optimizer, how: Distribution) -> Optimizer:
    """See `Generation`. Several passes are Keras' `gradient_accumulation_steps`."""
    _check(optimizer)
    inner = optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer
    _check(inner)
    summed = _accumulate(inner, how.passes) and not how.average
    groups = keyed(how.groups, inner._var_key)
    exchange = Exchange(how.options, name=how.name, groups=groups, scale_local=how.scale_local, summed=summed)
    return _wrap(optimizer, exchange)


def build(optimizer: Optimizer, trained: Sequence[Variable]) -> list[Variable]:
    """See `Generation`."""
    if not optimizer.built:
        optimizer.build(trained)
    held: list[Variable] = optimizer.variables
    return held


def has_schedule(optimizer: Optimizer) -> bool:
    """See `Generation`."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return isinstance(inner, keras.optimizers.Optimizer) and not isinstance(inner._learning_rate, keras.Variable)


def rate(optimizer: Optimizer) -> Variable | Schedule:
    """See `Generation`."""
    return getattr(optimizer, "inner_optimizer", optimizer)._learning_rate


def set_schedule(optimizer: Optimizer, schedule: Schedule) -> None:
    """See `Generation`."""
    getattr(optimizer, "inner_optimizer", optimizer)._learning_rate = schedule


def velocities(optimizer: Optimizer) -> list[Variable]:
    """See `Generation`."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not inner.built or not isinstance(inner, _WITH_STEPS) or not inner.momentum:
        return []
    held = getattr(inner, "momentums", None) or getattr(inner, "_momentums", None) or ()
    return [velocity for velocity in held if velocity is not None]


def sums(optimizer: Optimizer) -> list[Variable]:
    """See `Generation`."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(inner._accumulated_gradients) if inner.gradient_accumulation_steps else []


def drop_sums(optimizer: Optimizer) -> None:
    """See `Generation`. All sums are variables of the optimizer."""


def take_scaler_in_front(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer like `optimizer`, a LossScaleOptimizer around a distributed one, that agrees with all ranks.

    Raises `TypeError` for other optimizers."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(optimizer, Front) or not isinstance(inner, Distributed):
        raise TypeError(f"expected a LossScaleOptimizer around a distributed optimizer, got {optimizer!r}")
    inner._exchange.held_by_another = False
    return mix_in(ScaledDistributed, optimizer, inner._exchange)


def _wrap(optimizer: Optimizer, exchange: Exchange) -> Optimizer:
    """Return an optimizer like `optimizer` that exchanges its gradients through `exchange`."""
    if not isinstance(optimizer, LossScaleOptimizer):
        return mix_in(Distributed, optimizer, exchange)
    vars(optimizer)["inner_optimizer"] = mix_in(Distributed, optimizer.inner_optimizer, exchange)
    return mix_in(ScaledDistributed, optimizer, exchange)


def _check(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"expected an optimizer of Keras {keras.__version__}, got {type(optimizer).__name__}")
    if isinstance(optimizer, Front):
        raise ValueError(f"the {type(optimizer).__name__} is distributed already")


def _accumulate(optimizer: Optimizer, passes: int) -> bool:
    """Make Keras accumulate the gradients of `passes` passes; return whether the optimizer was changed for that."""
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, got {passes}")
    own = optimizer.gradient_accumulation_steps
    if passes > 1:
        if own not in (None, passes):
            raise ValueError(f"backward_passes_per_step={passes} contradicts gradient_accumulation_steps={own}")
        if optimizer.built and own is None:
            raise ValueError(
                "the optimizer has been built without room for several passes: give backward_passes_per_step before "
                "it is used, or make it with gradient_accumulation_steps"
            )
        optimizer.gradient_accumulation_steps = passes
    if optimizer.gradient_accumulation_steps and not _adds_up(type(optimizer)):
        raise ValueError(
            f"{type(optimizer).__name__} adds up gradients in a way of its own, so there is no telling when they are "
            "to be reduced; leave out backward_passes_per_step and gradient_accumulation_steps"
        )
    return passes > 1 and own is None


def _adds_up(kind: type) -> bool:
    """Return whether a class accumulates gradients as Keras does, and passes the sums to `_clip_gradients`."""
    return all(
        getattr(kind, name, None) is getattr(keras.optimizers.Optimizer, name)
        for name in ("apply", "_backend_apply_gradients", "_clip_gradients")
    )
