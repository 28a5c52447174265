"""JAX's operations: at once, inside programs, differentiated; and training with them."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from farandole.core.context import Context
from farandole.errors import InvalidRequest, MismatchError
from helpers.deaths import wait_for_others
from helpers.ranks import run_ranks

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402  # after the module that it needs is known to be there

import farandole.jax as hvd  # noqa: E402
from farandole.jax.adapter import allow_64_bits  # noqa: E402

Array = npt.NDArray[Any]

# A program is traced by the rank that calls it; the same body runs at once without.
MODES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {"eager": lambda body: body, "jit": jax.jit}
modes = pytest.mark.parametrize("mode", MODES)


def values(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


@modes
def test_every_kind(mode: str) -> None:
    def body(context: Context) -> Any:
        def every_kind(x: jax.Array) -> Any:
            tree = {"a": x, "b": (2 * x, x[0])}
            return (
                hvd.allreduce(x, op=hvd.Sum),
                hvd.allreduce(tree, name="tree"),
                hvd.grouped_allreduce([x, 2 * x], op=hvd.Max, prescale_factor=2.0),
                hvd.allgather(x),
                hvd.grouped_allgather([x, x[:1]]),
                hvd.broadcast(tree, 1),
                hvd.reducescatter(x, op=hvd.Sum),
                hvd.grouped_reducescatter([x, 3 * x], op=hvd.Sum),
                hvd.alltoall(x[:2]),
                hvd.allreduce(x, compression=hvd.Compression.fp16),
                hvd.allreduce(x + 0.001, compression=hvd.Compression.bf16),
            )

        twice = MODES[mode](every_kind)
        x = jnp.array([1.0, 2.0, 3.0]) * (context.rank + 1)
        first, again = twice(x), twice(x)
        jax.tree.map(np.testing.assert_array_equal, values(first), values(again))
        return values(first)

    one, two = run_ranks(2, body)
    for got, rows, sent in ((one, [3, 6], [1, 2]), (two, [9], [2, 4])):
        total, tree, (twice, four_times), gathered, group, spread, scattered, scattereds, exchanged, small, brain = got
        np.testing.assert_array_equal(total, [3, 6, 9])
        np.testing.assert_array_equal(tree["a"], [1.5, 3, 4.5])
        np.testing.assert_array_equal(tree["b"][0], [3, 6, 9])
        assert tree["b"][1] == 1.5 and tree["b"][1].shape == ()
        np.testing.assert_array_equal(twice, [4, 8, 12])
        np.testing.assert_array_equal(four_times, [8, 16, 24])
        np.testing.assert_array_equal(gathered, [1, 2, 3, 2, 4, 6])
        np.testing.assert_array_equal(group[1], [1, 2])
        np.testing.assert_array_equal(spread["b"][0], [4, 8, 12])
        np.testing.assert_array_equal(scattered, rows)
        np.testing.assert_array_equal(scattereds[1], 3 * np.array(rows))
        np.testing.assert_array_equal(exchanged, sent)
        np.testing.assert_array_equal(small, [1.5, 3, 4.5])
        np.testing.assert_array_equal(brain, [1.5, 3, 4.5])  # bfloat16 rounds the thousandth away
        assert small.dtype == brain.dtype == np.float32


DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")


@modes
def test_arrays_of_another_layout(mode: str) -> None:
    layouts = pytest.importorskip("jax.experimental.layout")
    if not hasattr(layouts, "Format"):
        pytest.skip("this version of JAX has no jax.experimental.layout.Format")

    def body(context: Context) -> Any:
        rows = jnp.arange(6.0).reshape(2, 3)
        turned = jax.device_put(rows, layouts.Format(layouts.Layout(major_to_minor=(1, 0)), rows.sharding))
        return values(MODES[mode](lambda x: (hvd.allreduce(x, op=hvd.Sum), hvd.allgather(x)))(turned))

    rows = np.arange(6.0).reshape(2, 3)
    for total, joined in run_ranks(2, body):
        np.testing.assert_array_equal(total, 2 * rows)
        np.testing.assert_array_equal(joined, np.concatenate([rows, rows]))


@modes
def test_every_dtype_and_shape(mode: str) -> None:
    def body(context: Context) -> Any:
        with allow_64_bits():
            arrays = [jnp.ones(shape, dtype) for dtype in (*DTYPES, *FLOATS) for shape in ((), (0,), (2, 3))]
            return values(MODES[mode](lambda arrays: hvd.grouped_allreduce(arrays, op=hvd.Sum))(arrays))

    for got in run_ranks(2, body):
        for array, (dtype, shape) in zip(
            got, [(d, s) for d in (*DTYPES, *FLOATS) for s in ((), (0,), (2, 3))], strict=True
        ):
            assert (array.dtype.name, array.shape) == (dtype, shape)
            assert (array == (1 if dtype == "bool" else 2)).all()


def test_ragged_rows_and_splits_outside_of_programs() -> None:
    def body(context: Context) -> Any:
        x = jnp.arange(3.0) + 10 * context.rank
        return values((hvd.allgather(x[: context.rank + 1]), hvd.alltoall(x, splits=[1, 2])))

    one, two = run_ranks(2, body)
    np.testing.assert_array_equal(one[0], [0, 10, 11])
    np.testing.assert_array_equal(one[1][0], [0, 10])
    np.testing.assert_array_equal(two[1][0], [1, 2, 11, 12])
    np.testing.assert_array_equal(two[1][1], [2, 2])


def losses(weights: jax.Array, op: int | None) -> Callable[[jax.Array], jax.Array]:
    """A scalar of an operation's result, with another weight for each element of it."""

    def loss(x: jax.Array) -> jax.Array:
        if op is not None:
            result = hvd.allreduce(x, op=op)
        else:
            result = jnp.concatenate(
                [hvd.allgather(x), hvd.broadcast(x, 1), hvd.reducescatter(x, op=hvd.Sum), hvd.alltoall(x)]
            )
        return (weights[: result.size] * result).sum()

    return loss


