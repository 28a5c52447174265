"""Rows that are shared out by their content: a rank's rows depend on the set of all rows alone."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyspark")
pytest.importorskip("pandas")

import pyarrow as pa

from farandole.data import ArrowShard
from farandole.estimators.trainers import moved_rows
from farandole.estimators.trainers.moved_rows import even_out, plan_moves
from farandole.estimators.trainers.row_hash import hash_rows, partition_of


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_all_ranks_come_to_have_equally_many(counts: list[int]) -> None:
    after = list(counts)
    moves = plan_moves(counts)
    for move in moves:
        assert move.rows > 0
        after[move.giver] -= move.rows
        after[move.taker] += move.rows
    assert max(after) - min(after) <= 1
    assert {move.giver for move in moves}.isdisjoint(move.taker for move in moves)


class Gathering:
    """Where threads put an object each and take all of them."""

    def __init__(self, size: int) -> None:
        self._barrier, self._given = threading.Barrier(size), [None] * size

    def of(self, rank: int) -> Any:
        def gather(mine: Any) -> list[Any]:
            self._given[rank] = mine
            self._barrier.wait(20.0)
            found = list(self._given)
            self._barrier.wait(20.0)
            return found

        return gather


def shared_out(folder: Path, rows: pa.Table, size: int) -> list[list[int]]:
    """Return the ranks' rows, in order of content, after they have evened out."""
    hashes = hash_rows([rows["n"].combine_chunks(), rows["x"].combine_chunks()])
    whole, gathering = rows.append_column("hash", pa.array(hashes)), Gathering(size)
    partitions = partition_of(hashes, size)

    def body(rank: int) -> list[int]:
        path, part = folder / str(rank), whole.filter(pa.array(partitions == rank))
        with pa.ipc.new_stream(path, part.schema) as writer:
            writer.write_table(part, max_chunksize=3)
        mine = even_out(path, part["hash"].to_numpy(), rank=rank, gather=gathering.of(rank))
        shard = ArrowShard(path)
        found = shard.column("hash", None).take(mine)
        columns = [shard.chunked(name).combine_chunks().take(mine) for name in ("n", "x")]
        np.testing.assert_array_equal(hash_rows(columns), found)
        return [int(each) for each in shard.column("n", None).take(mine[np.argsort(found, kind="stable")])]

    with ThreadPoolExecutor(size) as pool:
        return [each.result(60.0) for each in [pool.submit(body, rank) for rank in range(size)]]


def test_a_round_is_small_however_many_ranks_give_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved_rows, "_AT_ONCE", 1 << 15)
    counts, gathering, rounds = [9, 9, 9, 0, 0, 0], Gathering(6), list[int]()

    def body(rank: int) -> int:
        rows, gather = (
            pa.table({"x": pa.array([np.zeros(1024)] * counts[rank], pa.list_(pa.float64()))}),
            gathering.of(rank),
        )

        def watched(mine: Any) -> list[Any]:
            found = gather(mine)
            rounds.append(sum(len(each) for each in found if isinstance(each, bytes)))
            return found

        with pa.ipc.new_stream(tmp_path / str(rank), rows.schema) as writer:
            writer.write_table(rows)
        return len(even_out(tmp_path / str(rank), np.arange(counts[rank]), rank=rank, gather=watched))

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(body, range(6))) == [5, 5, 5, 4, 4, 4]
    assert 0 < max(rounds) <= 3 * 8192 + 3 * 1024, "a row and a header of each giver"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_where_rows_come_from_changes_nothing(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved_rows, "_AT_ONCE", 50)  # several rounds
    numbers = [*range(20), *[99] * 21]  # half of the rows are equal, and have one partition
    found = []
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(numbers)
        folder = tmp_path / str(seed)
        folder.mkdir()
        arrays = pa.array([[float(n), 0.5] for n in order], pa.list_(pa.float32()))
        found.append(shared_out(folder, pa.table({"n": pa.array(order, pa.int64()), "x": arrays}), size))
    assert found[0] == found[1]
    counts = [len(each) for each in found[0]]
    assert max(counts) - min(counts) <= 1
    assert sorted(n for each in found[0] for n in each) == numbers
