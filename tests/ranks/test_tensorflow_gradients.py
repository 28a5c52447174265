"""Gradients of TensorFlow's operations: formulas and finite differences, in eager mode, functions and TF 1 graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import farandole.numpy
from farandole.core.context import Context
from helpers.ranks import run_ranks

tf = pytest.importorskip("tensorflow")

import farandole.tensorflow as hvd  # noqa: E402  # after the module that it needs is known to be there
from farandole.tensorflow.ops import grouped_broadcast  # noqa: E402

Array = npt.NDArray[Any]
Body = Callable[..., Any]
Evaluate = Callable[[Array], Any]

ROWS = 5
modes = pytest.mark.parametrize("mode", ["eager", "function", "graph"])


def values(rank: int, rows: int = ROWS) -> Array:
    return np.random.default_rng(rank).normal(size=(rows, 2))


def upstream(rank: int, rows: int = ROWS) -> Array:
    return np.random.default_rng(100 + rank).normal(size=(rows, 2))


def gradient_of(mode: str, ask: Body, inputs: Array, weights: Array) -> Array:
    """Return the gradient of the sum of `weights` times what `ask` makes of `inputs`."""

    with evaluators(mode, ask, inputs, weights) as (_, derive):
        found: Array = derive(inputs)
    return found


@contextmanager
def evaluators(mode: str, ask: Body, inputs: Array, weights: Array) -> Iterator[tuple[Evaluate, Evaluate]]:
    """Yield two functions of an array like `inputs`: the sum of `weights` times `ask(inputs)`, and its gradient."""
    if mode == "graph":
        # A graph of TensorFlow 1, where `==` compares tensors by identity.
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            given = tf.compat.v1.placeholder(inputs.dtype, inputs.shape)
            loss = tf.reduce_sum(ask(given) * weights)
            (derived,) = tf.gradients(loss, given)
            yield (lambda x: session.run(loss, {given: x})), (lambda x: session.run(derived, {given: x}))
        return

    def lose(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(ask(x) * weights)

    def derive(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = lose(x)
        return tape.gradient(loss, x)

    if mode == "function":
        lose, derive = tf.function(lose, autograph=False), tf.function(derive, autograph=False)
    yield (lambda x: lose(tf.constant(x)).numpy()), (lambda x: derive(tf.constant(x)).numpy())


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


def every_operation(rank: int, size: int) -> dict[str, tuple[Body, float]]:
    """Return the differentiable operations, with the factor between the derivative of the ranks' summed losses and the
    gradient that Horovod's users expect."""
    factors = {"prescale_factor": -0.5, "postscale_factor": 3.0}
    splits = [(rank + target) % 2 + 1 for target in range(size)]
    reductions = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}
    asks: dict[str, tuple[Body, float]] = {}
    for name, op in reductions.items():
        asks[f"allreduce {name}"] = (lambda x, op=op: hvd.allreduce(x, op=op)), 1
        asks[f"allreduce {name} scaled"] = (lambda x, op=op: hvd.allreduce(x, op=op, **factors)), 1
        asks[f"grouped_allreduce {name}"] = (
            (lambda x, op=op: tf.concat(hvd.grouped_allreduce([x[:2], x[2:] * 2.0], op=op), 0)),
            1,
        )
    for name in ("sum", "average"):
        op = reductions[name]
        asks[f"reducescatter {name}"] = (lambda x, op=op: hvd.reducescatter(x, op=op, **factors)), size
        asks[f"grouped_reducescatter {name}"] = (
            (lambda x, op=op: tf.concat(hvd.grouped_reducescatter([x, x * x], op=op), 0)),
            size,
        )
    asks["allgather"] = (lambda x: hvd.allgather(x[: rank + 1])), 1 / size
    asks["grouped_allgather"] = (lambda x: tf.concat(hvd.grouped_allgather([x[rank:], x * x]), 0)), 1 / size
    asks["broadcast"] = (lambda x: hvd.broadcast(x, 1)), 1 / size
    asks["grouped_broadcast"] = (lambda x: tf.concat(grouped_broadcast([x, x * x], 1), 0)), 1 / size
    asks["alltoall"] = (lambda x: hvd.alltoall(x, splits)[0]), 1
    asks["alltoall evenly"] = (lambda x: hvd.alltoall(x[:size] ** 2)), 1
    return asks


@modes
def test_every_operation_against_finite_differences(mode: str) -> None:
    size, rows, step = 2, 5, 1e-6

    def body(context: Context) -> dict[str, tuple[Array, Array]]:
        rank, found = context.rank, {}
        for name, (ask, factor) in every_operation(rank, size).items():
            mine = values(rank, rows)[:, :1]
            weights = upstream(rank, len(ask(tf.constant(mine))))[:, :1]
            with evaluators(mode, ask, mine, weights) as (lose, derive):
                # By rank and row that is moved, to either side.
                losses = np.zeros((size, rows, 2))
                for source, row, side in np.ndindex(losses.shape):
                    moved = mine.copy()
                    moved[row] += (step, -step)[side] * (source == rank)
                    losses[source, row, side] = lose(moved)
                gradient = derive(mine)
            losses = farandole.numpy.allreduce(losses, op=hvd.Sum, name="losses")
            found[name] = gradient, factor * (losses[rank, :, :1] - losses[rank, :, 1:]) / (2 * step)
        return found

    for rank, found in enumerate(run_ranks(size, body)):
        for name, (gradient, expected) in found.items():
            np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-8, err_msg=f"{name} on rank {rank}")
            assert gradient.any() or ("broadcast" in name and rank != 1), name
