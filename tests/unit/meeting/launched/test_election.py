"""Elections of members whose launcher is lost: who leads, who is waited for, and who may go on."""

import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import timedelta

import pytest

from farandole.errors import RendezvousError
from farandole.meeting.frames import Deadline
from farandole.meeting.handshake import new_secret
from farandole.meeting.launched.elastic_messages import Place
from farandole.meeting.launched.election import Election, LauncherIsBack, has_ended

PATIENCE = timedelta(seconds=60)
SOON = timedelta(milliseconds=500)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def members(stack: ExitStack, count: int, least: int = 1) -> list[Election]:
    """Members 10, 11, ... of generation 4, on two hosts in turn."""
    secret = new_secret()
    numbers = [10 + each for each in range(count)]
    made = [stack.enter_context(closing(Election(number, secret))) for number in numbers]
    reach = [each.addresses[0] for each in made]
    hosts = ["ab"[each % 2] for each in range(count)]
    for rank, each in enumerate(made):
        each.take(
            Place(
                rank=rank,
                local_rank=rank // 2,
                generation=4,
                most=count,
                hosts=hosts,
                address="",
                secret=b"",
                members=numbers,
                reach=reach,
                least=least,
            )
        )
    return made


def elect(
    pool: ThreadPoolExecutor, voters: Sequence[Election], commits: Sequence[int], patience: timedelta = PATIENCE
) -> list[Place]:
    futures: list[Future[Place]] = [
        pool.submit(each.elect, count, patience, lambda: False) for each, count in zip(voters, commits, strict=True)
    ]
    places = [each.result(60) for each in futures]
    for each, place in zip(voters, places, strict=True):
        each.take(place)
    return places


def test_newest_state_is_rank_0_and_slots_stay(pool: ThreadPoolExecutor, stack: ExitStack) -> None:
    places = elect(pool, members(stack, 4), [7, 7, 7, 8])
    assert [place.rank for place in places] == [2, 1, 3, 0]
    assert [place.local_rank for place in places] == [0, 0, 1, 1]
    assert {tuple(place.hosts) for place in places} == {("b", "b", "a", "a")}
    assert {place.generation for place in places} == {5}
    assert len({(place.address, place.secret) for place in places}) == 1


def test_members_end_one_after_the_other(pool: ThreadPoolExecutor, stack: ExitStack) -> None:
    left = members(stack, 4)
    for victim, size in ((0, 3), (1, 2), (0, 1)):
        left.pop(victim).close()
        places = elect(pool, left, [1] * size)
        assert sorted(place.rank for place in places) == list(range(size))


def test_leader_ends_while_others_wait_for_a_place(pool: ThreadPoolExecutor, stack: ExitStack) -> None:
    first, second, third, _ = members(stack, 4)
    futures = [pool.submit(each.elect, 1, 3 * SOON, lambda: False) for each in (first, second, third)]
    deadline = Deadline(PATIENCE)
    while len(first._came) < 2:
        assert deadline.remaining()
        time.sleep(0.01)
    first.close()
    assert sorted(each.result(60).rank for each in futures[1:]) == [0, 1]
    with pytest.raises(RendezvousError):
        futures[0].result(60)


def test_too_few_do_not_go_on(pool: ThreadPoolExecutor, stack: ExitStack) -> None:
    first, second, third = members(stack, 3, least=3)
    third.close()
    with pytest.raises(RendezvousError, match="2 ranks are left; 3 are needed"):
        elect(pool, [first, second], [1, 1])


def test_stopped_leader_is_left_behind(pool: ThreadPoolExecutor, stack: ExitStack) -> None:
    stopped, *others = members(stack, 4)
    assert not has_ended(stopped.addresses[0]), "a stopped process still listens"
    assert sorted(place.rank for place in elect(pool, others, [1, 1, 1], SOON)) == [0, 1, 2]


def test_more_must_be_there_than_do_not_answer(pool: ThreadPoolExecutor, stack: ExitStack) -> None:
    _, second, third, _ = members(stack, 4)
    with pytest.raises(RendezvousError, match="2 ranks are left, and 2 that do not answer"):
        elect(pool, [second, third], [1, 1], SOON)


def test_refusal_proves_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not has_ended(address)
    assert has_ended(address)


def test_a_launcher_that_is_back_ends_the_wait_for_others(stack: ExitStack) -> None:
    first, _ = members(stack, 2)
    with pytest.raises(LauncherIsBack):
        first.elect(1, PATIENCE, lambda: True)
