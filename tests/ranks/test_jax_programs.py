"""Programs of JAX: jitted functions that several programs call, arrays that are no arguments, and numbers."""

import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from farandole.core.context import Context
from farandole.errors import MismatchError
from helpers.ranks import run_ranks

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402  # after the module that it needs is known to be there

import farandole.jax as hvd  # noqa: E402


def names_in(function: Any, *arguments: Any) -> list[str]:
    return re.findall(r'name = "([^"]*)"', jax.jit(function).lower(*arguments).as_text())


def test_no_two_calls_of_a_program_have_one_name() -> None:
    """JAX keeps what it has traced of a jitted function, with its calls, and uses it in other programs."""

    def body(context: Context) -> Any:
        x = jnp.ones(3)
        one, two = jax.jit(lambda x: hvd.allreduce(x)), jax.jit(lambda x: hvd.allreduce(2 * x))
        named = jax.jit(lambda x: hvd.allreduce(x, name="x"))
        for function in (one, two, named):
            jax.jit(lambda x, function=function: function(x))(x)
        own = names_in(lambda x: (hvd.allreduce(x), one(x), hvd.allreduce(x, name="x"), two(x), named(x)), x)
        squares = lambda x: (hvd.allreduce(x) ** 2 + hvd.allreduce(2 * x) ** 2).sum()  # noqa: E731
        backward = names_in(jax.grad(squares), x)
        return own, backward

    for own, backward in run_ranks(1, body):
        assert sorted(own) == [f"allreduce.{name}" for name in ("traced", "traced.1", "traced.2", "x", "x.1")]
        assert len(set(backward)) == len(backward) == 4


def test_a_program_of_functions_that_were_traced_before() -> None:
    def body(context: Context) -> Any:
        inner = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
        step = jax.jit(lambda rows, x: (hvd.allreduce(rows.sum(), op=hvd.Sum), inner(x)))
        # The second call traces `step` anew, but not `inner`. One rank has traced that on its own as well.
        found = [step(jnp.ones(rows), jnp.ones(())) for rows in (4, 4, 3)]
        return [(float(total), float(same)) for total, same in found]

    assert run_ranks(2, body) == [[(8, 2), (8, 2), (6, 2)]] * 2


def test_a_program_makes_its_requests_when_it_runs() -> None:
    """Also for arrays that are no arguments of it: tracing communicates with nobody."""

    def body(context: Context) -> Any:
        mine = jnp.ones(2) * (context.rank + 1)

        def total(x: jax.Array) -> Any:
            return x + hvd.allreduce(mine, op=hvd.Sum), hvd.broadcast({"mine": mine}, 1)

        if context.rank == 0:
            assert jax.eval_shape(total, mine)[0].shape == (2,)
        summed, spread = jax.jit(total)(jnp.zeros(2))
        gradient = jax.jit(jax.grad(lambda x: (x * hvd.allreduce(mine, op=hvd.Sum)).sum()))(mine)
        return np.asarray(summed), np.asarray(spread["mine"]), np.asarray(gradient)

    for summed, spread, gradient in run_ranks(2, body):
        np.testing.assert_array_equal([summed, spread, gradient], [[3, 3], [2, 2], [3, 3]])


def test_numbers_in_a_program() -> None:
    def body(context: Context) -> Any:
        def reduce(x: jax.Array) -> Any:
            tree = {"x": x, "int": 3, "float": 2.5, "array": np.arange(2), "none": None}
            return hvd.allreduce(tree, op=hvd.Sum), hvd.broadcast(tree, 1)

        with pytest.raises(OverflowError, match="do not fit into int32"):
            jax.jit(lambda x: x + hvd.allreduce(np.array([2**40])))(1.0)
        return jax.tree.map(np.asarray, jax.jit(reduce)(jnp.float32(context.rank)))

    for reduced, spread in run_ranks(2, body):
        assert (reduced["x"], reduced["int"], reduced["float"], reduced["none"]) == (1, 6, 5, None)
        assert (spread["x"], spread["int"]) == (1, 3)
        np.testing.assert_array_equal(reduced["array"], [0, 2])


