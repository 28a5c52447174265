"""What a distributed optimizer decides: names, groups, when a gradient is due. No tensors."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.core.operations.gradients import (
    Passes,
    even_groups,
    explicit_groups,
    name_parameters,
    predivided,
)
from farandole.core.operations.reduction import Average, Reduction, Sum, choose_reduction


@given(st.integers(0, 50), st.integers(1, 60))
def test_even_groups_hold_each_parameter_once_in_order(parameters: int, count: int) -> None:
    groups = even_groups(range(parameters), count)
    assert [each for group in groups for each in group] == list(range(parameters))
    assert len(groups) == min(count, parameters)
    lengths = {len(group) for group in groups}
    assert not lengths or max(lengths) - min(lengths) <= 1


@given(st.integers(0, 12), st.lists(st.sets(st.integers(0, 11)), max_size=4))
def test_explicit_groups_leave_nobody_out(parameters: int, wished: list[set[int]]) -> None:
    held = list(range(parameters))
    if any(count > 1 for count in Counter(each for group in wished for each in group).values()):
        with pytest.raises(ValueError, match="more than once"):
            explicit_groups(held, wished)
        return
    groups = explicit_groups(held, wished)
    assert sorted(each for group in groups for each in group) == held
    grouped = {each for group in wished for each in group}
    assert all(len(group) == 1 for group in groups if group[0] not in grouped)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 3), st.randoms())
def test_each_group_is_due_once_per_step_in_any_order(lengths: list[int], passes: int, random) -> None:
    numbers = iter(range(100))
    groups = [[next(numbers) for _ in range(length)] for length in lengths]
    counting = Passes(groups, passes)
    everyone = [each for group in groups for each in group]
    for _ in range(2):
        due: list[tuple[int, ...]] = []
        for done in range(passes):
            random.shuffle(everyone)
            now = [group for each in everyone if (group := counting.add(each))]
            assert not now or done == passes - 1
            due += now
        assert sorted(due) == sorted(tuple(group) for group in groups if group)
        assert counting.rest(everyone) == []
        assert counting.started == bool(everyone)
        for each in everyone:
            with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
                counting.add(each)
        counting.reset()
        assert not counting.started


@given(st.sets(st.integers(0, 5)))
def test_the_rest_of_a_step_is_what_was_not_due(came: set[int]) -> None:
    counting = Passes([[0, 1, 2], [3], [4, 5]], 1)
    due = [group for each in came if (group := counting.add(each))]
    rest = counting.rest(range(6))
    assert sorted(due + rest) == [(0, 1, 2), (3,), (4, 5)]
    assert counting.rest(range(6)) == []


def test_a_group_is_due_without_the_parameters_that_were_left_out() -> None:
    counting = Passes([[0, 1, 2], [3, 4]], 2)
    for left_out in ([1, 3, 4], []):
        counting.leave_out(left_out)
        came = [counting.add(each) for each in (0, 2, 0, 2)]
        assert came == [(), (), (), (0, 1, 2) if left_out else ()]
        assert counting.rest(range(5)) == ([(3, 4)] if left_out else [(0, 1, 2), (3, 4)])
        counting.reset()


def test_parameters_without_names_are_named_by_their_place() -> None:
    assert name_parameters([["a", "b"], ["c"]], None) == {
        "a": "allreduce.noname.0.0",
        "b": "allreduce.noname.0.1",
        "c": "allreduce.noname.1.0",
    }
    assert name_parameters([["a"]], []) == {"a": "allreduce.noname.0.0"}
    # Another optimizer's.
    assert name_parameters([["a"]], [("w", "a"), ("other", "b")]) == {"a": "w"}


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        (["a"], "tuples"),
        ([("w", "a", 1)], "tuples"),
        ([(1, "a")], "tuples"),
        ([("w", "a"), ("w", "b")], "duplicates: w"),
        ([("w", "a")], "1 model parameters were not named"),
    ],
)
def test_wrong_names_are_refused(named: list, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        name_parameters([["a", "b"]], named)


def test_predivision_divides_before_and_multiplies_after() -> None:
    assert predivided(Average, 1.0) == Reduction(Average, 1.0, 1.0)
    assert predivided(Sum, 1.0) == Reduction(Sum, 1.0, 1.0)
    assert predivided(Average, 4.0) == Reduction(Average, 0.25, 4.0)
    for op, factor in ((Sum, 2.0), (Average, 0.0), (Average, -1.0)):
        with pytest.raises(ValueError, match="gradient_predivide_factor"):
            predivided(op, factor)


def test_the_op_is_an_average_unless_said_otherwise() -> None:
    assert choose_reduction(None, None) == Reduction(Average)
    assert choose_reduction(Sum, None) == Reduction(Sum)
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        Passes([], 0)
