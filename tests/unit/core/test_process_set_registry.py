"""Which process sets there are, and what all ranks hear when one is formed: values in, values out."""

import threading
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from farandole.core.process_sets.forming import Forming
from farandole.core.process_sets.process_set import ProcessSet
from farandole.core.process_sets.registry import GLOBAL, Registry
from farandole.errors import RendezvousError

SIZE = 4


def test_ranks_of_a_set_may_be_of_numpy() -> None:
    ranks = ProcessSet(np.arange(4, 0, -2)).ranks
    assert ranks == [2, 4]
    assert {type(rank) for rank in ranks} == {int}
    for wrong in ([0.0], [True], ["0"]):
        with pytest.raises(ValueError, match=r"ProcessSet needs a list of ranks \(integers\), got \["):
            ProcessSet(wrong)  # type: ignore[arg-type]


def test_sets_of_an_elastic_job_may_name_all_ranks_and_ranks_to_come() -> None:
    registry = Registry(2, most=4)
    assert [registry.add(ranks) for ranks in ([0, 1], [1, 2], [2])] == [1, 2, 3]
    assert registry.sets == {GLOBAL: (0, 1), 1: (0, 1), 2: (1,)}
    assert registry.next == 4
    for wrong in ([-1, 0], [1, 2]):
        with pytest.raises(ValueError, match="process set"):
            registry.add(wrong)
    with pytest.raises(ValueError, match=r"are 0 to 3 at most \(--max-np\), got \[4, 30\] in a process set"):
        registry.add([0, 4, 30])
    assert registry.add([3]) == 4


class Registered(RuleBasedStateMachine):
    """The registry against a list of what was added and a queue of what was freed."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry(SIZE)
        self.sets = {GLOBAL: tuple(range(SIZE))}
        self.freed: deque[int] = deque()
        self.ever = 1

    @rule(ranks=st.lists(st.integers(-1, SIZE), max_size=SIZE))
    def add(self, ranks: list[int]) -> None:
        members = tuple(sorted(ranks))
        allowed = bool(members) and len(set(ranks)) == len(ranks) and members[0] >= 0 and members[-1] < SIZE
        if not allowed or members in self.sets.values():
            with pytest.raises(ValueError, match="process set"):
                self.registry.add(ranks)
            return
        expected = self.freed.popleft() if self.freed else self.ever
        self.ever = max(self.ever, expected + 1)
        assert self.registry.next == expected
        assert self.registry.add(ranks) == expected
        self.sets[expected] = members

    @rule(number=st.integers(-1, 8))
    def remove(self, number: int) -> None:
        there = number in self.sets and number != GLOBAL
        assert self.registry.remove(number) is there
        if there:
            del self.sets[number]
            self.freed.append(number)

    @invariant()
    def holds_what_was_added(self) -> None:
        assert self.registry.sets == self.sets


TestRegistered = Registered.TestCase


def test_numbers_are_used_again_in_the_order_in_which_they_were_freed() -> None:
    registry = Registry(4)
    assert [registry.add([rank]) for rank in range(4)] == [1, 2, 3, 4]
    assert registry.remove(3) and registry.remove(1)
    assert [registry.add(ranks) for ranks in ([0, 1], [2, 3], [1, 2])] == [3, 1, 5]


def test_sets_of_an_elastic_job_keep_their_numbers_while_their_ranks_are_lost() -> None:
    smaller = Registry(2)
    assert smaller.restore(1, (0, 1, 2)) == (0, 1)
    assert smaller.restore(2, (1, 3)) == (1,)
    assert smaller.restore(3, (2, 3)) == ()
    assert smaller.sets == {0: (0, 1), 1: (0, 1), 2: (1,)}
    # The set that [1, 3] has become is another one than [1], and the number 3 is taken.
    assert smaller.add([1]) == 4
    assert smaller.remove(2) and not smaller.remove(3)
    assert smaller.add([0]) == 2


class Rounds:
    """An all-gather among threads; whoever comes when no other will is a test that hangs, and ends by its timeout."""

    def __init__(self, size: int) -> None:
        self.said: list[bytes] = [b""] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def gather(self, rank: int, word: bytes) -> list[bytes]:
        self.said[rank] = word
        self.barrier.wait()
        heard = list(self.said)
        self.barrier.wait()
        return heard


def outcomes(size: int, members: list[int], rounds: int, fails: dict[int, int]) -> list[str]:
    """How it ended on each rank, when each member gathers `rounds` times and those in `fails` fail before one."""
    meeting = Rounds(size)
    results = [""] * size

    def live(rank: int) -> None:
        forming = Forming(lambda word: meeting.gather(rank, word), members, "the set")
        failure: Exception | None = None
        try:
            for turn in range(rounds + 1) if rank in members else ():
                if fails.get(rank) == turn:
                    raise OSError(f"no socket for {rank}")
                if turn < rounds:
                    assert forming.gather(f"{rank} {turn}".encode()) == [f"{each} {turn}".encode() for each in members]
        except Exception as error:
            failure = error
        try:
            forming.finish(failure)
            results[rank] = "made"
        except RendezvousError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_ranks_that_were_missed_are_named_by_their_numbers_in_the_job() -> None:
    said = [b""]

    def alone(word: bytes) -> list[bytes]:
        said[0] = word
        return [b"d", word, b"d", b"d"]

    forming = Forming(alone, [1, 3], "the set")
    with pytest.raises(RendezvousError) as caught:
        forming.finish(RendezvousError("rank 1 cannot be reached", missing=(1,)))
    assert caught.value.missing == (3,)
    assert str(caught.value).startswith("the set was not made (rank 1: rank 3 did not connect); missing: rank 3.")


@given(data=st.data())
def test_all_ranks_hear_the_same_whoever_fails_and_when(data: st.DataObject) -> None:
    members = sorted(data.draw(st.sets(st.integers(0, SIZE - 1), min_size=1)))
    rounds = data.draw(st.integers(0, 3))
    fails = data.draw(st.dictionaries(st.sampled_from(members), st.integers(0, rounds)))
    heard = outcomes(SIZE, members, rounds, fails)
    assert len(set(heard)) == 1
    if not fails:
        assert heard[0] == "made"
        return
    first = [rank for rank in sorted(fails) if fails[rank] == min(fails.values())]
    each = "; ".join(f"rank {rank}: OSError: no socket for {rank}" for rank in first)
    assert heard[0] == f"the set was not made ({each})"