@modes
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product])
def test_gradients_of_reductions(mode: str, op: int) -> None:
    x = np.array([[1.0, 0.0, 3.0, 5.0], [2.0, 4.0, 0.5, 5.0]], np.float32)
    weights = np.array([1.0, 2.0, 3.0, 4.0], np.float32)

    def body(context: Context) -> Any:
        return values(MODES[mode](jax.grad(losses(jnp.asarray(weights), op)))(jnp.asarray(x[context.rank])))

    # The loss that is differentiated is the sum of the ranks' losses, which are alike; an average's, their mean.
    def alone(both: jax.Array) -> jax.Array:
        reductions = {hvd.Sum: jnp.sum, hvd.Average: jnp.sum, hvd.Min: jnp.min, hvd.Max: jnp.max, hvd.Product: jnp.prod}
        return (jnp.asarray(weights) * reductions[op](both, axis=0)).sum() * (1 if op == hvd.Average else 2)

    expected = np.asarray(jax.grad(alone)(jnp.asarray(x)))
    for rank, got in enumerate(run_ranks(2, body)):
        np.testing.assert_allclose(got, expected[rank], rtol=1e-6)


@modes
def test_gradients_of_movements(mode: str) -> None:
    def body(context: Context) -> Any:
        weights = jnp.arange(1.0, 21.0) * (context.rank + 1)
        gradient = jax.grad(losses(weights, None))
        again = jax.grad(lambda x: (gradient(x) ** 2).sum())  # of something linear: nothing, on all ranks
        x = jnp.arange(4.0)
        return values(MODES[mode](lambda x: (gradient(x), again(x)))(x))

    weights = np.arange(1.0, 21.0)
    mean = 1.5 * weights  # of the ranks'
    for rank, (got, second) in enumerate(run_ranks(2, body)):
        rows, exchanged = [weights[12:14] * (other + 1) for other in range(2)], []
        for other in range(2):  # who got our half of the alltoall in place `rank`
            exchanged.append(weights[14 + 2 * rank : 16 + 2 * rank] * (other + 1))
        expected = mean[4 * rank : 4 * rank + 4] + (mean[8:12] if rank == 1 else 0)
        expected = expected + 2 * np.concatenate(rows) + np.concatenate(exchanged)
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        np.testing.assert_array_equal(second, np.zeros(4))


