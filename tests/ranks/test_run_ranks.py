"""The helper that runs a body as many ranks keeps its promises: these tests would otherwise prove nothing."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from farandole.core.context import Context
from farandole.core.default import context as default_context
from farandole.errors import PeerLost
from helpers.outcomes import Death, RanksFailed
from helpers.ranks import run_ranks
from helpers.recurring import recurring

HOWS = pytest.mark.parametrize("how", ["threads", "processes"])


def who(context: Context, *args: object) -> tuple[object, ...]:
    assert default_context() is context
    return context.rank, context.size, *args


@HOWS
@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_in_rank_order(size: int, how: str) -> None:
    assert run_ranks(size, who, "x", how=how) == [(rank, size, "x") for rank in range(size)]


def process(context: Context) -> int:
    return os.getpid()


def test_threads_share_a_process_and_processes_do_not() -> None:
    assert set(run_ranks(3, process)) == {os.getpid()}
    assert len({os.getpid(), *run_ranks(3, process, how="processes")}) == 4


def fail(context: Context, ranks: set[int]) -> None:
    if context.rank in ranks:
        raise ValueError(f"no luck on {context.rank}")


@HOWS
def test_each_failure_has_a_titled_trace(how: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(4, fail, {1, 3}, how=how)
    text = str(caught.value)
    assert text.startswith("2 of 4 ranks failed")
    for rank in (1, 3):
        assert f"----- rank {rank} -----" in text
        assert f"ValueError: no luck on {rank}" in text
    assert "rank 0 -----" not in text
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.errors.keys() == {1, 3}


def wait_for_a_rank_that_fails(context: Context) -> None:
    if context.rank == 1:
        raise KeyError("the first")
    context.engine.run(recurring(5), "barrier", None, None)


@HOWS
def test_the_first_failure_ends_the_others_and_stands_first(how: str) -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, wait_for_a_rank_that_fails, how=how, timeout=150)
    assert time.monotonic() - began < 90
    assert caught.value.ranks[0] == 1
    assert {type(caught.value.errors[rank]) for rank in (0, 2)} == {PeerLost}


def hang(context: Context) -> None:
    if context.rank == 1:
        threading.Event().wait(3600)


@HOWS
def test_a_hang_shows_where_each_rank_stands(how: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        if how == "threads":
            # What waits for good in Python cannot be ended from outside; this wait looks up now and then.
            run_ranks(2, hang_restlessly, timeout=4)
        else:
            # The other rank is to start and to end before that.
            run_ranks(2, hang, how="processes", timeout=12)
    assert caught.value.ranks == [1]
    assert "did not end within" in str(caught.value)
    assert "in hang" in str(caught.value)


def hang_restlessly(context: Context) -> None:
    while context.rank == 1:
        threading.Event().wait(0.01)


def die(context: Context, how: str) -> None:
    if context.rank == 2:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)


@pytest.mark.parametrize(("how", "says"), [("kill", "was killed by SIGKILL"), ("exit", "ended with exit code 3")])
def test_a_silent_death_says_how(how: str, says: str) -> None:
    with pytest.raises(RanksFailed, match=rf"----- rank 2 -----\nits process {says}"):
        run_ranks(3, die, how, how="processes")


def test_a_death_that_was_asked_for_is_a_result() -> None:
    assert run_ranks(3, die, "exit", how="processes", dies={2}) == [None, None, Death(3)]


def test_who_was_to_die_and_lives_has_failed() -> None:
    with pytest.raises(RanksFailed, match="was expected to die"):
        run_ranks(2, who, how="processes", dies={1})


def talk(context: Context) -> None:
    print("the last words of", context.rank, flush=True)
    raise RuntimeError("after that")


def test_what_a_failed_process_printed_is_shown() -> None:
    with pytest.raises(RanksFailed, match="the last words of 1"):
        run_ranks(2, talk, how="processes")


def return_a_lock(context: Context) -> object:
    return threading.Lock()


def test_a_result_that_cannot_travel_is_an_error_of_its_rank() -> None:
    with pytest.raises(RanksFailed, match=r"cannot pickle '_thread\.lock' object"):
        run_ranks(1, return_a_lock, how="processes")


def leave_a_child(context: Context) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def test_children_of_ranks_do_not_survive() -> None:
    for pid in run_ranks(2, leave_a_child, how="processes"):
        deadline = time.monotonic() + 60
        while _runs(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"  # nobody may be there to wait for it
    except FileNotFoundError:
        return False
