"""Batch normalization over the joined batches of all ranks.

The forward and the backward pass make one allreduce each, of float64 sums around the rank's own mean. A plain sum of
squares in float32 would lose its precision when a large mean is subtracted.
"""

from typing import Any, Self, TypeAlias

import tensorflow as tf

from farandole.core.operations.reduction import Sum
from farandole.core.process_sets.process_set import ProcessSet, global_process_set, process_set_of, require_registered
from farandole.tensorflow.ops import allreduce
from farandole.tensorflow.tracing import as_written

Tensor: TypeAlias = tf.Tensor

# With TF_USE_LEGACY_KERAS tf.keras is the package tf_keras.
KERAS_2 = tf.keras.layers.BatchNormalization.__module__.startswith("tf_keras.")


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """Keras' batch normalization with the mean, the variance and the gradients of the ranks' joined batches.

    Batches may differ in length between ranks or be empty; a `mask` excludes rows. Every rank has to run the forward
    and the backward pass. Half floats are computed in float32. With one rank, on ranks outside of `process_set`, and
    when not training, it is an ordinary batch normalization. A saved or cloned layer keeps the ranks of `process_set`:
    register the set before the model is loaded.
    Raises `ValueError` for `fused`, whose kernel does not expose its sums.
    """

    def __init__(
        self, fused: bool | None = False, process_set: ProcessSet = global_process_set, **kwargs: object
    ) -> None:
        if fused or fused is None:
            raise ValueError("SyncBatchNormalization does not support fused=True; leave it out")
        # Keras 2 has two kernels, and prefers the fused one.
        super().__init__(**({"fused": False} if KERAS_2 else {}), **kwargs)
        self.process_set = process_set

    def get_config(self) -> dict[str, object]:
        """Return the arguments of the layer, with the ranks of a process set other than that of all ranks."""
        config: dict[str, object] = super().get_config()
        if self.process_set is not global_process_set:
            config["process_set"] = self.process_set.ranks
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Return a layer for arguments of `get_config`."""
        ranks = config.get("process_set")
        layer: Self = super().from_config(config if ranks is None else {**config, "process_set": process_set_of(ranks)})
        return layer

    # Keras calls it in training, with floats of at least 32 bits. The rest of the layer is unchanged.
    @as_written
    def _moments(self, inputs: Tensor, *given: Tensor, **more: Tensor) -> tuple[Tensor, Tensor]:
        require_registered(self.process_set, type(self).__name__)
        if not self.process_set.included() or (tf.executing_eagerly() and self.process_set.size() == 1):
            moments: tuple[Tensor, Tensor] = super()._moments(inputs, *given, **more)
            return moments
        if KERAS_2:
            axes, mask = given[0], more["mask"]
            if more["keep_dims"]:
                raise ValueError(f"{type(self).__name__} takes one axis, and no virtual batches")
        else:
            axes, (mask,) = self._reduction_axes, given
        return self._joined_moments(inputs, axes, mask)

    def _joined_moments(self, inputs: Tensor, axes: list[int], mask: Tensor | None) -> tuple[Tensor, Tensor]:
        weights = None if mask is None else _weights(mask, inputs)
        count = _count(inputs, weights, axes)
        around = tf.stop_gradient(tf.math.divide_no_nan(tf.reduce_sum(_weigh(inputs, weights), axes), count))
        distances = _weigh(inputs - _along(around, axes), weights)
        # In float64 from here on, where numbers of similar size are subtracted.
        n, mid, first, second = (
            tf.cast(each, tf.float64)
            for each in (count, around, tf.reduce_sum(distances, axes), tf.reduce_sum(distances * distances, axes))
        )
        mine = tf.stack([n, first + n * mid, second + (2 * first + n * mid) * mid])
        # Ranks may number their layers differently, so the name does not include the layer's.
        name = f"sync_batch_norm.{inputs.shape[_channels(inputs, axes)]}"
        ours = allreduce(mine, op=Sum, name=name, process_set=self.process_set, ignore_name_scope=True)
        count, first, second = tf.unstack(ours)
        mean = tf.math.divide_no_nan(first, count)
        variance = tf.math.divide_no_nan(second, count) - mean * mean
        return tf.cast(mean, inputs.dtype), tf.cast(tf.maximum(variance, 0.0), inputs.dtype)


def _weights(mask: Tensor, inputs: Tensor) -> Tensor:
    """Return 1 for included and 0 for masked values. A mask has all dimensions of `inputs` but the last."""
    return tf.broadcast_to(tf.expand_dims(tf.cast(tf.cast(mask, tf.bool), inputs.dtype), -1), tf.shape(inputs))


def _channels(inputs: Tensor, axes: list[int]) -> int:
    """Return the axis of the channels, the one that is not in `axes`."""
    (axis,) = set(range(len(inputs.shape))) - set(axes)
    return axis


def _count(inputs: Tensor, weights: Tensor | None, axes: list[int]) -> Tensor:
    """Return the number of values in each channel."""
    if weights is not None:
        return tf.reduce_sum(weights, axes)
    shape = tf.shape(inputs)
    return tf.cast(tf.fill([shape[_channels(inputs, axes)]], tf.reduce_prod(tf.gather(shape, axes))), inputs.dtype)


def _weigh(values: Tensor, weights: Tensor | None) -> Tensor:
    # A masked value may be NaN.
    return values if weights is None else tf.math.multiply_no_nan(values, weights)


def _along(values: Tensor, axes: list[int]) -> Tensor:
    """Put one value per channel along the axis of the channels."""
    for axis in axes:
        values = tf.expand_dims(values, axis)
    return values
