"""Aggregation of the gradients of several backward passes, which are then reduced and applied together."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import tensorflow as tf

from farandole.tensorflow.reducer import Gradient, Source, identify

Variable: TypeAlias = tf.Variable

SUMS = "farandole/sums"  # a graph's collection of the variables of its aggregations


class Aggregation:
    """Sums of gradients in local variables, and a count of passes, in eager mode, functions and graphs.

    Every pass calls `add`. In the last of `passes`, `add` reduces and clears the sums and `apply` acts; in the others
    `apply` skips.
    """

    def __init__(self, passes: int, average: bool) -> None:
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step must be > 0, got {passes}")
        self.passes, self._average = passes, average
        # The first `add` makes them, in the graph that it is called in.
        self._count: Variable | None = None
        # By `identify`. The sources are referenced, so that no other source gets the same number.
        self._sums: dict[int, tuple[Source, Variable]] = {}
        # The keys of the sums that eager passes of the current step have added to.
        self._added: set[int] = set()

    def again(self) -> "Aggregation":
        """Return a new one with the same options, for another optimizer."""
        return Aggregation(self.passes, self._average)

    def clear(self) -> None:
        """Drop the sums and the count of an unfinished step, in eager mode; other ranks may have done other passes."""
        self._added.clear()
        sums = [total for _, total in self._sums.values()]
        for variable in sums if self._count is None else [*sums, self._count]:
            variable.assign(tf.zeros_like(variable))

    def add(
        self,
        gradients: Sequence[Gradient],
        sources: Sequence[Source],
        reduce: Callable[[list[Gradient]], list[Gradient]],
    ) -> list[Gradient]:
        """Return the reduced sums in the last pass, and the sums so far in the others.

        Raises `ValueError` for sparse gradients, whose sum has no fixed shape.
        """
        if self.passes == 1:
            return reduce(list(gradients))
        if any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
            raise ValueError(
                "IndexedSlices are not supported when backward_passes_per_step > 1; pass sparse_as_dense=True"
            )
        given = {identify(source) for gradient, source in zip(gradients, sources, strict=True) if gradient is not None}
        if tf.executing_eagerly():
            # A variable may lack a gradient in some of the passes. A graph has the same ones in all.
            self._added |= given
            given = self._added
        held = [place for place, source in enumerate(sources) if identify(source) in given]
        sums = [self._sum(gradients[place], sources[place]) for place in held]
        added = [
            total.assign_add(gradients[place], read_value=False)
            for total, place in zip(sums, held, strict=True)
            if gradients[place] is not None
        ]
        with _after(added):
            count = self._counter().assign_add(1)

        def spread(values: Sequence[tf.Tensor]) -> list[Gradient]:
            found: list[Gradient] = [None] * len(gradients)
            for place, value in zip(held, values, strict=True):
                found[place] = value
            return found

        def finish() -> list[tf.Tensor]:
            scale = self.passes if self._average else 1
            reduced = reduce(spread([total.read_value() / tf.cast(scale, total.dtype) for total in sums]))
            values = [reduced[place] for place in held]
            self._added.clear()
            with _after(values):
                # Subtraction would keep an infinity forever.
                cleared = [total.assign(tf.zeros_like(total), read_value=False) for total in sums]
                cleared.append(self._counter().assign(0, read_value=False))
            with _after(cleared):
                return [tf.identity(value) for value in values]

        def keep() -> list[tf.Tensor]:
            return [total.read_value() for total in sums]

        found = tf.cond(tf.equal(count, self.passes), finish, keep)
        return spread([found] if tf.is_tensor(found) else found)

    def apply(
        self, gradients: Sequence[Gradient], act: Callable[[], object], skip: Callable[[], object]
    ) -> tf.Operation | None:
        """Call `act` in the last pass and `skip` in the others. `gradients` come from `add`, possibly changed."""

        def acted(call: Callable[[], object]) -> Callable[[], tf.Tensor]:
            def called() -> tf.Tensor:
                operation = call()
                with _after([] if operation is None else [operation]):
                    return tf.constant(0)

            return called

        with _after([gradient for gradient in gradients if gradient is not None]):
            due = tf.equal(self._counter().read_value(), 0)
        done = tf.cond(due, acted(act), acted(skip))
        return None if tf.executing_eagerly() else done.op

    def _counter(self) -> Variable:
        if self._count is None:
            self._count = _local_variable(lambda: tf.zeros([], tf.int64), "count")
        return self._count

    def _sum(self, gradient: tf.Tensor, source: Source) -> Variable:
        key = identify(source)
        if key not in self._sums:
            shape, dtype = gradient.shape, gradient.dtype
            if not shape.is_fully_defined():
                shape = getattr(source, "shape", shape)
            self._sums[key] = source, _local_variable(lambda: tf.zeros(shape, dtype), "sum")
        return self._sums[key][1]


def _local_variable(zeros: Callable[[], tf.Tensor], name: str) -> Variable:
    """Return a variable that a session's local initializer sets and that no checkpoint holds."""
    with tf.init_scope():
        return tf.compat.v1.Variable(
            zeros,
            trainable=False,
            use_resource=True,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES, SUMS],
            name=f"aggregation/{name}",
        )


def _after(operations: Sequence[object]) -> AbstractContextManager[None]:
    """Return a context whose operations run after `operations`. Eager mode keeps this order anyway."""
    context: AbstractContextManager[None] = tf.control_dependencies([each for each in operations if each is not None])
    return context
