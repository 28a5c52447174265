"""Makes a Keras optimizer step with the gradients of all ranks, on each of Keras' backends."""

import warnings
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

import keras
from keras.optimizers import LossScaleOptimizer

from farandole.core.operations.compression import Compressor
from farandole.core.operations.gradients import predivided
from farandole.core.operations.reduction import Average, Sum
from farandole.core.process_sets.process_set import ProcessSet, global_process_set, require_registered
from farandole.keras.backend import Options, Tensor
from farandole.keras.compression import Compression
from farandole.keras.exchange import Exchange

__all__ = [
    "Distributed",
    "DistributedOptimizer",
    "Front",
    "PartialDistributedOptimizer",
    "ScaledDistributed",
    "take_scaler_in_front",
]

F = TypeVar("F", bound="Front")


class Front(keras.optimizers.Optimizer):  # type: ignore[misc]  # Keras ships no types
    """The class that is derived from an optimizer's class; the result is still an optimizer of the user's class."""

    _exchange: Exchange
    _pattern: Exchange  # of the class: what others of it are made like

    # Keras saves an optimizer under its __class__, which a reader has to find: a saved model needs no farandole.
    @property  # type: ignore[misc]  # nobody assigns it
    def __class__(self) -> Any:
        return type(self).__bases__[1]

    def register_local_var(self, var: Any) -> None:
        """Train a variable with this rank's gradients only."""
        self._exchange.local.add(self._var_key(var))

    @classmethod
    def from_config(cls, config: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Make an optimizer of the wrapped class with `config`, distributed with the same options as this one.

        Variables that are local there are reduced here."""
        base: Any = cls.__bases__[1]
        return _distribute(base.from_config(config, *args, **kwargs), cls._pattern.again())

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Refuse to be copied or pickled: the copy would train on its own, without anybody noticing."""
        raise TypeError(
            f"a distributed {type(self).__name__} belongs to this rank and its job, and cannot be copied or pickled; "
            "save the model, and load it with farandole.keras.load_model"
        )


class Distributed(Front):
    """Reduces gradients before they are clipped and applied; those of several passes when they are complete."""

    def apply(self, grads: Sequence[Tensor], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce the gradients, and apply them; with several passes per step, when the last one has come.

        Blocks until every rank has taken part, if anything is done now and not only traced."""
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
        # Without variables Keras says what is wrong with other numbers of gradients.
        if len(grads) == len(variables):
            keys = [self._var_key(variable) for variable in variables]
            if self.gradient_accumulation_steps:
                given = [
                    grad is not None and not self._overwrite_variable_with_gradient(variable)
                    for grad, variable in zip(grads, variables, strict=True)
                ]
                self._exchange.pending = [key for key, there in zip(keys, given, strict=True) if there]
            else:
                grads = self._exchange.reduce(grads, keys)
        super().apply(grads, trainable_variables)

    def _clip_gradients(self, grads: list[Tensor]) -> list[Tensor]:
        """Reduce what was added up: Keras comes here with it, when an update is due."""
        keys, self._exchange.pending = self._exchange.pending, None
        if keys is not None:
            grads = self._reduce_sums(grads, keys)
        clipped: list[Tensor] = super()._clip_gradients(grads)
        return clipped

    def _reduce_sums(self, grads: list[Tensor], keys: list[Hashable]) -> list[Tensor]:
        passes = self.gradient_accumulation_steps
        if self._exchange.summed:
            grads = [grad * passes for grad in grads]
        if keras.backend.backend() != "jax":
            return self._exchange.reduce(grads, keys)
        # JAX' functions have no state: Keras makes an update in each pass there, and drops it unless it is due.
        due = (self._iterations + 1) % passes == 0
        reduced: list[Tensor] = keras.ops.cond(due, lambda: self._exchange.reduce(grads, keys), lambda: list(grads))
        return reduced

    def __setattr__(self, name: str, value: object) -> None:
        # By this assignment Keras' LossScaleOptimizer takes over another optimizer.
        if name == "loss_scale_factor" and value is None:
            self._exchange.held_by_another = True
        super().__setattr__(name, value)


class ScaledDistributed(Front):
    """Makes all ranks skip a step, or none: its inner optimizer is the one that exchanges gradients."""

    def check_finite(self, grads: Sequence[Tensor]) -> Tensor:
        """Return whether the gradients are finite on all ranks; blocks as `apply` does."""
        return self._exchange.agree(super().check_finite(grads))


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor[Tensor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Iterable[Iterable[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer like `optimizer`, of a subclass of its class, that steps with the gradients of all ranks.

    It shares options and state with `optimizer`, which should not be used any more, and is saved as if it were that
    one. Gradients are reduced before they are clipped. With `backward_passes_per_step`, which is Keras'
    `gradient_accumulation_steps`, those of that many passes are added up first, and divided by their number with
    `average_aggregated_gradients`. `groups`, a number or lists of variables, reduces gradients together. With
    `process_set` its members reduce among themselves, and the others step with their own gradients. What
    `register_local_var` names is not reduced, but divided by the number of ranks with `scale_local_gradients`.
    `device_dense` and `device_sparse` are Horovod's, and have no meaning here. With all ranks it can be called before
    `init()`, the first step cannot. Raises `TypeError` for what is no optimizer of Keras 3, and `ValueError` for one
    that is distributed already and for settings that contradict each other.
    """
    # Programs wrap and compile before `init()`, too; sets other than the global one exist only after it.
    if process_set is not global_process_set:
        require_registered(process_set, "DistributedOptimizer")
    if op not in (Average, Sum):
        raise ValueError("op currently only supports Average and Sum")
    if num_groups:
        warnings.warn("num_groups= is deprecated; use groups=", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if isinstance(groups, int) and groups <= 0:
        raise ValueError(f"groups should be a positive integer or a list of lists of variables, got {groups}")
    _check(optimizer)
    inner = optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer
    _check(inner)
    options = Options(
        reduction=predivided(op, gradient_predivide_factor),
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    summed = _accumulate(inner, backward_passes_per_step) and not average_aggregated_gradients
    if groups is not None and not isinstance(groups, int):
        groups = [[inner._var_key(variable) for variable in group] for group in groups]
    exchange = Exchange(options, name=name, groups=groups, scale_local=scale_local_gradients, summed=summed)
    return _distribute(optimizer, exchange)


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor[Tensor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: int | Iterable[Iterable[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return what `DistributedOptimizer` does; the variables of `local_layers` train with this rank's gradients only.

    The layers must have been built; raises `ValueError` otherwise, too."""
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers or ())
    unbuilt = [layer.name for layer in layers if not layer.built]
    if unbuilt:
        raise ValueError(f"local_layers have no variables yet: build {', '.join(unbuilt)}, or call the model once")
    wrapped = DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for layer in layers:
        for variable in layer.trainable_variables:
            wrapped.register_local_var(variable)
    return wrapped


def take_scaler_in_front(optimizer: Any) -> Any:
    """Return an optimizer like `optimizer`, a LossScaleOptimizer around a distributed optimizer, that all ranks share.

    Raises `TypeError` for others."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(optimizer, Front) or not isinstance(inner, Distributed):
        raise TypeError(f"expected a LossScaleOptimizer around a distributed optimizer, got {optimizer!r}")
    inner._exchange.held_by_another = False
    return put_in_front(ScaledDistributed, optimizer, inner._exchange)


def _distribute(optimizer: Any, exchange: Exchange) -> Any:
    """Return an optimizer like `optimizer` that exchanges its gradients by `exchange`."""
    if not isinstance(optimizer, LossScaleOptimizer):
        return put_in_front(Distributed, optimizer, exchange)
    vars(optimizer)["inner_optimizer"] = put_in_front(Distributed, optimizer.inner_optimizer, exchange)
    return put_in_front(ScaledDistributed, optimizer, exchange)


def put_in_front(front: type[F], optimizer: Any, exchange: Exchange) -> F:
    """Return an optimizer of a subclass of `optimizer`'s class with `front` before it; it shares all that it has."""
    base = type(optimizer)
    names = {"__module__": base.__module__, "__doc__": base.__doc__, "_pattern": exchange}
    made: type[F] = type(base.__name__, (front, base), names)
    wrapped = made.__new__(made)
    # Past Keras' own __setattr__, which would track the variables once more.
    wrapped.__dict__.update(vars(optimizer), _exchange=exchange)
    return wrapped


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        kind = type(optimizer)
        older = (
            " of tf_keras, which is Keras 2: leave out TF_USE_LEGACY_KERAS, or train with a tape, "
            "farandole.tensorflow.DistributedGradientTape"
        )
        told = older if kind.__module__.startswith("tf_keras.") else ""
        raise TypeError(f"expected an optimizer of Keras {keras.__version__}, got {kind.__name__}{told}")
    if isinstance(optimizer, Front):
        raise ValueError(f"the {type(optimizer).__name__} is distributed already")


def _accumulate(optimizer: Any, passes: int) -> bool:
    """Have Keras add up the gradients of `passes` passes; return whether that is our doing."""
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
    """Return whether a class adds up gradients as Keras does: what is complete goes through `_clip_gradients`."""
    return all(
        getattr(getattr(kind, name, None), "__module__", "").startswith("keras.")
        for name in ("apply", "_backend_apply_gradients", "_clip_gradients")
    )