@modes
def test_the_second_derivative_of_a_reducescatter(mode: str) -> None:
    def body(context: Context) -> Any:
        def loss(x: jax.Array) -> jax.Array:
            return (hvd.reducescatter(x, op=hvd.Sum, name="cubes") ** 3).sum()

        # Three rows: two for the first rank, one for the second.
        second = MODES[mode](jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum()))
        return values(second(jnp.array([1.0, 2.0, 3.0]) * (context.rank + 1)))

    for got in run_ranks(2, body):
        total = np.array([3.0, 6.0, 9.0])
        np.testing.assert_allclose(got, (2 * 6 * total) * 2 * (2 * 2 * 3 * total**2), rtol=1e-5)


@pytest.mark.skipif(jax.__version_info__ < (0, 7), reason="JAX 0.7 gives keys the layout of their integers")
def test_random_keys_in_a_program() -> None:
    def body(context: Context) -> Any:
        return values(jax.random.key_data(jax.jit(lambda key: hvd.broadcast(key, 1))(jax.random.key(context.rank))))

    for got in run_ranks(2, body):
        np.testing.assert_array_equal(got, [0, 1])


def test_a_batch_and_a_loop() -> None:
    def body(context: Context) -> Any:
        x = jnp.arange(6.0).reshape(2, 3) + context.rank
        batch = jax.jit(jax.vmap(lambda row: hvd.allreduce(row, op=hvd.Sum)))(x)
        loop = jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda _, y: hvd.allreduce(y + 1), x))(x)
        return values((batch, loop))

    for batch, loop in run_ranks(2, body):
        np.testing.assert_array_equal(batch, 2 * np.arange(6.0).reshape(2, 3) + 1)
        np.testing.assert_array_equal(loop, np.arange(6.0).reshape(2, 3) + 5.5)


def test_calls_that_do_not_depend_on_each_other_find_each_other() -> None:
    """XLA starts them in an order of its own, which differs between ranks and runs."""

    def body(context: Context) -> Any:
        @jax.jit
        def many(matrix: jax.Array) -> list[jax.Array]:
            return [hvd.allreduce((matrix * k) @ matrix, op=hvd.Sum)[0, 0] for k in range(1, 13)]

        matrix = jnp.eye(150) * (context.rank + 1)
        return [values(many(matrix)) for _ in range(10)]

    for runs in run_ranks(2, body):
        for found in runs:
            np.testing.assert_array_equal(found, [5.0 * k for k in range(1, 13)])


def test_process_sets() -> None:
    def body(context: Context) -> Any:
        pair = hvd.add_process_set([0, 2])
        if not pair.included():
            with pytest.raises(InvalidRequest, match="not a member"):
                jax.jit(lambda x: hvd.allreduce(x, process_set=pair))(jnp.ones(2))
            return None
        both = jax.jit(lambda x: (hvd.allreduce(x, process_set=pair), hvd.broadcast(x, 2, process_set=pair)))
        return values(both(jnp.full(2, float(context.rank))))

    results = run_ranks(3, body)
    assert results[1] is None
    for rank in (0, 2):
        np.testing.assert_array_equal(results[rank], [[1, 1], [2, 2]])


