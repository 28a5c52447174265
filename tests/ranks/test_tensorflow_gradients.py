"""Gradients of TensorFlow's operations against formulas, at once and in functions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from farandole.core.context import Context
from helpers.ranks import run_ranks

tf = pytest.importorskip("tensorflow")

import farandole.tensorflow as hvd  # noqa: E402  # after the module that it needs is known to be there

Array = npt.NDArray[Any]
Body = Callable[..., Any]

ROWS = 5
modes = pytest.mark.parametrize("mode", ["eager", "function"])


def values(rank: int, rows: int = ROWS) -> Array:
    return np.random.default_rng(rank).normal(size=(rows, 2))


def upstream(rank: int, rows: int = ROWS) -> Array:
    return np.random.default_rng(100 + rank).normal(size=(rows, 2))


def gradient_of(mode: str, ask: Body, inputs: Array, weights: Array) -> Array:
    """Return the gradient of the sum of `weights` times what `ask` makes of `inputs`."""

    def derive(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(ask(x) * w)
        return tape.gradient(loss, x)

    run = derive if mode == "eager" else tf.function(derive, autograph=False)
    found: Array = run(tf.constant(inputs), tf.constant(weights)).numpy()
    return found


@modes
@pytest.mark.parametrize("size", [1, 3])
def test_reductions(mode: str, size: int) -> None:
    factors = {"prescale_factor": -0.5, "postscale_factor": 3.0}

    def body(context: Context) -> dict[str, Array]:
        x, w = values(context.rank), upstream(context.rank)
        asks: dict[str, Body] = {
            "sum": lambda x: hvd.allreduce(x, op=hvd.Sum),
            "average": lambda x: hvd.allreduce(x, name="mean"),
            "scaled": lambda x: hvd.allreduce(x, op=hvd.Sum, **factors),
            "group": lambda x: hvd.grouped_allreduce([x, x * 2], op=hvd.Sum)[1],
            "max": lambda x: hvd.allreduce(x, op=hvd.Max),
            "least": lambda x: hvd.allreduce(x, op=hvd.Max, **factors),
            "product": lambda x: hvd.allreduce(x, op=hvd.Product, **factors),
        }
        return {kind: gradient_of(mode, ask, x, w) for kind, ask in asks.items()}

    each, weights = np.stack([values(rank) for rank in range(size)]), sum(upstream(rank) for rank in range(size))
    for rank, got in enumerate(run_ranks(size, body)):
        scale = -0.5 * 3.0
        expected = {
            "sum": weights,
            "average": weights / size,
            "scaled": weights * scale,
            "group": 2 * weights,
            "max": weights * (each.argmax(0) == rank),
            "least": weights * (each.argmin(0) == rank) * scale,
            "product": weights * np.delete(each, rank, 0).prod(0) * (-0.5) ** size * 3.0,
        }
        for kind, wanted in expected.items():
            np.testing.assert_allclose(got[kind], wanted, rtol=1e-12, err_msg=kind)


@modes
def test_products_of_zeros_and_shared_extremes(mode: str) -> None:
    each = np.array([[0.0, 0.0, 2.0, 3.0], [5.0, 0.0, 4.0, 3.0]])

    def body(context: Context) -> list[Array]:
        x, w = each[context.rank], np.ones(4)
        ops = (hvd.Product, hvd.Min)
        return [gradient_of(mode, lambda x, op=op: hvd.allreduce(x, op=op), x, w) for op in ops]

    (product, least), (product_too, least_too) = run_ranks(2, body)
    np.testing.assert_allclose([product, product_too], 2 * each[::-1])
    np.testing.assert_allclose([least, least_too], [[2, 1, 2, 1], [0, 1, 0, 1]])


@modes
def test_movement(mode: str) -> None:
    size = 3

    def body(context: Context) -> dict[str, Array]:
        rank = context.rank
        mine = values(rank, rank + 1)
        splits = [1, 0, 2]
        return {
            "allgather": gradient_of(mode, hvd.allgather, mine, upstream(rank, 6)),
            "group": gradient_of(mode, lambda x: hvd.grouped_allgather([x[:0], x])[1], mine, upstream(rank, 6)),
            "broadcast": gradient_of(mode, lambda x: hvd.broadcast(x, 1), values(rank), upstream(rank)),
            "sum": gradient_of(
                mode,
                lambda x: hvd.reducescatter(x, op=hvd.Sum, postscale_factor=2.0),
                values(rank),
                upstream(rank, (2, 2, 1)[rank]),
            ),
            "average": gradient_of(
                mode, lambda x: hvd.grouped_reducescatter([x])[0], values(rank), upstream(rank, (2, 2, 1)[rank])
            ),
            "alltoall": gradient_of(
                mode, lambda x: hvd.alltoall(x, splits)[0], values(rank), upstream(rank, size * splits[rank])
            ),
        }

    mean = sum(upstream(rank, 6) for rank in range(size)) / size
    scattered = np.concatenate([upstream(rank, rows) for rank, rows in enumerate((2, 2, 1))])
    results = run_ranks(size, body)
    for rank, got in enumerate(results):
        start = rank * (rank + 1) // 2
        np.testing.assert_allclose(got["allgather"], mean[start : start + rank + 1])
        np.testing.assert_allclose(got["group"], mean[start : start + rank + 1])
        spread = sum(upstream(each) for each in range(size)) / size
        np.testing.assert_allclose(got["broadcast"], spread if rank == 1 else 0 * spread)
        np.testing.assert_allclose(got["sum"], size * 2 * scattered)
        np.testing.assert_allclose(got["average"], scattered)
        # One row went to rank 0, two to rank 2, and two nowhere.
        back = np.concatenate([upstream(0, 3)[rank : rank + 1], upstream(2, 6)[2 * rank : 2 * rank + 2]])
        np.testing.assert_allclose(got["alltoall"], np.concatenate([back, np.zeros((2, 2))]))


@modes
def test_adasum_has_no_gradient(mode: str) -> None:
    def body(context: Context) -> None:
        with pytest.raises((NotImplementedError, LookupError), match="Adasum"):
            gradient_of(mode, lambda x: hvd.allreduce(x, op=hvd.Adasum), values(0), upstream(0))

    run_ranks(1, body)
