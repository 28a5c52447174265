"""What decides about rows: plan, order and split, without files or ranks."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.data import LocalPlan, permutation, validation_mask

counts = st.lists(st.integers(0, 200), min_size=1, max_size=6).map(tuple)


@given(counts, st.integers(1, 64))
def test_every_row_is_in_exactly_one_step(rows: tuple[int, ...], batch_size: int) -> None:
    plan = LocalPlan(rows=rows, batch_size=batch_size)
    for rank, held in enumerate(rows):
        taken = [row for step in range(plan.steps) for row in range(*plan.bounds(rank, step))]
        assert taken == list(range(held))


@given(counts, st.integers(1, 64))
def test_no_batch_is_too_large_and_no_step_is_wasted(rows: tuple[int, ...], batch_size: int) -> None:
    plan = LocalPlan(rows=rows, batch_size=batch_size)
    assert plan.steps == math.ceil(max(rows) / batch_size)
    fullest = rows.index(max(rows))
    for step in range(plan.steps):
        assert max(plan.batch(rank, step) for rank in range(len(rows))) <= batch_size
        assert plan.batch(fullest, step) > 0


few = st.lists(st.integers(0, 50), min_size=1, max_size=6).map(tuple)


@given(few, st.integers(1, 16), st.randoms(use_true_random=False))
def test_weighted_average_over_ranks_is_the_mean_over_the_global_batch(rows, batch_size, random) -> None:  # type: ignore[no-untyped-def]
    plan = LocalPlan(rows=rows, batch_size=batch_size)
    for step in range(plan.steps):
        batches = [[random.uniform(-1, 1) for _ in range(plan.batch(rank, step))] for rank in range(len(rows))]
        means = [sum(batch) / len(batch) if batch else 0.0 for batch in batches]
        average = sum(mean * plan.weight(rank, step) for rank, mean in enumerate(means)) / len(rows)
        everything = [value for batch in batches for value in batch]
        assert average == pytest.approx(sum(everything) / len(everything))


class Watched(tuple[int, ...]):
    """Counts how often all its items are read."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return super().__iter__()


def test_the_cost_of_a_step_does_not_grow_with_the_square_of_the_ranks() -> None:
    rows = Watched(range(100, 164))
    plan = LocalPlan(rows=rows, batch_size=8)
    rows.passes = 0
    plan.weight(3, 5)
    assert rows.passes <= 3
    assert plan.in_step(5) == sum(plan.batch(rank, 5) for rank in range(64))


def test_nothing_to_do_is_no_step() -> None:
    assert LocalPlan(rows=(0, 0), batch_size=8).steps == 0


@pytest.mark.parametrize(("rows", "batch_size"), [((), 1), ((3, -1), 1), ((3,), 0)])
def test_a_plan_that_makes_no_sense_is_refused(rows: tuple[int, ...], batch_size: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        LocalPlan(rows=rows, batch_size=batch_size)


@given(st.integers(0, 500), st.integers(0, 2**63), st.integers(0, 1000), st.integers(0, 64))
def test_an_order_holds_each_row_once_and_is_repeatable(rows: int, seed: int, epoch: int, shard: int) -> None:
    order = permutation(rows, epoch, shard, seed=seed)
    assert sorted(order) == list(range(rows))
    assert np.array_equal(order, permutation(rows, epoch, shard, seed=seed))


def test_orders_differ_between_seeds_epochs_and_shards() -> None:
    asked = [(seed, epoch, shard) for seed in (1, 12) for epoch in (0, 1, 23) for shard in (0, 1, 2)]
    orders = {tuple(permutation(50, e, k, seed=s)) for s, e, k in asked}
    assert len(orders) == len(asked)


def test_split_follows_the_row_not_its_place() -> None:
    hashes = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 20_000)
    mask = validation_mask(hashes, fraction=0.2, seed=7)
    assert abs(mask.mean() - 0.2) < 0.01
    order = np.random.default_rng(1).permutation(len(hashes))
    assert np.array_equal(validation_mask(hashes[order], fraction=0.2, seed=7), mask[order])
    assert not np.array_equal(validation_mask(hashes, fraction=0.2, seed=8), mask)


def test_split_grows_with_the_fraction() -> None:
    hashes = np.arange(5_000)
    small, large = (validation_mask(hashes, fraction=each, seed=3) for each in (0.1, 0.4))
    assert not validation_mask(hashes, fraction=0.0, seed=3).any()
    assert (small <= large).all()
    assert abs(large.mean() - 0.4) < 0.03


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2.0])
def test_split_refuses_what_is_no_fraction(fraction: float) -> None:
    with pytest.raises(ValueError, match="fraction"):
        validation_mask(np.arange(3), fraction=fraction, seed=0)
