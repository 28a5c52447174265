"""Reduction of the gradients of one backward pass, in as few operations as possible."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, TypeAlias

import tensorflow as tf

from farandole.core.operations.gradients import (
    GradientOptions,
    even_groups,
    explicit_groups,
    name_of_absent,
    predivided,
)
from farandole.core.process_sets.process_set import require_registered
from farandole.tensorflow.naming import function_prefix
from farandole.tensorflow.ops import allreduce, grouped_allreduce
from farandole.tensorflow.place import size_op

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None
# A variable of TensorFlow or Keras, or a tensor, with respect to which a gradient is computed.
Source = object
Groups = int | Sequence[Sequence[Source]] | None


@dataclass(frozen=True, kw_only=True)
class ReducerOptions(GradientOptions[tf.Tensor]):
    """How the gradients of a tape or an optimizer are reduced."""

    groups: Groups = None
    scale_local: bool = True
    device_dense: str = ""
    device_sparse: str = ""


def choose_options(shown: str, op: int, predivide: float, num_groups: int, given: ReducerOptions) -> ReducerOptions:
    """Return `given` with the reduction by `op`, and checked, for the user's arguments of the function `shown`.

    Raises `ValueError` for a contradiction."""
    require_registered(given.process_set, shown)
    groups = given.groups
    if num_groups:
        # The stack level skips two frames of `as_written`, so that the warning shows the user's call.
        warnings.warn("num_groups= is deprecated; use groups=", DeprecationWarning, stacklevel=4)
        groups = num_groups if groups is None else groups
    if isinstance(groups, int) and groups <= 0:
        raise ValueError(f"groups should be a positive integer or a list of lists of variables, got {groups}")
    return replace(given, reduction=predivided(op, predivide), groups=groups)


@dataclass(frozen=True)
class Reducer:
    """Callable that reduces gradients according to `options`.

    Operations are named `<prefix>.<index of the gradient>.<name of its variable>`, in a function after its name. In
    eager mode all gradients are reduced in one operation, because each operation blocks. In a graph each gradient or
    group has its own operation, which starts when its gradients are ready.
    """

    prefix: str
    options: ReducerOptions
    # By `identify`. The sources are referenced, so that no other source gets the same number.
    local: dict[int, Source] = field(default_factory=dict)

    def keep_local(self, source: Source) -> None:
        """Exclude the gradient of `source` from the reduction from now on."""
        self.local[identify(source)] = source

    def is_local(self, source: Source) -> bool:
        """Return whether the gradient of `source` is excluded from the reduction."""
        return identify(source) in self.local

    def __call__(
        self, gradients: Sequence[Gradient], sources: Sequence[Source], generic: bool = False
    ) -> list[Gradient]:
        """Return the reduced gradients, in order; None stays None.

        Gradients of local sources are only divided by the number of ranks. If one of them is not finite, a reduced
        gradient is infinite on all ranks, so that loss scalers of all ranks skip the step. Ranks outside of the process
        set get their own gradients back. With `generic` the operations' names do not include the variables'. Blocks in
        eager mode until every rank has taken part.
        """
        # The set may have been removed, or the job ended, since construction.
        require_registered(self.options.process_set, self.prefix)
        if not self.options.process_set.included():
            return list(gradients)
        found = list(gradients)
        for place, (gradient, source) in enumerate(zip(gradients, sources, strict=True)):
            if gradient is not None and self.is_local(source):
                found[place] = self._scale_local(gradient)
            elif isinstance(gradient, tf.IndexedSlices) and self.options.sparse_as_dense:
                found[place] = tf.convert_to_tensor(gradient)
        if tf.executing_eagerly() and self.options.process_set.size() == 1:
            return found
        found = spread_infinities(found, [self.is_local(source) for source in sources])
        prefix = self.prefix if tf.executing_eagerly() else f"{function_prefix()}{self.prefix}"
        for group in self._groups(found, sources):
            first = group[0]
            name = f"{prefix}.{first}" if generic else f"{prefix}.{first}{_short_name(sources[first])}"
            if len(group) > 1:
                # Ranks that lack different gradients must not match each other's requests.
                name += name_of_absent(gradients)
            for place, reduced in zip(group, self._reduce([found[place] for place in group], name), strict=True):
                found[place] = reduced
        return found

    def _scale_local(self, gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
        if not self.options.scale_local:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(self._scale_local(gradient.values), gradient.indices, gradient.dense_shape)
        process_set = self.options.process_set
        number = process_set.process_set_id
        assert number is not None
        # A function may run with another number of ranks than when it was traced.
        size = process_set.size() if tf.executing_eagerly() else size_op(number)
        return gradient / tf.cast(size, gradient.dtype)

    def _groups(self, gradients: Sequence[Gradient], sources: Sequence[Source]) -> list[list[int]]:
        """Return groups of indexes of gradients to reduce together; no group mixes dense and sparse gradients."""
        keys = [identify(source) for source in sources]
        places = [
            place
            for place, (gradient, key) in enumerate(zip(gradients, keys, strict=True))
            if gradient is not None and key not in self.local
        ]
        chosen = self.options.groups
        if tf.executing_eagerly():
            groups = [places]
        elif chosen is None:
            groups = [[place] for place in places]
        elif isinstance(chosen, int):
            groups = even_groups(places, chosen)
        else:
            # A variable may be a source twice. Its first gradient is in its group, the second one is on its own.
            first = {key: place for place, key in reversed(list(enumerate(keys)))}
            wanted = [[first[key] for each in group if (key := identify(each)) in first] for group in chosen]
            groups = explicit_groups(places, wanted)

        def sparse(place: int) -> bool:
            return isinstance(gradients[place], tf.IndexedSlices)

        return [list(alike) for group in groups for _, alike in groupby(sorted(group, key=sparse), key=sparse)]

    def _reduce(self, gradients: list[tf.Tensor | tf.IndexedSlices], name: str) -> list[tf.Tensor | tf.IndexedSlices]:
        # Slices are gathered, not summed, so they cannot overflow and need no factors.
        op, *factors = self.options.reduction
        prescale, postscale = (1.0, 1.0) if isinstance(gradients[0], tf.IndexedSlices) else factors
        arguments: dict[str, Any] = {
            "op": op,
            "compression": self.options.compression,
            "device_dense": self.options.device_dense,
            "device_sparse": self.options.device_sparse,
            "prescale_factor": prescale,
            "postscale_factor": postscale,
            "process_set": self.options.process_set,
            "ignore_name_scope": True,
            "name": name,
        }
        if len(gradients) == 1:
            return [allreduce(gradients[0], **arguments)]
        return list(grouped_allreduce(gradients, **arguments))


def spread_infinities(gradients: Sequence[Gradient], local: Sequence[bool]) -> list[Gradient]:
    """Return `gradients`, with infinities in one that will be reduced if one of the `local` ones is not finite.

    A loss scaler that checks the reduced gradients then skips the step on all ranks, without another request."""
    found, pairs = list(gradients), list(zip(gradients, local, strict=True))
    own = [_values(each) for each, is_local in pairs if is_local and each is not None and each.dtype.is_floating]
    shared = [
        (place, each)
        for place, (each, is_local) in enumerate(pairs)
        if not is_local and each is not None and each.dtype.is_floating
    ]
    if own and shared:
        # Slices may have no rows.
        dense = (pair for pair in shared if not isinstance(pair[1], tf.IndexedSlices))
        place, chosen = next(dense, shared[0])
        is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in own])
        values = tf.where(is_finite, _values(chosen), tf.constant(float("inf"), chosen.dtype))
        is_sparse = isinstance(chosen, tf.IndexedSlices)
        found[place] = tf.IndexedSlices(values, chosen.indices, chosen.dense_shape) if is_sparse else values
    return found


def _values(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def identify(source: Source) -> int:
    """Return a number that identifies a source; equal for a variable of Keras and its variable of TensorFlow."""
    return id(getattr(source, "handle", source))


def _short_name(source: Source) -> str:
    # Only the last part: earlier parts may contain the number of layers that the process has made before.
    name = str(getattr(source, "name", ""))
    return "." + name.split(":")[0].rsplit("/", 1)[-1] if name else ""
