"""Gradient tape that returns gradients reduced over all ranks."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

from farandole.core.operations.compression import Compressor
from farandole.core.operations.reduction import Average
from farandole.core.process_sets.process_set import ProcessSet, global_process_set
from farandole.tensorflow.compression import Compression
from farandole.tensorflow.reducer import Gradient, Groups, Reducer, ReducerOptions, Source, choose_options
from farandole.tensorflow.tracing import as_written

Layer: TypeAlias = tf.keras.layers.Layer
Nested: TypeAlias = object  # a tensor, or a structure of them, as tf.nest has them
Pairs: TypeAlias = list[tuple[Source, Gradient]]


class _Front:
    """Class that `DistributedGradientTape` puts in front of a tape's class.

    Its attributes have slots, because the instance shares its `__dict__` with the wrapped tape.
    """

    __slots__ = ("_local_layers", "_reducer", "_within_jacobian")

    _reducer: Reducer
    _local_layers: Sequence[Layer]
    # Set while `jacobian` runs, which calls `gradient` for each row.
    _within_jacobian: bool

    def register_local_source(self, source: Source) -> None:
        """Exclude the gradient of `source`, a variable, from the reduction."""
        self._reducer.keep_local(source)

    @as_written
    def gradient(
        self,
        target: object,
        sources: Nested,
        output_gradients: object = None,
        use_generic_names: bool = False,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Nested:
        """Return the gradients, reduced over all ranks, in the structure of `sources`.

        With `use_generic_names` the operations' names do not include the variables'. Blocks in eager mode until every
        rank has taken part.
        """
        gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)  # type: ignore[misc]
        if self._within_jacobian:
            return gradients
        reduced, _ = self._reduce(gradients, sources, use_generic_names)
        return tf.nest.pack_sequence_as(sources, reduced)

    @as_written
    def get_local_and_global_gradients(
        self, target: object, sources: Nested, output_gradients: object = None, use_generic_names: bool = False
    ) -> tuple[Pairs, Pairs]:
        """Return the result of `gradient` as two lists of (source, gradient): for local sources, and for all others.

        Only the gradients in the second list, and so their norm, are equal on all ranks.
        """
        gradients = super().gradient(target, sources, output_gradients)  # type: ignore[misc]
        reduced, local = self._reduce(gradients, sources, use_generic_names)
        pairs = list(zip(tf.nest.flatten(sources), reduced, strict=True))
        own = [pair for pair, is_own in zip(pairs, local, strict=True) if is_own]
        return own, [pair for pair, is_own in zip(pairs, local, strict=True) if not is_own]

    @as_written
    def jacobian(self, *args: object, **kwargs: object) -> Nested:
        """Return the Jacobian of this rank's target, without a reduction."""
        return self._alone(super().jacobian, *args, **kwargs)  # type: ignore[misc]

    @as_written
    def batch_jacobian(self, *args: object, **kwargs: object) -> Nested:
        """Return the Jacobian of each row of this rank's target, without a reduction."""
        return self._alone(super().batch_jacobian, *args, **kwargs)  # type: ignore[misc]

    def _alone(self, differentiate: Callable[..., Nested], *args: object, **kwargs: object) -> Nested:
        self._within_jacobian = True
        try:
            return differentiate(*args, **kwargs)
        finally:
            self._within_jacobian = False

    def _reduce(self, gradients: Nested, sources: Nested, generic: bool) -> tuple[list[Gradient], list[bool]]:
        # Not earlier, because a layer may be built within the tape's block.
        for layer in self._local_layers:
            for variable in layer.trainable_weights:
                self._reducer.keep_local(variable)
        flat = tf.nest.flatten(sources)
        reduced = self._reducer(tf.nest.flatten(gradients), flat, generic)
        return reduced, [self._reducer.is_local(source) for source in flat]


class _DistributedTape(_Front, tf.GradientTape):  # type: ignore[misc]
    __slots__ = ()


@as_written
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor[tf.Tensor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Return a tape, of a subclass of `gradtape`'s class, whose `gradient` reduces the gradients over all ranks.

    The tape shares its recording with `gradtape`. `groups`, a number or lists of variables, reduces gradients together;
    in eager mode all gradients are reduced together. Gradients of local sources (`register_local_source`) are divided
    by the number of ranks unless `scale_local_gradients` is False. With `process_set` its members reduce among
    themselves, and the others get their own gradients. Raises `ValueError` for contradictory settings.
    """
    given = ReducerOptions(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        groups=groups,
        scale_local=scale_local_gradients,
        device_dense=device_dense,
        device_sparse=device_sparse,
    )
    options = choose_options("DistributedGradientTape", op, gradient_predivide_factor, num_groups, given)
    base = type(gradtape)
    kind: type[_Front] = _DistributedTape
    if base is not tf.GradientTape:
        kind = type(base.__name__, (_Front, base), {"__slots__": (), "__module__": base.__module__})
    made = kind.__new__(kind)
    # Shared, not copied, so that both tapes stop recording when one of them leaves its block.
    object.__setattr__(made, "__dict__", gradtape.__dict__)
    made._reducer = Reducer("DistributedGradientTape", options)
    made._local_layers = ()
    made._within_jacobian = False
    return made


@as_written
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor[tf.Tensor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Layer | Sequence[Layer] | None = None,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Return a `DistributedGradientTape` that excludes the gradients of `local_layers` from the reduction.

    Raises `ValueError` for objects other than layers.
    """
    layers = [local_layers] if isinstance(local_layers, tf.keras.layers.Layer) else list(local_layers or ())
    strangers = [type(layer).__name__ for layer in layers if not isinstance(layer, tf.keras.layers.Layer)]
    if strangers:
        raise ValueError(f"local_layers must be tf.keras.layers.Layer, got {', '.join(strangers)}")
    made = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    made._local_layers = layers
    return made