def test_a_program_never_runs_over_another_process_set_of_the_same_number() -> None:
    def body(context: Context) -> list[float]:
        pair = hvd.add_process_set([0, 1])
        number, program = pair.process_set_id, jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=pair))
        found = [float(program(1.0))] if pair.included() else []
        hvd.remove_process_set(pair)
        alone = hvd.add_process_set([0])
        assert alone.process_set_id == number
        if found:
            with pytest.raises(
                jax.errors.JaxRuntimeError, match=r"process set of ranks 0, 1 is not there \(any more\)"
            ):
                program(1.0).block_until_ready()
        hvd.add_process_set(pair)
        assert pair.process_set_id != number
        return [*found, float(program(1.0))] if found else []

    assert run_ranks(3, body) == [[2, 2], [2, 2], []]


def test_random_keys_are_not_reduced() -> None:
    def body(context: Context) -> None:
        for operation in (hvd.allreduce, hvd.reducescatter):
            for mode in MODES.values():
                with pytest.raises(InvalidRequest, match="dtype key<fry> is not supported"):
                    mode(operation)(jax.random.split(jax.random.key(0)))

    run_ranks(1, body)


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="this version of JAX has no jax.shard_map")
def test_functions_mapped_over_devices_of_a_rank_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    mesh, rows = jax.sharding.AbstractMesh((2,), ("devices",)), jax.sharding.PartitionSpec("devices")

    def body(context: Context) -> None:
        mapped = jax.shard_map(hvd.allreduce, mesh=mesh, in_specs=rows, out_specs=rows)
        with pytest.raises(InvalidRequest, match="mapped over 2 devices"):
            jax.make_jaxpr(mapped)(jnp.ones(4))

    run_ranks(1, body)


def test_errors() -> None:
    def body(context: Context) -> None:
        with pytest.raises(MismatchError, match="differs between ranks"):
            hvd.allreduce(jnp.ones(2 + context.rank), name="x")
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"'allreduce.y' differs between ranks in its shape \(rank 0: float32"
        ):
            jax.block_until_ready(jax.jit(lambda x: hvd.allreduce(x, name="y"))(jnp.ones(2 + context.rank)))
        with pytest.raises(jax.errors.JaxRuntimeError, match="different numbers of rows"):
            jax.block_until_ready(jax.jit(lambda x: hvd.allgather(x, name="z"))(jnp.ones(2 + context.rank)))
        with pytest.raises(InvalidRequest, match="splits are for calls outside"):
            jax.jit(lambda x: hvd.alltoall(x, splits=[1, 1]))(jnp.ones(2))
        with pytest.raises(InvalidRequest, match="complex64 is not supported"):
            hvd.allreduce(jnp.ones(2, jnp.complex64))
        with pytest.raises(InvalidRequest, match=r"'allreduce\.z': dtype complex64 is not supported"):
            jax.jit(lambda x: hvd.allreduce(x, name="z"))(jnp.ones(2, jnp.complex64))
        with pytest.raises(OverflowError, match="3000000000 to 3000000000 do not fit into int32; set jax_enable_x64"):
            hvd.allreduce(np.array([3_000_000_000]), op=hvd.Sum)
        with pytest.raises(OverflowError, match=r"1.0 to 1e\+300 do not fit into float32; set jax_enable_x64"):
            hvd.allreduce(np.array([1, 1e300, np.inf, np.nan]), op=hvd.Sum)
        for call in (hvd.barrier, hvd.join):
            with pytest.raises(InvalidRequest, match=r"it works outside of jax\.jit only"):
                jax.jit(lambda x, call=call: x + (call() or 0))(1.0)
        with pytest.raises(NotImplementedError, match="Adasum has no gradient"):
            jax.grad(lambda x: hvd.allreduce(x, op=hvd.Adasum).sum())(jnp.ones(2))
        # The job goes on.
        np.testing.assert_array_equal(jax.jit(lambda x: hvd.allreduce(x))(jnp.ones(2)), [1, 1])

    run_ranks(2, body)


