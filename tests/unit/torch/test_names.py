"""Names of operations that ranks match by their order."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from farandole.torch.distributed.names import MOST_SITES, PERIOD, Names

STEP = ["bucket", "bucket", "head", "loss"]


def named(program: Sequence[object]) -> list[str]:
    names = Names()
    return [names.next(signature).name for signature in program]


def test_a_step_that_repeats_itself_repeats_its_names() -> None:
    warm_up, names = len(STEP) * (PERIOD + 1), named(STEP * 4 * PERIOD)
    pairs = list(zip(names, STEP * 4 * PERIOD, strict=True))
    assert set(pairs[warm_up:]) <= set(pairs[:warm_up])
    # And each name stands for one thing, so that what was agreed under it holds.
    assert len(dict(pairs[len(STEP) :])) == len(set(pairs[len(STEP) :]))


@given(st.lists(st.sampled_from("abc")), st.sampled_from("abc"), st.sampled_from("abc"))
def test_ranks_that_differ_in_one_operation_meet_under_its_name(before: list[str], here: str, there: str) -> None:
    assert named([*before, here]) == named([*before, there])


@given(st.lists(st.sampled_from("ab"), min_size=2))
def test_the_same_name_comes_again_only_after_others(program: list[str]) -> None:
    names = named(program)
    for place, name in enumerate(names):
        assert name not in names[max(0, place - PERIOD + 1) : place]


def test_a_program_that_never_repeats_itself_has_few_names() -> None:
    assert len(set(named(range(3 * MOST_SITES)))) < MOST_SITES + PERIOD + 1


def test_ranks_that_could_not_agree_start_over_alike() -> None:
    ours, theirs = Names(), Names()
    ours.next("a"), theirs.next("b")
    ours.start_over(), theirs.start_over()
    assert ours.next("c").name == theirs.next("c").name


class Part:
    def __init__(self) -> None:
        self.ended = False

    def done(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.ended = True


def test_a_name_is_free_when_its_operation_has_ended() -> None:
    operation, part = Names().next("a"), Part()
    operation.part = part
    assert operation.free_name() == operation.name
    assert part.ended and operation.part is None
