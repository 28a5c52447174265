"""Shares of ranks and shards: they differ by at most one row, however few rows, files and row groups there are."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

from farandole.data import GlobalPlan, Loader, ParquetSource, Policy, Reading, make_batch_reader, make_reader
from farandole.errors import DataError
from helpers.datasets import write_rows


@given(
    rows=st.integers(0, 1000),
    lanes=st.integers(1, 13),
    batch_size=st.integers(1, 1200),
    size=st.integers(1, 7),
    visited=st.floats(0, 1),
    policy=st.sampled_from(["drop", "pad", "join"]),
)
def test_ranks_take_as_many_rows_in_each_step(
    rows: int, lanes: int, batch_size: int, size: int, visited: float, policy: Policy
) -> None:
    deal = GlobalPlan(
        rows=rows, lanes=lanes, batch_size=batch_size, size=size, start=int(rows * visited), policy=policy
    )
    totals = [0] * size
    for step in range(deal.steps):
        shares = [len(deal.take(rank, step)) for rank in range(size)]
        assert max(shares) - min(shares) <= 1
        totals = [total + share for total, share in zip(totals, shares, strict=True)]
    assert max(totals) - min(totals) <= 1
    assert sum(totals) == rows - deal.start or policy == "drop"


layouts = st.lists(st.lists(st.integers(0, 70), min_size=1, max_size=4), min_size=1, max_size=7).filter(
    lambda layout: 0 < sum(map(sum, layout)) <= 1000
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layout=layouts,
    shards=st.integers(1, 7),
    batch_size=st.integers(1, 1200),
    shuffle=st.booleans(),
    lanes=st.sampled_from([None, 1, 2, 5]),
    epochs=st.integers(1, 2),
)
def test_shares_of_files_differ_by_at_most_one_row(
    tmp_path_factory: pytest.TempPathFactory,
    layout: list[list[int]],
    shards: int,
    batch_size: int,
    shuffle: bool,
    lanes: int | None,
    epochs: int,
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    rows = write_rows(folder, layout)
    source, reading = ParquetSource(str(folder)), Reading(lanes=lanes, shuffle=shuffle)
    loaders = [
        Loader(source, batch_size=batch_size, policy="join", rank=rank, size=shards, reading=reading)
        for rank in range(shards)
    ]
    for _ in range(epochs):
        taken = [[int(row) for batch in loader for row in batch["row"]] for loader in loaders]
        assert max(map(len, taken)) - min(map(len, taken)) <= 1
        assert sorted(row for each in taken for row in each) == list(range(rows))
    _check_readers(folder, rows, shards, shuffle, epochs)


def _check_readers(folder: Path, rows: int, shards: int, shuffle: bool, epochs: int) -> None:
    shares = []
    for shard in range(shards):
        asked = {"cur_shard": shard, "shard_count": shards, "num_epochs": epochs, "shuffle_row_groups": shuffle}
        with make_batch_reader(str(folder), **asked) as reader:  # type: ignore[arg-type]
            shares.append([row for batch in reader for row in batch.row.tolist()])
    assert max(map(len, shares)) - min(map(len, shares)) <= epochs
    assert Counter(itertools.chain(*shares)) == Counter([*range(rows)] * epochs)


@pytest.mark.parametrize("make", [make_reader, make_batch_reader])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("layout", [[[100]] * 6, [[1000]], [[500, 500]], [[3]]])
def test_few_files_make_even_shards(tmp_path: Path, layout: list[list[int]], shuffle: bool, make) -> None:  # type: ignore[no-untyped-def]
    rows = write_rows(tmp_path, layout)
    shares = []
    for shard in range(2):
        with make(str(tmp_path), cur_shard=shard, shard_count=2, num_epochs=1, shuffle_row_groups=shuffle) as reader:
            shares.append(sum(len(batch.row) if make is make_batch_reader else 1 for batch in reader))
    assert sorted(shares) == [rows // 2, rows - rows // 2]


@pytest.mark.parametrize("shards", [2, 3, 7])
def test_endless_epochs_of_few_rows_reach_every_shard(tmp_path: Path, shards: int) -> None:
    rows = write_rows(tmp_path, [[4, 3], [11]])
    shares = []
    for shard in range(shards):
        with make_reader(str(tmp_path), num_epochs=None, cur_shard=shard, shard_count=shards) as reader:
            shares.append([row.row for row in itertools.islice(reader, 3 * (rows // shards))])
    assert all(len(share) == 3 * (rows // shards) for share in shares)


def test_endless_epochs_with_fewer_rows_than_shards_are_refused_on_every_rank(tmp_path: Path) -> None:
    write_rows(tmp_path, [[3]])
    for shard in range(4):
        with pytest.raises(DataError, match="3 rows for 4 shards in epochs without end; take at most 3 shards"):
            make_batch_reader(str(tmp_path), num_epochs=None, cur_shard=shard, shard_count=4)
