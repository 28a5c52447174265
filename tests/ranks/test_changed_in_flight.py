"""Tensors that a program changes while an operation on them is in flight: old or new bytes, and nothing else breaks."""

import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from farandole.config import Config
from farandole.core.context import Context
from farandole.core.operations.kinds import ALLREDUCE
from farandole.meeting.rendezvous import from_environment
from helpers.ranks import run_ranks
from helpers.recurring import recurring

pytestmark = pytest.mark.native

SIZES = [10, 100_000]  # elements: by the lane, and in stripes


@contextmanager
def flickering(values: np.ndarray) -> Iterator[None]:
    """Set `values` to 1 and to 2 in turns while the block runs."""
    over = threading.Event()

    def flicker() -> None:
        while not over.is_set():
            values[:] = 3 - values[0]

    thread = threading.Thread(target=flicker)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def sums(outer: Context, hosts: int) -> list[bool]:
    """Return whether each element of each sum is of old and new values, and whether the next sum is right.

    Between hosts an element may be of old and new bytes: TCP cuts a tensor anywhere."""
    outer.shutdown()
    found = []
    with Context(from_environment(), Config(), host=f"host {outer.rank % hosts}") as context:
        for size in SIZES:
            changing, result = np.ones(size, np.float32), np.empty(size, np.float32)
            with flickering(changing):
                for step in range(20):
                    context.engine.start(recurring(ALLREDUCE), f"x {size} {step}", changing, result).wait()
                    sums = {np.float32(each) for each in range(outer.size, 2 * outer.size + 1)}
                    found.append(hosts > 1 or set(np.unique(result)) <= sums)
            still = np.full(size, outer.rank, np.float32)
            context.engine.run(recurring(ALLREDUCE), f"still {size}", still, still)
            found.append(bool((still == sum(range(outer.size))).all()))
    return found


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_tensor_changed_in_flight_gives_old_or_new_values(hosts: int) -> None:
    for found in run_ranks(2, sums, hosts, how="processes"):
        assert all(found)


@pytest.mark.parametrize("kind", [bytearray, partial(array, "B")], ids=["bytearray", "array"])
def test_lent_memory_cannot_move_before_the_end(kind: Callable[[list[int]], Any]) -> None:
    """The engine borrows it for the time of a call, and keeps it for as long as an operation is in flight."""
    refused = threading.Event()

    def body(context: Context) -> list[int]:
        lent = kind([context.rank + 1] * 8)
        for step in range(3):
            context.engine.run(recurring(ALLREDUCE), "blocking", lent, lent)
            lent = resized(lent, 9 + 2 * step)
        if context.rank == 1:
            assert refused.wait(60)
        part = context.engine.start(recurring(ALLREDUCE), "in flight", lent, lent)
        if context.rank == 0:
            with pytest.raises(BufferError):
                resized(lent, 20)
            refused.set()
        part.wait()
        return list(resized(lent, 3))

    assert run_ranks(2, body) == [[24, 24, 24]] * 2


def resized(lent: Any, size: int) -> Any:
    if size < len(lent):
        del lent[size:]
    else:
        lent.extend([0] * (size - len(lent)))
    return lent