def test_integers_have_no_gradients() -> None:
    def body(context: Context) -> Any:
        gradient = hvd.grad(lambda tree: tree["x"] * tree["n"] * (context.rank + 1), allow_int=True)
        tree = {"n": jnp.int32(2), "x": jnp.float32(3)}
        at_once, compiled = gradient(tree), jax.jit(lambda tree: gradient(tree)["x"])(tree)
        return float(at_once["x"]), at_once["n"].dtype == jax.dtypes.float0, float(compiled)

    assert run_ranks(2, body) == [(3, True, 3)] * 2


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_random_keys_are_broadcast(implementation: str) -> None:
    def body(context: Context) -> Any:
        keys = jax.random.split(jax.random.key(context.rank, impl=implementation))
        tree = {"keys": keys, "x": jnp.float32(context.rank)}
        found = hvd.broadcast_parameters(tree, 1), jax.jit(lambda tree: hvd.broadcast(tree, 1))(tree)
        return [(np.asarray(jax.random.key_data(each["keys"])), float(each["x"])) for each in found]

    expected = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1, impl=implementation))))
    for found in run_ranks(2, body):
        for numbers, x in found:
            np.testing.assert_array_equal(numbers, expected)
            assert x == 1


def test_rows_of_jacobians_outside_of_programs() -> None:
    """`jax.jacrev` asks for a batch of gradients, whose rows are those of the ranks."""

    def body(context: Context) -> Any:
        x = jnp.arange(1.0, 3.0 + context.rank)
        with pytest.raises(Exception, match="splits are for calls outside"):
            jax.jacrev(lambda x: hvd.alltoall(x[:2], splits=[2, 0])[0])(x)
        equal = jax.jacrev(lambda x: hvd.alltoall(x[:2]))(x[:2])
        return np.asarray(jax.jacrev(lambda x: hvd.allgather(2 * x))(x)), np.asarray(equal)

    (first, one), (second, two) = run_ranks(2, body)
    np.testing.assert_array_equal(first, np.eye(5)[:, :2] * 2)
    np.testing.assert_array_equal(second, np.eye(5)[:, 2:] * 2)
    # The row of a gradient of element i of the result goes back to the rank that has sent it.
    np.testing.assert_array_equal(one + two, np.ones((2, 2)))


def test_gradients_at_arrays_of_numpy() -> None:
    def body(context: Context) -> Any:
        x = np.ones((2, 3), np.float32) * (context.rank + 1)
        square = jax.grad(lambda x: (hvd.allreduce(x, op=hvd.Sum) ** 2).sum())
        rows = jax.grad(lambda x: (hvd.grouped_allgather([x, x])[0] * (context.rank + 1)).sum())
        return [np.asarray(gradient(x)) for gradient in (square, rows)]

    for square, rows in run_ranks(2, body):
        np.testing.assert_array_equal(square, np.full((2, 3), 12))
        np.testing.assert_array_equal(rows, np.full((2, 3), 1.5))


def test_parameters_of_other_paths_are_refused() -> None:
    """Their arrays have one shape, and were taken for each other."""

    def body(context: Context) -> None:
        x = jnp.ones(3) * context.rank
        for other in ({"a": x, "c": x}, {"a": x, "b": x, "c": x}, {"b": x, "a": None}):
            leaf = r"(\['[abc]'\]|no more leaves)"
            said = rf"'parameters': structure differs between ranks \(rank 0: {leaf}; rank 1: {leaf}\); use one "
            with pytest.raises(MismatchError, match=said):
                hvd.broadcast_parameters({"a": x, "b": x} if context.rank == 0 else other, 0)
        found = hvd.broadcast_parameters(({"a": x, "n": None}, [context.rank]), 1)
        assert found[0]["a"].tolist() == [1.0] * 3 and found[1][0] == 1

    run_ranks(2, body)


def test_results_are_on_the_second_device_as_the_inputs() -> None:
    program = """
import jax, jax.numpy as jnp
import farandole.jax as hvd
hvd.init()
rows = jax.device_put(jnp.ones((2, 3)), jax.devices()[1])
for name in ("allgather", "allreduce", "broadcast", "reducescatter"):
    made = getattr(hvd, name)(rows, **({"root_rank": 0} if name == "broadcast" else {}))
    assert (made + rows).tolist() == (2 * rows).tolist(), name
received, splits = hvd.alltoall(rows, jnp.array([2]))
assert (received + rows).tolist() == (2 * rows).tolist()
"""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run([sys.executable, "-c", program], env=env, check=True, timeout=120)
