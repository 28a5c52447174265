"""Tensors at the limits: whole numbers beyond float64, factors that only fit a wide type, no rows, no dimensions, more
than 2 GiB, more names than fit anywhere."""

import os

import numpy as np
import pytest

import farandole.numpy
from farandole.config import Config
from farandole.core.context import Context
from farandole.numpy import Average, Max, Sum
from helpers.bindings import BINDINGS, FUNCTIONAL, Binding
from helpers.ranks import run_ranks

every_binding = pytest.mark.parametrize("binding", BINDINGS, ids=lambda binding: binding.name)
every_functional = pytest.mark.parametrize("binding", FUNCTIONAL, ids=lambda binding: binding.name)
every_host = pytest.mark.parametrize("hosts", [1, 2], ids=["one host", "two hosts"])

ROOM = 9 << 30  # bytes of memory that the test of large tensors needs
LARGE = (2 << 30) + (100 << 20) + 7  # elements of one byte: beyond what 31 and 32 bits count


def free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@every_functional
def test_an_average_of_large_integers_is_exact(binding: Binding) -> None:
    def body(context: Context) -> None:
        each = np.array([[2**62 + 1, -(2**62) - 1, 7, -7], [2**62 + 5, -(2**62) - 5, 0, 0], [2**62, -(2**62), 1, -1]])
        got = binding.read(binding.hvd.allreduce(binding.make(each[context.rank], "int64")))
        exact = [sum(int(value) for value in column) for column in each.T]
        # Python floors, the mean is truncated toward zero.
        want = [abs(total) // 3 * (1 if total >= 0 else -1) for total in exact]
        assert got.tolist() == want == [2**62 + 2, -(2**62) - 2, 2, -2]
        rows = binding.hvd.reducescatter(binding.make(each[context.rank][:3], "int64"))
        assert binding.read(rows).tolist() == [want[context.rank]]

    run_ranks(3, body)


@every_functional
@every_host
def test_factors_in_the_width_that_they_need(binding: Binding, hosts: int) -> None:
    def body(context: Context) -> None:
        # In float64, for integers: 2**24 + 1 does not fit float32.
        whole = binding.make(np.array([2**24 + 1, -(2**24) - 1]), "int32")
        got = binding.hvd.allreduce(whole, op=Sum, prescale_factor=0.5, postscale_factor=2.0)
        assert binding.read(got).tolist() == [2 * 2**24, -2 * 2**24]  # each half is truncated, then added and doubled
        # In float32, for float16: neither the scaled values nor their sum fit float16.
        half = binding.make(np.array([60000.0, 2.0**-14]), "float16")
        got = binding.hvd.allreduce(half, op=Sum, prescale_factor=4.0, postscale_factor=0.125)
        np.testing.assert_array_equal(binding.read(got), np.array([60000.0, 2.0**-14], np.float16))
        # In its own type: float64 keeps what float32 loses.
        fine = binding.make(np.array([1 + 2.0**-40]), "float64")
        got = binding.hvd.allreduce(fine, op=Average, prescale_factor=3.0)
        assert binding.read(got).tolist() == [3 * (1 + 2.0**-40)]

    run_ranks(2, body, hosts=hosts)


@every_functional
@every_host
def test_no_dimensions_and_no_rows(binding: Binding, hosts: int) -> None:
    def body(context: Context) -> None:
        hvd, rank = binding.hvd, context.rank
        scalar = binding.make(np.array(rank + 1.0), "float32")
        assert binding.read(hvd.allreduce(scalar, op=Sum)).tolist() == 6.0
        assert binding.read(hvd.broadcast(scalar, 2)).tolist() == 3.0
        assert [binding.read(each).tolist() for each in hvd.grouped_allreduce([scalar, scalar], op=Max)] == [3.0, 3.0]
        for refused in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
            with pytest.raises(ValueError, match="at least one dimension"):
                refused(scalar)
        for shape in ((0,), (0, 3), (3, 0)):
            empty = binding.make(np.zeros(shape), "float32")
            assert tuple(hvd.allreduce(empty).shape) == shape
            assert tuple(hvd.broadcast(empty, 1).shape) == shape
            assert tuple(hvd.allgather(empty).shape) == (3 * shape[0], *shape[1:])
            assert tuple(hvd.alltoall(empty).shape) == shape
            assert tuple(hvd.reducescatter(empty, op=Sum).shape) == (shape[0] // 3, *shape[1:])
        ragged = binding.make(np.full((rank * 2, 2), rank), binding.integers[1])
        assert binding.read(hvd.allgather(ragged))[:, 0].tolist() == [1, 1, 2, 2, 2, 2]
        got, received = hvd.alltoall(ragged, splits=[0, rank, rank])
        assert binding.read(received).tolist() == ([0, 0, 0] if rank == 0 else [0, 1, 2])
        assert tuple(got.shape) == (0 if rank == 0 else 3, 2)

    run_ranks(3, body, hosts=hosts)


@every_binding
@every_host
def test_groups_of_every_kind(binding: Binding, hosts: int) -> None:
    def body(context: Context) -> None:
        hvd, rank = binding.hvd, context.rank
        tensors = [
            binding.make(np.full((rank + 1, 2), rank), binding.integers[1]),
            binding.make(np.full((0, 3), rank), "float64"),
            binding.make(np.full((2 - rank,), True), "bool"),
        ]
        for results in (
            hvd.grouped_allgather(tensors),
            hvd.synchronize(hvd.grouped_allgather_async(tensors, name="g")),
        ):
            assert binding.read(results[0])[:, 0].tolist() == [0, 1, 1]
            assert tuple(results[1].shape) == (0, 3)
            assert binding.read(results[2]).tolist() == [True] * 3
        whole = [binding.make(np.arange(5) + rank, "int64"), binding.make(np.ones((3, 2)), "float16")]
        results = hvd.grouped_reducescatter(whole, op=Sum)
        assert binding.read(results[0]).tolist() == ([1, 3, 5] if rank == 0 else [7, 9])
        assert tuple(results[1].shape) == ((2, 2) if rank == 0 else (1, 2))
        assert hvd.grouped_allgather([]) == hvd.grouped_reducescatter([]) == []

    run_ranks(2, body, hosts=hosts)


@every_host
def test_more_names_in_flight_than_numbers(hosts: int) -> None:
    hvd = farandole.numpy
    count = 10_500

    def body(context: Context) -> None:
        for _ in range(2):
            order = range(count) if context.rank == 0 else reversed(range(count))
            handles = {i: hvd.allreduce_async(np.full(2, i, np.int32), op=Sum, name=f"t{i}") for i in order}
            for i, handle in handles.items():
                assert handle.wait().tolist() == [2 * i, 2 * i]

    run_ranks(2, body, timeout=60, config=Config(cache_capacity=100), hosts=hosts)


@pytest.mark.slow
@pytest.mark.skipif(free_memory() < ROOM, reason=f"needs {ROOM >> 30} GiB of free memory")
@pytest.mark.timeout(180)
def test_tensors_beyond_two_gibibytes() -> None:
    hvd = farandole.numpy

    def body(context: Context) -> None:
        tensor = np.zeros(LARGE, np.uint8)
        marks = [0, 2**31 - 1, 2**31, LARGE - 1]
        tensor[marks] = np.arange(4) + context.rank
        assert hvd.allreduce_(tensor, op=Sum) is tensor
        assert tensor[marks].tolist() == [1, 3, 5, 7]
        assert np.count_nonzero(tensor[: 2**20]) == 1
        del tensor
        rows = np.zeros((1, LARGE // 2), np.uint8)  # 2.1 GiB together
        rows[0, [0, -1]] = context.rank + 1
        gathered = hvd.allgather(rows)
        assert gathered.shape == (2, LARGE // 2)
        assert gathered[:, [0, -1]].tolist() == [[1, 1], [2, 2]]

    run_ranks(2, body, timeout=170)
