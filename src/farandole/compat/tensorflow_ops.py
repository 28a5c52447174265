"""The operation inside `horovod.tensorflow` that programs call."""

import tensorflow as tf

from farandole.core.operations.reduction import Sum
from farandole.core.process_sets.process_set import ProcessSet, global_process_set
from farandole.tensorflow.ops import allreduce


def _allreduce(
    tensor: tf.Tensor,
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Add up `tensor` over all ranks, or reduce it by `op`. See `farandole.tensorflow.allreduce`."""
    return allreduce(
        tensor,
        op=op,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        ignore_name_scope=ignore_name_scope,
        process_set=process_set,
    )
