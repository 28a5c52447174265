"""Tests of requests: made once when they recur, and named for the wire. Of memory that they share, and of handles."""

import threading
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest

from farandole import _native
from farandole.core.operations import kinds
from farandole.core.operations.handle import Handle
from farandole.core.operations.reduction import Average, Max, Reduction, Sum
from farandole.core.operations.request import Request
from farandole.core.operations.requests import allreduce_request, request_of
from farandole.core.process_sets.process_set import ProcessSet, global_process_set

EVERYONE = global_process_set
ROWS = np.ones((4, 3))


@pytest.mark.parametrize("prescale", [1.0, 0.5])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("process_set", [EVERYONE, ProcessSet([0])])
def test_a_recurring_request_is_made_once(prescale: float, grouped: bool, process_set: ProcessSet) -> None:
    made = allreduce_request(Sum, None, "x", prescale, 1.0, process_set, grouped)
    assert made is allreduce_request(Sum, None, "x", prescale, 1.0, process_set, grouped)
    wire = "grouped_allreduce.x" if grouped else "allreduce.x"
    assert made == Request(kinds.ALLREDUCE, "x", Reduction(Sum, prescale), 0, None, grouped, process_set, wire)
    assert made != allreduce_request(Max, None, "x", prescale, 1.0, process_set, grouped)
    assert made != allreduce_request(Sum, None, "y", prescale, 1.0, process_set, grouped)


def test_an_allreduce_averages_by_default_and_refuses_unknown_operators() -> None:
    for prescale in (1.0, 0.5):
        assert allreduce_request(None, None, "x", prescale, 1.0, EVERYONE).reduction.op == Average
        for _ in range(2):  # the refusal is not remembered as a request
            with pytest.raises(ValueError, match="op must be one of Average"):
                allreduce_request(17, None, "x", prescale, 1.0, EVERYONE)


def test_average_is_reported_as_deprecated_each_time() -> None:
    for average, op in ((True, Average), (False, Sum), (False, Sum)):
        with pytest.warns(DeprecationWarning, match="average= is deprecated"):
            assert allreduce_request(None, average, "x", 1.0, 1.0, EVERYONE).reduction.op == op


def test_a_factor_may_be_an_array_and_a_wrong_process_set_is_left_to_the_engine() -> None:
    factor = np.array(0.5)
    assert allreduce_request(Sum, None, "x", factor, 1.0, EVERYONE).reduction.prescale is factor  # type: ignore[arg-type]
    assert request_of(kinds.ALLGATHER, "x", [0]).process_set == [0]  # type: ignore[arg-type]


def test_another_name_is_another_name_on_the_wire() -> None:
    request = request_of(kinds.ALLGATHER, "x", EVERYONE)
    assert (request.wire, request.backward().name, request.backward(".rows").name) == (
        "allgather.x", "x.backward", "x.backward.rows",
    )  # fmt: skip
    assert request.backward().wire is None
    assert request_of(kinds.ALLGATHER, None, EVERYONE).wire is None
    assert request_of(kinds.ALLGATHER, None, EVERYONE).backward().name is None


def test_a_result_is_made_once_for_all_threads_that_wait() -> None:
    made: list[int] = []
    seen: list[object] = []

    class Done:
        """An operation that has completed."""

        def wait(self) -> None: ...

    def finish() -> int:
        made.append(len(made))
        if not seen:
            other.start()
            other.join(0.05)  # it waits for this one
        return made[-1]

    handle = Handle(cast(_native.Handle, Done()), finish=finish)
    other = threading.Thread(target=lambda: seen.append(handle.wait()))
    first = handle.wait()
    other.join()
    assert made == [0] and [first, *seen, handle.wait()] == [0, 0, 0]


def test_a_signal_handler_may_wait_while_the_result_is_made() -> None:
    class Done:
        """An operation that has completed."""

        def wait(self) -> None: ...

    seen: list[object] = []

    def finish() -> object:
        if not seen:
            seen.append(None)
            seen[0] = handle.wait()  # as a handler would
        return object()

    handle = Handle(cast(_native.Handle, Done()), finish=finish)
    waiter = threading.Thread(target=lambda: seen.append(handle.wait()), daemon=True)
    waiter.start()
    waiter.join(20)
    assert len(seen) == 2 and seen[0] is seen[1] is handle.wait()


@pytest.mark.parametrize(
    "tensors, shared",
    [
        ([], False),
        ((ROWS[:2], ROWS[2:]), False),
        ([ROWS[:2], ROWS[1:]], True),
        ([ROWS, ROWS], True),
        ([ROWS[:0], ROWS], False),
        ([ROWS.T, ROWS.T], False),
        ([ROWS, ROWS, "a text"], False),
    ],
    ids=["none", "neighbours", "rows", "all", "empty", "strided", "no tensor"],
)
def test_memory_that_tensors_share_is_found(tensors: Sequence[object], shared: bool) -> None:
    assert _native.share_memory(tensors) == shared
