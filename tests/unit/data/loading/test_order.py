"""The order of an epoch and who takes which rows of it, without files or ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from farandole.data import GlobalPlan, Order, Policy, choose_lanes
from farandole.data.loading.order import choose_window

groups = st.lists(st.integers(0, 40), min_size=1, max_size=20).map(tuple)
orders = st.builds(
    Order, row_groups=groups, lanes=st.integers(1, 9), window=st.integers(1, 40), seed=st.none() | st.integers(0, 2**64)
)


def visited_rows(order: Order, epoch: int) -> NDArray[np.int64]:
    """Spell out the whole order as row numbers of the data, from what a reader is told."""
    starts = np.concatenate([[0], np.cumsum(order.row_groups)])
    rows = np.full(order.rows, -1)
    epoch_order = order.epoch(epoch)
    for number in range(order.rounds):
        for lane in range(order.lanes):
            window = [np.arange(0)]
            for extent in epoch_order.extents(lane, number):
                window.append(starts[extent.row_group] + np.arange(extent.first, extent.last))
            shuffled = epoch_order.shuffled(lane, number)
            in_lane = number * order.window + np.arange(len(shuffled))
            rows[in_lane * order.lanes + lane] = np.concatenate(window)[shuffled]
    return rows


@given(orders, st.integers(0, 1000))
def test_an_order_holds_every_row_once(order: Order, epoch: int) -> None:
    rows = visited_rows(order, epoch)
    assert np.array_equal(np.sort(rows), np.arange(order.rows))
    assert np.array_equal(rows, visited_rows(order, epoch))


@given(orders)
def test_without_a_seed_lanes_keep_the_order_of_the_files(order: Order) -> None:
    plain = Order(row_groups=order.row_groups, lanes=order.lanes, window=order.window, seed=None)
    rows = visited_rows(plain, 3)
    for lane in range(plain.lanes):
        mine = rows[lane :: plain.lanes]
        assert np.array_equal(mine, mine[0] + np.arange(len(mine)) if len(mine) else mine)


@given(orders)
def test_row_groups_that_keep_their_order_are_shuffled_in_windows(order: Order) -> None:
    seed = 0 if order.seed is None else order.seed
    kept = Order(row_groups=order.row_groups, lanes=order.lanes, window=order.window, seed=seed, permuted=False)
    rows = visited_rows(kept, 3)
    for lane in range(kept.lanes):
        mine = rows[lane :: kept.lanes]
        first = min(mine, default=0)
        for at in range(0, len(mine), kept.window):
            inside = mine[at : at + kept.window]
            assert np.array_equal(np.sort(inside), first + at + np.arange(len(inside)))


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=60),
    st.sampled_from([1, 2, 8, 24]),
    st.integers(1, 40),
    st.integers(1, 4000),
)
def test_windows_take_rows_of_many_row_groups_within_their_limit(
    row_groups: list[int], lanes: int, row_bytes: int, most_rows: int
) -> None:
    counts = np.array(row_groups)
    usual, most = 64, most_rows * row_bytes
    window = choose_window(counts, lanes, row_bytes, usual_bytes=usual, most_bytes=most)
    enough = (24 - lanes) * counts.sum() / max(1, np.count_nonzero(counts))
    assert (window - 1) * lanes * row_bytes < max(usual, most)
    if lanes < 24 and min(enough, counts.sum()) <= most_rows:
        # At least half: rounds are about equally long.
        assert 2 * (window + 1) * lanes >= min(enough, counts.sum())


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(visited_rows(Order(row_groups=(50,) * 8, lanes=2, window=60, seed=seed), epoch))

    asked = [(seed, epoch) for seed in (1, 12) for epoch in (0, 1, 3, 23)]
    assert len({order(*each) for each in asked}) == len(asked)


def test_shuffling_mixes_row_groups_and_moves_rows_far() -> None:
    order = Order(row_groups=(100,) * 48, lanes=8, window=200, seed=0)
    rows = visited_rows(order, 0)
    # A hundred consecutive rows come from as many row groups as the 8 lanes' windows hold.
    assert np.mean([len(set(rows[at : at + 100] // 100)) for at in range(0, 4800, 100)]) > 12
    # Where a row stands says next to nothing of where it came from.
    assert abs(np.corrcoef(rows, np.arange(4800))[0, 1]) < 0.3


deals = st.builds(
    lambda rows, lanes, batch_size, size, policy, share, less: GlobalPlan(
        rows=rows,
        lanes=lanes,
        batch_size=batch_size,
        size=size,
        start=int(rows * share),
        policy=policy,
        of_all_ranks=size * batch_size - min(less, size - 1) if policy == "join" else 0,
    ),
    st.integers(0, 400),
    st.integers(1, 13),
    st.integers(1, 20),
    st.integers(1, 7),
    st.sampled_from(["drop", "pad", "join"]),
    st.floats(0, 1),
    st.integers(0, 6),
)


@given(deals)
def test_every_row_is_in_one_batch_of_one_rank(deal: GlobalPlan) -> None:
    until = deal.after(deal.steps - 1) if deal.steps else deal.start
    taken: list[int] = []
    for step in range(deal.steps):
        batches = [deal.take(rank, step) for rank in range(deal.size)]
        assert max(map(len, batches)) <= deal.batch_size
        in_step = np.concatenate(batches)
        # Which rows are in a step depends on the rows of a step alone, not on how many ranks share them.
        first = deal.start + step * deal.step_rows
        assert np.array_equal(np.sort(in_step), np.arange(first, deal.after(step)))
        taken += in_step.tolist()
    assert sorted(taken) == list(range(deal.start, until))
    assert deal.rows - until < (deal.step_rows if deal.policy == "drop" else 1)


@given(deals, st.floats(0, 1))
def test_a_rank_s_stream_is_its_batches(deal: GlobalPlan, share: float) -> None:
    cut = int(deal.rows * share)
    for rank in range(deal.size):
        batches = [deal.take(rank, step) for step in range(deal.steps)]
        stream = [deal.stream(rank, 0, cut), deal.stream(rank, cut, deal.rows)]
        assert np.array_equal(np.concatenate([np.arange(0), *batches]), np.concatenate(stream))
        assert {int(lane) for lane in np.concatenate(stream) % deal.lanes} <= set(deal.lanes_of(rank))


@given(deals)
def test_ranks_stay_with_few_lanes(deal: GlobalPlan) -> None:
    # Its share, and at each end of it a lane that is shared, or two when steps begin anywhere in the lanes.
    most = -(-deal.lanes // deal.size)
    if deal.lanes % deal.size and deal.step_rows >= deal.lanes:
        most += 3
    elif deal.lanes % deal.size:
        most = deal.lanes
    assert all(len(deal.lanes_of(rank)) <= most for rank in range(deal.size))


@pytest.mark.parametrize("sizes", [(4, 2, 3), (1, 5), (3, 3), (2, 4, 1)])
def test_an_epoch_goes_on_with_other_numbers_of_ranks(sizes: tuple[int, ...]) -> None:
    seen: list[int] = []
    start = 0
    for size in sizes:
        deal = GlobalPlan(rows=1000, lanes=8, batch_size=17, size=size, start=start, policy="join")
        steps = deal.steps if size is sizes[-1] else 4
        seen += [int(row) for step in range(steps) for rank in range(size) for row in deal.take(rank, step)]
        start = deal.after(steps - 1)
        assert sorted(seen) == list(range(start))
    assert start == 1000


def test_with_one_global_batch_steps_do_not_depend_on_ranks() -> None:
    def steps(size: int) -> list[set[int]]:
        most = -(-24 // size)
        deal = GlobalPlan(
            rows=1003, lanes=8, batch_size=most, size=size, start=0, policy="join", of_all_ranks=24 if 24 % size else 0
        )
        return [{int(row) for rank in range(size) for row in deal.take(rank, step)} for step in range(deal.steps)]

    assert steps(1) == steps(2) == steps(3) == steps(4) == steps(5) == steps(7) == steps(8)


def test_weights_make_the_mean_over_a_step_of_uneven_shares() -> None:
    deal = GlobalPlan(rows=100, lanes=3, batch_size=4, size=6, start=7, policy="join", of_all_ranks=20)
    for step in range(deal.steps):
        rows = [deal.take(rank, step) for rank in range(6)]
        means = [each.mean() * deal.weight(rank, step) if len(each) else 0.0 for rank, each in enumerate(rows)]
        assert sum(means) / 6 == pytest.approx(np.concatenate(rows).mean())


def test_lanes_follow_row_groups_and_memory() -> None:
    assert choose_lanes([100] * 1000, 10**6, most_bytes=10**9) == 96
    assert choose_lanes([100] * 100, 10**6, most_bytes=10**9) == 12
    assert choose_lanes([100] * 50, 10**6, most_bytes=10**9) == 8
    assert choose_lanes([100] * 3, 10**6, most_bytes=10**9) == 1
    assert choose_lanes([100] * 1000, 1000 * 10**8, most_bytes=10**9) == 8
    assert choose_lanes([], 0, most_bytes=1) == 1


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"size": 0}, {"lanes": 0}, {"start": 11}, {"start": -1}, {"policy": "guess"}]
)
def test_a_deal_that_makes_no_sense_is_refused(wrong: dict[str, int | Policy]) -> None:
    asked = {"rows": 10, "lanes": 1, "batch_size": 1, "size": 1, "start": 0, "policy": "join"} | wrong
    with pytest.raises(ValueError, match="must be"):
        GlobalPlan(**asked)  # type: ignore[arg-type]


def test_an_order_that_makes_no_sense_is_refused() -> None:
    for row_groups, lanes, window in [((1, -1), 1, 1), ((1,), 0, 1), ((1,), 1, 0)]:
        with pytest.raises(ValueError, match="must be"):
            Order(row_groups=row_groups, lanes=lanes, window=window, seed=0)
