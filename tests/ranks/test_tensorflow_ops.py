"""TensorFlow's operations: at once, in functions and in graphs of TensorFlow 1."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

import farandole.tensorflow as hvd
from farandole.core.context import Context
from helpers.ranks import run_ranks

Array = npt.NDArray[Any]

# A function is traced by the rank that calls it; the same body runs at once without.
MODES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "eager": lambda body: body,
    "function": lambda body: tf.function(body),
}
modes = pytest.mark.parametrize("mode", MODES)


@modes
def test_every_kind(mode: str) -> None:
    def body(context: Context) -> list[Any]:
        rank = context.rank

        def every_kind(x: tf.Tensor) -> tuple[Any, ...]:
            return (
                hvd.allreduce(x, op=hvd.Sum),
                hvd.allreduce(x),
                hvd.grouped_allreduce([x, 2 * x], op=hvd.Max),
                hvd.allgather(x[: rank + 1]),
                hvd.broadcast(x, 1),
                hvd.reducescatter(x, op=hvd.Sum),
                hvd.alltoall(x, splits=[1, 2]),
            )

        return tf.nest.map_structure(np.asarray, MODES[mode](every_kind)(tf.constant([1.0, 2.0, 3.0]) * (rank + 1)))

    one, two = run_ranks(2, body)
    for got, rows, sent in ((one, [3.0, 6.0], [1.0, 2.0]), (two, [9.0], [2.0, 3.0, 4.0, 6.0])):
        total, mean, group, gathered, spread, scattered, (received, counts) = got
        np.testing.assert_array_equal(total, [3, 6, 9])
        np.testing.assert_array_equal(mean, [1.5, 3, 4.5])
        np.testing.assert_array_equal(group, [[2, 4, 6], [4, 8, 12]])
        np.testing.assert_array_equal(gathered, [1, 2, 4])
        np.testing.assert_array_equal(spread, [2, 4, 6])
        np.testing.assert_array_equal(scattered, rows)
        np.testing.assert_array_equal(received, sent)
        assert counts.sum() == len(sent)
