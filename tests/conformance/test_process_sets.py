"""Process sets: what users see of them, every operation in them, and what they do not do to each other."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from farandole.core.context import Context
from farandole.errors import InvalidRequest, MismatchError
from farandole.numpy import Average, Sum
from helpers.bindings import BINDINGS, FUNCTIONAL, SIZES, Binding
from helpers.ranks import run_ranks

every_binding = pytest.mark.parametrize("binding", BINDINGS, ids=lambda binding: binding.name)
every_functional = pytest.mark.parametrize("binding", FUNCTIONAL, ids=lambda binding: binding.name)
several = pytest.mark.parametrize("size", SIZES[1:])


def test_what_an_object_says() -> None:
    hvd = BINDINGS[0].hvd

    def body(context: Context) -> None:
        rank = context.rank
        everyone = hvd.global_process_set
        assert str(everyone) == "ProcessSet(process_set_id=0, ranks=[0, 1, 2], mpi_comm=None)"
        assert (everyone.size(), everyone.rank(), everyone.included()) == (3, rank, True)
        some = hvd.ProcessSet([2, 0])
        assert str(some) == "ProcessSet(process_set_id=None, ranks=[0, 2], mpi_comm=None)"
        assert (some.size(), some.rank(), some.included()) == (None, None, None)

        assert hvd.add_process_set(some) is some
        assert str(some) == "ProcessSet(process_set_id=1, ranks=[0, 2], mpi_comm=None)"
        assert (some.size(), some.included()) == (2, rank != 1)
        if rank == 1:
            with pytest.raises(ValueError, match=r"Process is not part of provided process set\."):
                some.rank()
        else:
            assert some.rank() == rank // 2

        other = hvd.add_process_set([1])
        assert other.process_set_id == 2
        assert hvd.remove_process_set(some)
        assert (some.process_set_id, some.size(), other.process_set_id) == (None, None, 2)
        assert not hvd.remove_process_set(some)
        assert not hvd.remove_process_set(everyone)
        assert hvd.add_process_set(hvd.ProcessSet(range(2))).process_set_id == 1
        assert hvd.add_process_set(some).process_set_id == 3

    run_ranks(3, body)


def test_one_object_may_be_shared_by_threads() -> None:
    hvd = BINDINGS[0].hvd
    some = hvd.ProcessSet([0, 1])

    def body(context: Context) -> None:
        hvd.add_process_set(some)
        assert some.process_set_id == 1
        if some.included():
            assert some.rank() == context.rank
            np.testing.assert_array_equal(hvd.allreduce(np.ones(2), op=Sum, process_set=some), 2)

    run_ranks(3, body)
    assert some.process_set_id is None


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        ([1, 0], "Attempted to add a duplicate process set"),
        ([2, 1, 0], "Attempted to add a duplicate process set"),
        ([1, 1], "holds each rank once"),
        ([0, 3], "are 0 to 2"),
        ([-1], "are 0 to 2"),
        ([], "at least one rank"),
    ],
    ids=str,
)
def test_what_cannot_be_added(ranks: list[int], problem: str) -> None:
    hvd = BINDINGS[0].hvd

    def body(context: Context) -> None:
        first = hvd.add_process_set([0, 1])
        with pytest.raises(ValueError, match=problem):
            hvd.add_process_set(ranks)
        assert first.process_set_id == 1
        assert hvd.add_process_set([0, 2]).process_set_id == 2

    run_ranks(3, body)


def test_any_iterable_of_ranks_is_a_set() -> None:
    hvd = BINDINGS[0].hvd
    for ranks in (range(3), reversed(range(3)), (rank for rank in (2, 0, 1)), {2, 1, 0}, iter([0, 2, 1])):
        assert hvd.ProcessSet(ranks).ranks == [0, 1, 2]

    def body(context: Context) -> None:
        some = hvd.add_process_set(rank for rank in range(3) if rank != 1)
        assert (some.ranks, some.included()) == ([0, 2], context.rank != 1)
        last = hvd.add_process_set(reversed(range(1, 3)))
        assert (last.ranks, last.process_set_id) == ([1, 2], 2)

    run_ranks(3, body)


def test_what_is_no_set_of_ranks() -> None:
    hvd = BINDINGS[0].hvd
    for wrong in (["0"], [True], object(), 3, [0.0], "01", (str(rank) for rank in range(2))):
        with pytest.raises(ValueError, match="list of ranks"):
            hvd.ProcessSet(wrong)
    with pytest.raises(ValueError, match="expected a ProcessSet"):
        hvd.remove_process_set([0])


def test_ranks_that_want_different_sets_all_hear_who_wants_what() -> None:
    hvd = BINDINGS[0].hvd

    def body(context: Context) -> str:
        kept = hvd.add_process_set([0, 1])
        wanted = hvd.ProcessSet([1, 2] if context.rank == 2 else [0, 2])
        with pytest.raises(MismatchError) as caught:
            hvd.add_process_set(wanted)
        theirs = dict.fromkeys((0, 1), "add_process_set([0, 2]), number 2")
        assert caught.value.asked == theirs | {2: "add_process_set([1, 2]), number 2"}
        assert wanted.process_set_id is None
        with pytest.raises(MismatchError) as caught:
            hvd.remove_process_set(kept) if context.rank == 1 else hvd.add_process_set([2])
        assert caught.value.asked[1] == "remove_process_set([0, 1]), number 1"
        assert kept.process_set_id == 1
        # Nothing stays of it: the next set gets the number that these would have had.
        assert hvd.add_process_set([1, 2]).process_set_id == 2
        return str(caught.value)

    assert len(set(run_ranks(3, body))) == 1


def test_only_members_of_a_set_that_is_there_can_use_it() -> None:
    for binding in BINDINGS:
        hvd = binding.hvd

        def body(context: Context, hvd: Any, make: Callable[..., Any]) -> None:
            some = hvd.add_process_set([0, 2])
            unknown = hvd.ProcessSet([0, 2])
            tensor = make(np.ones((3, 2)), "float32")
            for ask in (
                lambda members: hvd.allreduce(tensor, name="t", process_set=members),
                lambda members: hvd.allreduce_async_(tensor, name="t", process_set=members),
                lambda members: hvd.grouped_allreduce([tensor], name="t", process_set=members),
                lambda members: hvd.allgather(tensor, name="t", process_set=members),
                lambda members: hvd.broadcast(tensor, 0, name="t", process_set=members),
                lambda members: hvd.alltoall(tensor, name="t", process_set=members),
                lambda members: hvd.reducescatter(tensor, name="t", process_set=members),
                lambda members: hvd.broadcast_object(1, name="t", process_set=members),
                lambda members: hvd.allgather_object(1, name="t", process_set=members),
                lambda members: hvd.barrier(process_set=members),
            ):
                with pytest.raises(InvalidRequest, match=r"not registered.*add_process_set"):
                    ask(unknown)
                if context.rank == 1:
                    with pytest.raises(InvalidRequest, match=r"Rank 1 is not a member of .*ranks=\[0, 2\]"):
                        ask(some)
            with pytest.raises(InvalidRequest, match="should be a ProcessSet, got list"):
                hvd.allreduce(tensor, process_set=[0, 2])

        run_ranks(3, body, hvd, binding.make)


@every_binding
@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_every_operation_in_a_set(binding: Binding, hosts: int) -> None:
    run_ranks(4, use_every_operation, binding.name, hosts=hosts)


@every_binding
def test_every_operation_in_a_set_of_processes(binding: Binding) -> None:
    run_ranks(4, use_every_operation, binding.name, how="processes", timeout=50, framework="torch")


def use_every_operation(context: Context, name: str) -> None:
    binding = next(binding for binding in BINDINGS if binding.name == name)
    hvd, rank = binding.hvd, context.rank
    sets = [hvd.add_process_set(ranks) for ranks in ([1, 3], [0, 2], [3, 0, 2])]
    for some in sets:
        if not some.included():
            continue
        ranks = some.ranks
        place, size, last = some.rank(), some.size(), ranks[-1]

        def tensor(values: Any) -> Any:
            return binding.make(np.array(values), "float64")

        def same(got: Any, wanted: Any) -> None:
            np.testing.assert_array_equal(binding.read(got), wanted)

        total, mine = float(sum(ranks)), [float(rank), 1.0]
        for _ in range(3):
            same(hvd.allreduce(tensor(mine), op=Sum, name="t", process_set=some), [total, size])
        same(hvd.allreduce_(tensor(mine), op=Average, process_set=some), np.array([total, size]) / size)
        handle = hvd.allreduce_async(tensor(mine), op=Sum, process_set=some)
        same(hvd.synchronize(handle), [total, size])
        first, second = hvd.grouped_allreduce([tensor(mine), tensor([1.0])], op=Sum, process_set=some)
        same(first, [total, size])
        same(second, [size])
        same(hvd.allgather(tensor([mine] * (place + 1)), process_set=some)[:, 0], np.repeat(ranks, range(1, size + 1)))
        same(hvd.grouped_allgather([tensor([mine])], process_set=some)[0][:, 0], ranks)
        same(hvd.broadcast(tensor(mine), last, process_set=some), [last, 1.0])
        same(hvd.broadcast_(tensor(mine), ranks[0], process_set=some), [ranks[0], 1.0])
        same(hvd.alltoall(tensor([rank] * size), process_set=some), ranks)
        rows, received = hvd.alltoall(tensor([rank] * size), splits=[1] * size, process_set=some)
        same(rows, ranks)
        same(received, [1] * size)
        same(hvd.reducescatter(tensor([mine] * size), op=Sum, process_set=some), [[total, size]])
        same(hvd.grouped_reducescatter([tensor([mine] * size)], op=Sum, process_set=some)[0], [[total, size]])
        assert hvd.broadcast_object({"from": rank}, last, process_set=some) == {"from": last}
        assert hvd.allgather_object(rank, process_set=some) == ranks
        hvd.barrier(process_set=some)
        stranger = next(other for other in range(4) if other not in ranks)
        with pytest.raises(InvalidRequest, match=f"invalid root rank {stranger}: the members"):
            hvd.broadcast(tensor(mine), stranger, process_set=some)
        with pytest.raises(InvalidRequest, match=f"invalid root rank {stranger}: the members"):
            hvd.broadcast_object(1, stranger, process_set=some)
    np.testing.assert_array_equal(binding.read(hvd.allreduce(binding.make(np.ones(2), "float32"), op=Sum)), 4)


@every_functional
def test_errors_name_the_ranks_of_the_job_and_the_set(binding: Binding) -> None:
    hvd = binding.hvd

    def body(context: Context) -> str:
        some = hvd.add_process_set([1, 3])
        if not some.included():
            return ""
        with pytest.raises(MismatchError) as caught:
            hvd.allreduce(binding.make(np.ones(context.rank), "float32"), name="t", process_set=some)
        assert set(caught.value.asked) == {1, 3}
        assert caught.value.process_set == "process set 1 (ranks 1 and 3)"
        text = str(caught.value)
        with pytest.raises(MismatchError) as caught:
            hvd.broadcast(binding.make(np.ones(2), "float32"), context.rank, name="b", process_set=some)
        assert caught.value.asked == {1: "root 1", 3: "root 3"}
        return text

    texts = run_ranks(4, body)
    assert texts[1] == texts[3]
    assert texts[1].startswith("'allreduce.t' in process set 1 (ranks 1 and 3): shape differs between ranks (rank 1: ")


def test_names_are_counted_per_set() -> None:
    hvd = BINDINGS[0].hvd

    def body(context: Context) -> None:
        some = hvd.add_process_set([0, 1])
        # Different numbers of operations without a name outside of the set do not disturb those in it.
        alone = hvd.add_process_set([0])
        if context.rank == 0:
            for _ in range(3):
                hvd.allreduce(np.ones(1), process_set=alone)
        if some.included():
            for turn in range(3):
                np.testing.assert_array_equal(hvd.allreduce(np.full(2, turn), op=Sum, process_set=some), 2 * turn)

    run_ranks(3, body)


def test_a_set_that_waits_delays_no_other() -> None:
    hvd = BINDINGS[0].hvd
    odd_ones_are_done = threading.Barrier(2)
    go_on = threading.Event()

    def body(context: Context) -> None:
        even, odd = hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])
        if context.rank == 2:
            # Nothing of the even set can complete before the odd ranks are done with all of theirs.
            assert go_on.wait(20)
        if even.included():
            hvd.barrier(process_set=even)
            hvd.allreduce(np.ones(4), process_set=even)
            return
        for turn in range(50):
            np.testing.assert_array_equal(hvd.allreduce(np.full(4, turn), op=Sum, process_set=odd), 2 * turn)
        hvd.barrier(process_set=odd)
        odd_ones_are_done.wait(20)
        go_on.set()

    run_ranks(4, body)


def test_a_rank_that_waits_in_one_set_is_not_held_up_in_another() -> None:
    hvd = BINDINGS[0].hvd
    go_on = threading.Event()

    def body(context: Context) -> None:
        stopped, working = hvd.add_process_set([0, 2]), hvd.add_process_set([0, 1])
        if context.rank == 2:
            assert go_on.wait(20)
            handle = hvd.allreduce_async(np.ones(1000), op=Sum, name="late", process_set=stopped)
        elif context.rank == 0:
            handle = hvd.allreduce_async(np.ones(1000), op=Sum, name="late", process_set=stopped)
        if working.included():
            for turn in range(50):
                hvd.allreduce(np.full(1000, turn), process_set=working)
                hvd.allgather(np.full((context.rank, 2), turn), process_set=working)
            if context.rank == 0:
                assert not hvd.poll(handle)
                go_on.set()
        if stopped.included():
            np.testing.assert_array_equal(hvd.synchronize(handle), 2)

    run_ranks(3, body)
