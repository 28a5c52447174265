"""Ranks with less data than others join, take part in what the others ask for, and change nobody's result."""

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

import farandole.numpy
from farandole.config import Config
from farandole.core.context import Context
from farandole.errors import CollectiveTimeout, HorovodInternalError, JoinedError, MismatchError, PeerLost
from farandole.numpy import Adasum, Average, Max, Min, Product, Sum
from helpers.bindings import BINDINGS, FUNCTIONAL, SIZES, Binding
from helpers.deaths import wait_for_others
from helpers.ranks import run_ranks

every_binding = pytest.mark.parametrize("binding", BINDINGS, ids=lambda binding: binding.name)
every_functional = pytest.mark.parametrize("binding", FUNCTIONAL, ids=lambda binding: binding.name)
every_size = pytest.mark.parametrize("size", SIZES)


def value(rank: int, step: int) -> int:
    return (rank + 1) * (step + 2)


@every_binding
@every_size
def test_uneven_data(binding: Binding, size: int) -> None:
    """Rank r has r + 1 steps; again and again."""

    def body(context: Context) -> None:
        for turn in range(2):
            for step in range(context.rank + 1):
                each = [value(rank, step) for rank in range(step, size)]
                mine = np.full(5, value(context.rank, step))
                for dtype in ("float32", "float16", "int64"):
                    tensor = binding.make(mine, dtype)
                    for op, want in (
                        (Sum, sum(each)),
                        (Average, sum(each) / size if dtype != "int64" else sum(each) // size),
                        (Min, min(each)),
                        (Max, max(each)),
                        (Product, np.prod(each)),
                    ):
                        got = binding.read(binding.hvd.allreduce(tensor, op=op, name=f"{dtype}.{op}"))
                        np.testing.assert_allclose(got.astype("float64"), want, rtol=1e-3)
                least = binding.hvd.allreduce(
                    binding.make(-mine, "int32"), op=Max, prescale_factor=0.5, name="negative"
                )
                np.testing.assert_array_equal(binding.read(least), -(min(each) // 2))
                same = binding.hvd.allreduce(binding.make(np.ones(3), "float32"), op=Adasum, name="adasum")
                np.testing.assert_allclose(binding.read(same), 1.0, rtol=1e-6)
                group = binding.hvd.grouped_allreduce(
                    [binding.make(mine, "float32"), binding.make(mine, "float64")], op=Sum, name="group"
                )
                for got in group:
                    np.testing.assert_array_equal(binding.read(got), sum(each))
            assert binding.hvd.join() == size - 1
            total = binding.hvd.allreduce(binding.make(np.ones(2), "float32"), op=Sum, name=f"all {turn}")
            np.testing.assert_array_equal(binding.read(total), size)

    run_ranks(size, body)


@every_functional
@pytest.mark.parametrize("hosts", [1, 2])
def test_moving_rows_with_a_joined_rank(binding: Binding, hosts: int) -> None:
    def body(context: Context) -> int:
        hvd = binding.hvd
        if context.rank == 1:
            return hvd.join()
        rows = binding.make(np.full((2, 3), context.rank), "float32")
        np.testing.assert_array_equal(binding.read(hvd.allgather(rows))[:, 0], [0, 0, 2, 2])
        first, second = hvd.grouped_allgather([rows, rows])
        assert first.shape == second.shape == (4, 3)
        np.testing.assert_array_equal(binding.read(hvd.broadcast(rows, 2)), 2.0)
        got, received = hvd.alltoall(rows, splits=[1, 0, 1])
        np.testing.assert_array_equal(binding.read(got)[:, 0], [0, 2])
        np.testing.assert_array_equal(binding.read(received), [1, 0, 1])
        hvd.barrier()
        for refused in (
            lambda: hvd.alltoall(binding.make(np.ones((3, 1)), "float32")),
            lambda: hvd.broadcast(rows, 1),
            lambda: hvd.reducescatter(rows),
        ):
            with pytest.raises(JoinedError, match="is not supported with Join at this time"):
                refused()
        assert issubclass(JoinedError, HorovodInternalError)  # what programs written for Horovod catch
        with pytest.raises(MismatchError, match="shape"):
            hvd.allreduce(binding.make(np.ones(1 + context.rank), "float32"), name="differs")
        return hvd.join()

    assert len(set(run_ranks(3, body, hosts=hosts))) == 1


@every_binding
def test_joining_with_work_in_flight(binding: Binding) -> None:
    def body(context: Context) -> None:
        count = 40 if context.rank == 0 else 20
        handles = [
            binding.hvd.allreduce_async(binding.make(np.ones(3), "float32"), op=Sum, name=f"t{place}")
            for place in range(count)
        ]
        binding.hvd.join()
        for place, handle in enumerate(handles):
            assert binding.hvd.poll(handle) or binding.on_device
            np.testing.assert_array_equal(binding.read(binding.hvd.synchronize(handle)), 3 if place < 20 else 1)

    run_ranks(3, body)


def test_a_join_ends_when_nobody_asks_for_anything() -> None:
    hvd = farandole.numpy
    over = threading.Event()

    def body(context: Context) -> None:
        if context.rank == 0:
            with pytest.raises(CollectiveTimeout) as raised:
                hvd.join()
            assert raised.value.missing == (1, 2)
            over.set()
        assert over.wait(20)
        hvd.barrier()
        hvd.join()

    run_ranks(3, body, config=Config(collective_timeout=timedelta(seconds=0.5)))


def dies_while_another_has_joined(context: Context, folder: Path) -> str:
    hvd = farandole.numpy
    hvd.barrier()
    wait_for_others(context, 1, folder)
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as raised:
        hvd.join()
    return f"rank {raised.value.rank}"


def test_a_death_ends_the_join(tmp_path: Path) -> None:
    results = run_ranks(3, dies_while_another_has_joined, tmp_path, how="processes", dies=[1])
    assert results[0] == results[2] == "rank 1"


def test_shutdown_ends_the_join() -> None:
    def body(context: Context) -> None:
        if context.rank == 1:
            return
        with pytest.raises(PeerLost, match="shut down"):
            farandole.numpy.join()

    run_ranks(3, body)
