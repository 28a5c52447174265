"""Optimizer of tf.compat.v1.train, or of Keras, that steps with the gradients of all ranks."""

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import tensorflow as tf

from farandole.core.operations.compression import Compressor
from farandole.core.operations.reduction import Adasum, Average
from farandole.core.process_sets.process_set import ProcessSet, global_process_set
from farandole.tensorflow.aggregation import Aggregation
from farandole.tensorflow.compression import Compression
from farandole.tensorflow.reducer import Gradient, Groups, Reducer, ReducerOptions, Source, choose_options
from farandole.tensorflow.tracing import as_written

# An optimizer of tf.compat.v1.train or of Keras.
Optimizer: TypeAlias = tf.compat.v1.train.Optimizer
Pairs = Iterable[tuple[Gradient, Source]]


class _Distributed(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """Class that `DistributedOptimizer` puts in front of the class of a tf.compat.v1 optimizer."""

    _reducer: Reducer
    _aggregation: Aggregation

    def register_local_var(self, var: Source) -> None:
        """Exclude the gradient of `var` from the reduction."""
        self._reducer.keep_local(var)

    @as_written
    def compute_gradients(self, *args: object, **kwargs: object) -> list[tuple[Gradient, Source]]:
        """Compute the gradients and reduce them; takes the arguments of the optimizer's own method.

        With several passes per step, all but the last return the sums so far, which `apply_gradients` skips.
        """
        pairs = super().compute_gradients(*args, **kwargs)
        gradients, sources = [gradient for gradient, _ in pairs], [source for _, source in pairs]
        if self._reducer.options.sparse_as_dense:
            gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        reduced = self._aggregation.add(gradients, sources, lambda sums: self._reduce(sums, sources))
        return list(zip(reduced, sources, strict=True))

    @as_written
    def apply_gradients(self, grads_and_vars: Pairs, global_step: Source = None, name: str | None = None) -> object:
        """Apply the gradients; in all passes of a step but the last, only increment `global_step`."""
        pairs = list(grads_and_vars)
        if self._aggregation.passes == 1:
            return self._apply(pairs, global_step, name)
        return self._aggregation.apply(
            [gradient for gradient, _ in pairs],
            lambda: self._apply(pairs, global_step, name),
            lambda: None if global_step is None else global_step.assign_add(1),  # type: ignore[attr-defined]
        )

    def _reduce(self, gradients: Sequence[Gradient], sources: Sequence[Source]) -> list[Gradient]:
        return self._reducer(gradients, sources)

    def _apply(self, pairs: list[tuple[Gradient, Source]], global_step: Source, name: str | None) -> object:
        return super().apply_gradients(pairs, global_step, name)


class _Combining(_Distributed):
    """Class in front with op=Adasum: each rank steps with its own gradients, and Adasum combines the steps.

    If Adasum combined the gradients, an optimizer such as Adam would undo the scale.
    """

    def _reduce(self, gradients: Sequence[Gradient], sources: Sequence[Source]) -> list[Gradient]:
        return list(gradients)

    def _apply(self, pairs: list[tuple[Gradient, Source]], global_step: Source, name: str | None) -> object:
        trained: list[tf.Variable] = [source for gradient, source in pairs if gradient is not None]
        # A deep copy, because the optimizer overwrites the variable's memory.
        starts = [tf.raw_ops.DeepCopy(x=variable) for variable in trained]
        with tf.control_dependencies(starts):
            applied = super()._apply(pairs, global_step, name)
        with tf.control_dependencies([] if applied is None else [applied]):
            steps = [variable.read_value() - start for variable, start in zip(trained, starts, strict=True)]
        combined = self._reducer(steps, trained)
        moved = [variable.assign(start + step) for variable, start, step in zip(trained, starts, combined, strict=True)]
        return None if tf.executing_eagerly() else tf.group(*moved)


@as_written
def DistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor[tf.Tensor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Optimizer:
    """Return an optimizer like `optimizer`, of a subclass of its class, that steps with the gradients of all ranks.

    It shares options and slots with `optimizer`, which should no longer be used. With `backward_passes_per_step` the
    gradients of that many passes are added up, or averaged (`average_aggregated_gradients`), before they are reduced
    and applied; the sums are local variables. `groups`, a number or lists of variables, reduces gradients together.
    With `process_set` its members reduce among themselves, and the others step with their own gradients. With op=Adasum
    each rank steps with its own gradients, and the steps are combined. An optimizer of Keras is passed to
    `farandole.keras`. Raises `ValueError` for objects other than optimizers, and for contradictory settings.
    """
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _keras_optimizer(optimizer)(
            optimizer,
            name=name,
            gradient_predivide_factor=gradient_predivide_factor,
            op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            num_groups=num_groups,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            device_dense=device_dense,
            device_sparse=device_sparse,
        )
    if isinstance(optimizer, _Distributed):
        raise ValueError(f"this {type(optimizer).__name__} is distributed already")
    given = ReducerOptions(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        groups=groups,
        scale_local=scale_local_gradients,
        device_dense=device_dense,
        device_sparse=device_sparse,
    )
    options = choose_options("DistributedOptimizer", op, gradient_predivide_factor, num_groups, given)
    wrapped = _mix_in(_Combining if op == Adasum else _Distributed, optimizer)
    wrapped._reducer = Reducer(name or f"Distributed{type(optimizer).__name__}", options)
    wrapped._aggregation = Aggregation(backward_passes_per_step, average_aggregated_gradients)
    wrapped._use_locking = use_locking or optimizer._use_locking
    return wrapped


def _mix_in(front: type[_Distributed], optimizer: tf.compat.v1.train.Optimizer) -> _Distributed:
    base = type(optimizer)
    names = {"__module__": base.__module__, "__doc__": base.__doc__}
    made: type[_Distributed] = type(base.__name__, (front, base), names)
    wrapped: _Distributed = made.__new__(made)
    # Programs access the wrapped optimizer as `_optimizer`. An optimizer that wraps another keeps its own attribute.
    wrapped.__dict__.update({"_optimizer": optimizer, **optimizer.__dict__})
    return wrapped


def _keras_optimizer(optimizer: object) -> Callable[..., object]:
    # Imported by name, because farandole.keras is a layer above, and few programs need it here.
    wrap: Callable[..., object] = importlib.import_module("farandole.keras").DistributedOptimizer
    of_keras = any(kind.__module__.partition(".")[0] in ("keras", "tf_keras") for kind in type(optimizer).__mro__)
    if not of_keras:
        raise ValueError(
            f"expected an optimizer of tf.compat.v1.train or tf.keras.optimizers, got {type(optimizer).__name__}"
        )
    return wrap
