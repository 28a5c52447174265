"""Operations that move rows between ranks, for every binding."""

import itertools

import numpy as np
import pytest

from farandole.core.context import Context
from helpers.bindings import BINDINGS, FUNCTIONAL, SIZES, Binding
from helpers.ranks import run_ranks

every_binding = pytest.mark.parametrize("binding", BINDINGS, ids=lambda binding: binding.name)
every_functional = pytest.mark.parametrize("binding", FUNCTIONAL, ids=lambda binding: binding.name)
every_size = pytest.mark.parametrize("size", SIZES)


def rows_of(rank: int, rows: int, width: int = 3) -> np.ndarray:
    return np.arange(rows * width).reshape(rows, width) % 100 + 10 * rank


@every_binding
@every_size
def test_allgather_joins_ragged_rows_of_every_dtype(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        shapes = [[rank + 1 for rank in range(size)], [0] * size, [7 * (rank == size - 1) for rank in range(size)]]
        for dtype, rows in itertools.product((*binding.dtypes, "bool"), shapes):
            ranks = [rows_of(rank, count) % (2 if dtype == "bool" else 100) for rank, count in enumerate(rows)]
            mine = binding.make(ranks[context.rank], dtype)
            for result in (
                binding.hvd.allgather(mine),
                binding.hvd.synchronize(binding.hvd.allgather_async(mine, name="ragged")),
                binding.hvd.grouped_allgather([mine, mine])[1],
                binding.hvd.synchronize(binding.hvd.grouped_allgather_async([mine], name="one"))[0],
            ):
                assert result.dtype == mine.dtype
                np.testing.assert_array_equal(
                    binding.read(result).astype("int64"), np.concatenate(ranks), err_msg=dtype
                )

    run_ranks(size, body)


@every_functional
@every_size
def test_a_gathered_tensor_is_ours_to_change(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        joined = binding.hvd.allgather(binding.make(np.full(4, context.rank), "float32"))
        joined += 1
        binding.hvd.barrier()
        np.testing.assert_array_equal(binding.read(joined), np.repeat(np.arange(size), 4) + 1)

    run_ranks(size, body)


@every_binding
@every_size
def test_broadcast_from_every_root(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        for root, dtype in itertools.product(range(size), (*binding.dtypes, "bool")):
            ranks = [rows_of(rank, 5) % (2 + 98 * (dtype != "bool")) for rank in range(size)]
            mine = binding.make(ranks[context.rank], dtype)
            for result in (
                binding.hvd.broadcast(mine, root),
                binding.hvd.synchronize(binding.hvd.broadcast_async(mine, root, name="b")),
            ):
                np.testing.assert_array_equal(binding.read(result).astype("int64"), ranks[root])
            np.testing.assert_array_equal(binding.read(mine).astype("int64"), ranks[context.rank])
            other = binding.make(ranks[context.rank], dtype)
            assert binding.hvd.broadcast_(mine, root) is mine
            assert binding.hvd.synchronize(binding.hvd.broadcast_async_(other, root)) is other
            np.testing.assert_array_equal(binding.read(mine).astype("int64"), ranks[root])
            np.testing.assert_array_equal(binding.read(other).astype("int64"), ranks[root])

    run_ranks(size, body)


@every_functional
@every_size
def test_broadcast_of_scalars_and_of_nothing(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        scalar = binding.make(np.array(context.rank), "float64")
        assert binding.read(binding.hvd.broadcast(scalar, size - 1)) == size - 1
        assert binding.hvd.broadcast(binding.make(np.ones((0, 2)), "float32"), 0).shape == (0, 2)

    run_ranks(size, body)


@every_binding
@every_size
def test_alltoall_sends_equal_parts(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        mine = binding.make(np.repeat(np.arange(size), 2)[:, None] * 10 + context.rank, "int32")
        result = binding.hvd.alltoall(mine)
        np.testing.assert_array_equal(binding.read(result)[:, 0], np.repeat(np.arange(size), 2) + 10 * context.rank)
        output, received = binding.hvd.synchronize(binding.hvd.alltoall_async(mine, name="a"))
        np.testing.assert_array_equal(binding.read(output), binding.read(result))
        assert list(received) == [2] * size

    run_ranks(size, body)


@every_binding
@every_size
@pytest.mark.parametrize("seed", range(4))
def test_alltoall_with_any_splits(binding: Binding, size: int, seed: int) -> None:
    splits = np.random.default_rng(seed).integers(0, 4, (size, size))
    if seed == 0:
        splits[0, :] = 0  # one rank sends nothing
    if seed == 1:
        splits[:, -1] = 0  # one rank gets nothing
    if seed == 2:
        splits[:] = 0

    def body(context: Context) -> None:
        mine = [rows_of(rank, splits[rank].sum() + 2 * (seed == 3), 2) for rank in range(size)]
        starts = np.cumsum(splits, axis=1) - splits
        want = np.concatenate(
            [
                mine[rank][starts[rank, context.rank] : starts[rank, context.rank] + splits[rank, context.rank]]
                for rank in range(size)
            ]
        )
        for dtype in ("float32", "int64", "uint8"):
            for asked in (
                [int(part) for part in splits[context.rank]],
                binding.make(splits[context.rank], "int32"),
            ):
                output, received = binding.hvd.alltoall(binding.make(mine[context.rank], dtype), asked)
                np.testing.assert_array_equal(binding.read(output).astype("int64"), want)
                np.testing.assert_array_equal(binding.read(received), splits[:, context.rank])
                assert binding.read(received).dtype == np.int32

    run_ranks(size, body)


@every_binding
@every_size
def test_operations_of_all_kinds_at_once(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        mine = binding.make(np.full((size, 2), context.rank), "float32")
        calls = [
            lambda: binding.hvd.allreduce_async(mine, name="x"),
            lambda: binding.hvd.allgather_async(mine, name="x"),
            lambda: binding.hvd.broadcast_async(mine, size - 1, name="x"),
            lambda: binding.hvd.alltoall_async(mine, name="x"),
            lambda: binding.hvd.reducescatter_async(mine, name="x"),
        ]
        order = np.random.default_rng(context.rank).permutation(len(calls))
        handles = {place: calls[place]() for place in order}
        binding.hvd.barrier()
        mean = (size - 1) / 2
        np.testing.assert_allclose(binding.read(handles[0].wait()), mean)
        np.testing.assert_array_equal(binding.read(handles[1].wait())[:, 0], np.repeat(np.arange(size), size))
        np.testing.assert_array_equal(binding.read(handles[2].wait()), size - 1)
        np.testing.assert_array_equal(binding.read(handles[3].wait()[0])[:, 0], np.arange(size))
        np.testing.assert_allclose(binding.read(handles[4].wait()), mean)

    run_ranks(size, body)


@every_binding
@every_size
def test_no_rank_leaves_a_barrier_before_all_have_come(binding: Binding, size: int) -> None:
    came: list[int] = []

    def body(context: Context) -> None:
        for turn in range(20):
            came.append(turn)
            binding.hvd.barrier()
            assert came.count(turn) == size
            binding.hvd.barrier()

    run_ranks(size, body)