def steps_until_death(context: Context, victim: int, folder: Path) -> str:
    """Train in processes of their own until one of them is killed; return what the others hear."""
    step = jax.jit(lambda x: hvd.allreduce(x + 1, name="x"))
    x = jnp.zeros(1000)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        for number in range(10_000):
            if number == 3:
                wait_for_others(context, victim, folder)
                if context.rank == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
            x = step(x).block_until_ready()
    assert number == 3 and float(x[0]) == 3
    return str(caught.value)


def test_a_program_hears_who_died(tmp_path: Path) -> None:
    told, _ = run_ranks(2, steps_until_death, 1, tmp_path, how="processes", dies=[1])
    assert "'allreduce.x' failed: rank 1" in told and "its process was killed or crashed" in told


def test_without_init() -> None:
    with pytest.raises(ValueError, match="initialized"):
        jax.jit(lambda x: hvd.allreduce(x))(jnp.ones(2))


def predict(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]


def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return ((predict(params, x) - y) ** 2).mean()


def parameters(seed: int) -> Any:
    keys = jax.random.split(jax.random.key(seed), 2)
    return {"w1": jax.random.normal(keys[0], (8, 16)), "b1": jnp.zeros(16), "w2": jax.random.normal(keys[1], (16, 1))}


class Momentum:
    """An optimizer in Optax's manner."""

    def init(self, params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(self, grads: Any, state: Any, params: Any = None) -> Any:
        state = jax.tree.map(lambda velocity, grad: 0.9 * velocity + grad, state, grads)
        return jax.tree.map(lambda velocity: -0.05 * velocity, state), state


def train(params: Any, optimizer: Any, batches: list[tuple[Array, Array]], gradient: Any, mode: str) -> Any:
    state = optimizer.init(params)

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        updates, state = optimizer.update(gradient(params, x, y), state, params)
        return jax.tree.map(jnp.add, params, updates), state

    step = MODES[mode](step)
    for x, y in batches:
        params, state = step(params, state, jnp.asarray(x), jnp.asarray(y))
    return values(params)


@modes
@pytest.mark.parametrize("how", ["optimizer", "grad"])
def test_training_is_that_of_one_process(mode: str, how: str) -> None:
    random = np.random.default_rng(7)
    batches = [
        (random.normal(size=(16, 8)).astype(np.float32), random.normal(size=(16, 1)).astype(np.float32))
        for _ in range(5)
    ]

    def body(context: Context) -> Any:
        mine = [(x[context.rank * 8 :][:8], y[context.rank * 8 :][:8]) for x, y in batches]
        params = hvd.broadcast_parameters(parameters(context.rank), root_rank=0)
        if how == "optimizer":
            return train(params, hvd.DistributedOptimizer(Momentum()), mine, jax.grad(loss_of), mode)
        return train(params, Momentum(), mine, hvd.grad(loss_of), mode)

    expected = train(parameters(0), Momentum(), batches, jax.grad(loss_of), "jit")
    for got in run_ranks(2, body):
        jax.tree.map(lambda mine, other: np.testing.assert_allclose(mine, other, rtol=2e-4, atol=1e-6), got, expected)


def test_value_aux_and_objects() -> None:
    def body(context: Context) -> Any:
        def loss(x: jax.Array) -> Any:
            return (x**2).sum() * (context.rank + 1), x[0]

        (value, aux), gradient = hvd.value_and_grad(loss, has_aux=True)(jnp.ones(2))
        same, other = hvd.grad(loss, has_aux=True)(jnp.ones(2))
        return values((value, aux, gradient, same, other)), hvd.broadcast_object({"rank": context.rank}, 1)

    for rank, ((value, aux, gradient, same, other), told) in enumerate(run_ranks(2, body)):
        assert (value, aux, other, told) == (2.0 * (rank + 1), 1.0, 1.0, {"rank": 1})
        np.testing.assert_array_equal(gradient, [3, 3])
        np.testing.assert_array_equal(same, [3, 3])
