"""Optimizer of Keras 3 or tf_keras that steps with the gradients of all ranks."""

import warnings
from collections.abc import Iterable

import keras

from farandole.core.operations.compression import Compressor
from farandole.core.operations.gradients import predivided
from farandole.core.operations.reduction import Average, Sum
from farandole.core.process_sets.process_set import ProcessSet, global_process_set, require_registered
from farandole.keras.backend import Optimizer, Options, Tensor, Variable
from farandole.keras.compression import Compression
from farandole.keras.generation import Distribution, generation_of


def DistributedOptimizer(
    optimizer: Optimizer,
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
    groups: int | Iterable[Iterable[Variable]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Optimizer:
    """Return an optimizer like `optimizer`, of a subclass of its class, that steps with the gradients of all ranks.

    It shares options and state with `optimizer`, which should no longer be used, and is saved as an optimizer of that
    class. Gradients are reduced before they are clipped. With `backward_passes_per_step`, which is Keras'
    `gradient_accumulation_steps`, the gradients of that many passes are added up first, and averaged with
    `average_aggregated_gradients`. `groups`, a number or lists of variables, reduces gradients together. With
    `process_set` its members reduce among themselves, and the others step with their own gradients. Gradients of
    variables passed to `register_local_var` are not reduced, but with `scale_local_gradients` divided by the number of
    ranks. A model that was trained in another job, before a second `init()`, must be compiled again. `device_dense` and
    `device_sparse` are arguments of Horovod's and are ignored. With the global process set it can be called before
    `init()`, but the first step cannot run before. Raises `TypeError` for objects other than optimizers, and
    `ValueError` for an optimizer that is distributed already and for contradictory settings.
    """
    # Programs may wrap and compile before `init()`. Other process sets exist only after it.
    if process_set is not global_process_set:
        require_registered(process_set, "DistributedOptimizer")
    if op not in (Average, Sum):
        raise ValueError("op currently only supports Average and Sum")
    if num_groups:
        warnings.warn("num_groups= is deprecated; use groups=", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if isinstance(groups, int) and groups <= 0:
        raise ValueError(f"groups should be a positive integer or a list of lists of variables, got {groups}")
    options = Options(
        reduction=predivided(op, gradient_predivide_factor),
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    how = Distribution(
        options=options,
        name=name,
        groups=groups,
        scale_local=scale_local_gradients,
        passes=backward_passes_per_step,
        average=average_aggregated_gradients,
    )
    return generation_of(optimizer).distribute(optimizer, how)


def PartialDistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor[Tensor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: int | Iterable[Iterable[Variable]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None = None,
    scale_local_gradients: bool = True,
) -> Optimizer:
    """Return a `DistributedOptimizer` that excludes the gradients of `local_layers` from the reduction.

    Also raises `ValueError` for layers that are not built."""
    layers: list[Variable] = (
        [local_layers] if hasattr(local_layers, "trainable_variables") else list(local_layers or ())
    )
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
