"""Ranks that take steps together: what one cannot make, all hear of at the same step."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.data.loading.agreement import AHEAD_BYTES, check_places, in_step
from farandole.errors import ConfigError, SourceError
from helpers.meeting import Meeting


def items(count: int, fails_at: int | None) -> Iterator[int]:
    for number in range(count):
        if number == fails_at:
            raise KeyError(number)
        yield number


def take(meeting: Meeting, rank: int, made: Iterator[int], item_bytes: int) -> tuple[list[int], Exception | None]:
    taken: list[int] = []
    try:
        taken.extend(in_step(made, meeting.of(rank), item_bytes))
    except Exception as error:
        return taken, error
    return taken, None


@given(
    count=st.integers(0, 70),
    fails=st.lists(st.none() | st.integers(0, 69), min_size=1, max_size=3),
    sizes=st.lists(st.sampled_from([0, AHEAD_BYTES // 5, AHEAD_BYTES, 1 << 40]), min_size=3, max_size=3),
)
def test_all_stop_before_the_first_item_that_a_rank_cannot_make(
    count: int, fails: list[int | None], sizes: list[int]
) -> None:
    meeting, ranks = Meeting(len(fails)), range(len(fails))
    with ThreadPoolExecutor(len(fails)) as pool:
        ends = list(pool.map(lambda rank: take(meeting, rank, items(count, fails[rank]), sizes[rank]), ranks))
    first = min((at for at in fails if at is not None and at < count), default=None)
    for rank, (taken, error) in enumerate(ends):
        assert taken == list(range(count if first is None else first))
        if first is None:
            assert error is None
        elif fails[rank] == first:
            assert isinstance(error, KeyError)
        else:
            assert isinstance(error, SourceError)
            assert error.path == f"rank {fails.index(first)}"
            assert error.problem == f"KeyError: {first}"


@pytest.mark.parametrize(("item_bytes", "exchanges"), [(1, 1 + 2 + 1), (AHEAD_BYTES // 4, 1 + 8 + 1), (1 << 30, 34)])
def test_small_items_are_asked_for_together(item_bytes: int, exchanges: int) -> None:
    meeting = Meeting(1)
    assert take(meeting, 0, items(33, None), item_bytes)[0] == list(range(33))
    assert meeting.exchanges == exchanges


@pytest.mark.parametrize(
    ("places", "size", "alone", "right"),
    [
        ([0, 1], 2, True, True),
        ([0, 0, 1, 1], 2, False, True),  # two ranks for each part of a model
        ([0, 0, 1, 1], 2, True, False),
        ([0, 1, 0, 1], 4, False, False),  # local ranks on two hosts
        ([0, 1], 3, False, False),
        ([1, 0], 2, True, False),
    ],
)
def test_each_share_of_the_rows_is_that_of_a_rank(places: list[int], size: int, alone: bool, right: bool) -> None:
    def gather(mine: object) -> list[object]:
        assert mine == places[0]
        return [*places]

    if right:
        check_places(places[0], size, gather, alone=alone)  # type: ignore[arg-type]
    else:
        with pytest.raises(
            ConfigError, match=f"rank: is {', '.join(map(str, places))} on the ranks, and size is {size}"
        ):
            check_places(places[0], size, gather, alone=alone)  # type: ignore[arg-type]
