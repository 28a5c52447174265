"""Tensors whose elements are not in order in memory, where each rank has strides of its own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from farandole.core.context import Context
from farandole.errors import InvalidRequest
from helpers.bindings import BINDINGS, FUNCTIONAL, Binding
from helpers.ranks import run_ranks

SIZE = 3
RANKS = [np.arange(SIZE * 4).reshape(SIZE, 4) + 10 * rank for rank in range(SIZE)]

changing = pytest.mark.parametrize("binding", [b for b in BINDINGS if not b.on_device], ids=lambda b: b.name)
every_binding = pytest.mark.parametrize("binding", [b for b in FUNCTIONAL if not b.on_device], ids=lambda b: b.name)


def strided(binding: Binding, rank: int) -> Any:
    """Return the values of `rank`: contiguous on rank 0, transposed on rank 1, every second column on rank 2."""
    if rank == 0:
        return binding.make(RANKS[0], "float32")
    if rank == 1:
        return binding.make(RANKS[1].T, "float32").T
    return binding.make(np.repeat(RANKS[2], 2, 1), "float32")[:, ::2]


@every_binding
def test_results_are_those_of_contiguous_tensors(binding: Binding) -> None:
    hvd, total, joined = binding.hvd, np.sum(RANKS, 0), np.concatenate(RANKS)

    def body(context: Context) -> None:
        mine = strided(binding, context.rank)
        whole = binding.make(RANKS[context.rank], "float32")
        swapped = np.stack([each[context.rank] for each in RANKS])
        cases: list[tuple[Any, Any]] = [
            (hvd.allreduce(mine, op=hvd.Sum), total),
            (hvd.grouped_allreduce([whole, mine], op=hvd.Sum)[1], total),
            (hvd.allgather(mine), joined),
            (hvd.grouped_allgather([whole, mine])[1], joined),
            (hvd.broadcast(mine, 1), RANKS[1]),
            (hvd.alltoall(mine), swapped),
            (hvd.alltoall(mine, splits=[1, 1, 1])[0], swapped),
            (hvd.reducescatter(mine, op=hvd.Sum), total[context.rank : context.rank + 1]),
        ]
        for place, (got, expected) in enumerate(cases):
            np.testing.assert_array_equal(binding.read(got), expected, err_msg=str(place))
        np.testing.assert_array_equal(binding.read(mine), RANKS[context.rank])

    run_ranks(SIZE, body)


@changing
def test_tensors_are_changed_in_place(binding: Binding) -> None:
    hvd, total = binding.hvd, sum(RANKS)
    changes: list[tuple[Callable[[Any], Any], Any]] = [
        (lambda mine: hvd.allreduce_(mine, op=hvd.Sum), total),
        (lambda mine: hvd.allreduce_async_(mine, op=hvd.Sum).wait(), total),
        (lambda mine: hvd.grouped_allreduce_([mine], op=hvd.Sum)[0], total),
        (lambda mine: hvd.grouped_allreduce_async_([mine], op=hvd.Sum).wait()[0], total),
        (lambda mine: hvd.broadcast_(mine, 2), RANKS[2]),
        (lambda mine: hvd.broadcast_async_(mine, 0).wait(), RANKS[0]),
    ]

    def body(context: Context) -> None:
        for change, expected in changes:
            mine = strided(binding, context.rank)
            assert change(mine) is mine
            np.testing.assert_array_equal(binding.read(mine), expected)

    run_ranks(SIZE, body)


@pytest.mark.parametrize("hosts", [1, 2], ids=["one host", "two hosts"])
@pytest.mark.parametrize("length", [8, 300_000])
@changing
def test_tensors_of_a_group_may_share_memory(binding: Binding, length: int, hosts: int) -> None:
    hvd = binding.hvd

    def body(context: Context) -> None:
        values, half = np.arange(length) % 1000, length // 2
        for grouped in (hvd.grouped_allreduce_, lambda given, op: hvd.grouped_allreduce_async_(given, op=op).wait()):
            whole = binding.make(values + context.rank, "float32")
            other = binding.make(np.full(3, context.rank), "int64")
            given = [whole, other, whole[half:], whole, whole[: half + 2]]
            for got, mine in zip(grouped(given, op=hvd.Sum), given, strict=True):
                assert got is mine
            np.testing.assert_array_equal(binding.read(whole), 2 * values + 1)
            assert binding.read(other).tolist() == [1, 1, 1]

    run_ranks(2, body, hosts=hosts)


def test_arrays_of_numpy_in_any_order() -> None:
    hvd = BINDINGS[0].hvd
    values = np.arange(6.0).reshape(2, 3)
    reversed_, fortran, frozen = values[::-1, ::-1], np.asfortranarray(values), np.broadcast_to(values[0], (2, 3))

    def body(_: Context) -> None:
        for array in (reversed_, fortran, frozen, values.T):
            np.testing.assert_array_equal(hvd.allreduce(array, op=hvd.Sum), 2 * array)
        for array in (reversed_.copy()[::-1], np.asfortranarray(values)):
            before = array.copy()
            assert hvd.allreduce_(array, op=hvd.Sum) is array
            np.testing.assert_array_equal(array, 2 * before)
        with pytest.raises(InvalidRequest, match="read-only"):
            hvd.allreduce_(frozen)

    run_ranks(2, body)
