"""Rows that lie on the ranks, by Petastorm's names: every row once per epoch, each rank at its own pace."""

import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

import pandas as pd
import pyarrow as pa

import farandole.numpy as hvd
from farandole.core.context import Context
from farandole.data import Reader, ShardSource, make_feed_reader
from farandole.data.transform import TransformSpec
from farandole.errors import ConfigError, DataError, FarandoleError
from helpers.ranks import run_ranks


def people(first: int, rows: int) -> pa.Table:
    numbers = range(first, first + rows)
    return pa.table(
        {
            "row": pa.array(numbers, pa.int64()),
            "half": pa.array([None if number % 7 == 0 else number / 2 for number in numbers], pa.float64()),
            "name": [f"n{number}" for number in numbers],
            "pair": pa.array([[number, -number] for number in numbers], pa.list_(pa.int64())),
        }
    )


def write(folder: Path, sizes: list[list[int]]) -> int:
    """Write rank r's record batches, of rows numbered over all ranks, to the file r.arrow."""
    first = 0
    for rank, batches in enumerate(sizes):
        with pa.ipc.new_stream(folder / f"{rank}.arrow", people(0, 1).schema) as writer:
            for rows in batches:
                writer.write_table(people(first, rows))
                first += rows
    return first


def reader(context: Context, folder: Path, **options: Any) -> Reader:
    columns = options.pop("schema_fields", None)
    if columns is None or "half" in columns:
        options = {"nulls": {"half": float("nan")}, **options}
    return make_feed_reader(
        ShardSource(folder / f"{context.rank}.arrow"),
        columns,
        gather=hvd.allgather_object if context.size > 1 else None,
        cur_shard=context.rank,
        shard_count=context.size,
        **options,
    )


def read(context: Context, folder: Path, rows: int, **options: Any) -> list[list[int]]:
    """Read all batches of `rows` rows; the numbers of their rows."""
    with reader(context, folder, **options) as made:
        return [np.asarray(columns["row"]).tolist() for columns in made.batches_of(rows)]


@pytest.mark.parametrize("sizes", [[[40, 30]], [[31, 2], [1]], [[3000], [], [7, 0, 9]]], ids=["one", "two", "three"])
def test_every_row_comes_once_per_epoch(tmp_path: Path, sizes: list[list[int]]) -> None:
    rows = write(tmp_path, sizes)
    ranks = run_ranks(len(sizes), lambda context: read(context, tmp_path, 8, num_epochs=2, seed=3))
    assert Counter(itertools.chain(*itertools.chain(*ranks))) == Counter([*range(rows)] * 2)
    for batches, held in zip(ranks, sizes, strict=True):
        # Batches go on from one epoch to the next; only the last one of all is smaller.
        assert [len(each) for each in batches[:-1]] == [8] * (2 * sum(held) // 8 - (2 * sum(held) % 8 == 0))
        seen = [*itertools.chain(*batches)]
        assert not seen or sorted(seen[: sum(held)]) == sorted(seen[sum(held) :])
        assert len(seen) < 40 or seen[: sum(held)] != seen[sum(held) :]


def test_ranks_need_not_read_together(tmp_path: Path) -> None:
    """One takes many batches of endless epochs while the other takes none, and steps of its own need both."""
    write(tmp_path, [[50], [9]])

    def body(context: Context) -> int:
        with reader(context, tmp_path, num_epochs=None) as made:
            taken = [*itertools.islice(made.batches_of(4), 30 if context.rank else 1)]
            assert made.loader.rows == 59
            return sum(hvd.allgather_object(len(taken)))

    assert run_ranks(2, body) == [31, 31]


def test_options_are_those_of_files(tmp_path: Path) -> None:
    rows = write(tmp_path, [[20, 20], [17]])
    in_names = SimpleNamespace(get_fields=lambda: {"name"}, do_include=lambda values: values["name"].endswith("3"))

    def double(frame: pd.DataFrame) -> pd.DataFrame:
        frame["twice"] = frame["row"] * 2
        return frame

    def body(context: Context) -> tuple[list[int], list[int]]:
        plain = [*itertools.chain(*read(context, tmp_path, 5, shuffle_row_groups=False))]
        assert plain == sorted(plain)
        with reader(context, tmp_path, schema_fields=["r.w", "half", "pair"], workers_count=1) as made:
            batch = next(made)
            assert batch._fields == ("row", "half", "pair")
            assert np.isnan(batch.half[batch.row % 7 == 0]).all()
        options = {"predicate": in_names, "filters": [("row", ">", 10)], "transform_spec": TransformSpec(double)}
        with reader(context, tmp_path, **options) as made:
            sample = made.loader.sample()
            (columns,) = made.batches_of(100)
        assert [sample[name].dtype for name in columns] == [values.dtype for values in columns.values()]  # type: ignore[union-attr]
        assert np.array_equal(columns["twice"], columns["row"] * 2)  # type: ignore[operator, arg-type]
        return plain, np.asarray(columns["row"]).tolist()

    (first, some), (second, others) = run_ranks(2, body)
    assert first + second == [*range(rows)]
    assert sorted(some + others) == [13, 23, 33, 43, 53]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"cache_type": "local-disk", "cache_location": "/nowhere"}, "cache_type: is for files far away"),
        ({"reader_pool_type": "process", "transform_spec": TransformSpec()}, "reader_pool_type: 'process' cannot"),
        ({"storage_options": {"key": "k"}}, "storage_options: are for URLs"),
        ({"num_epochs": 0}, "num_epochs: must be >= 1"),
        ({"schema_fields": ["age"]}, "column 'age': is not in the data, which has row, half, name, pair"),
        ({"filters": [("age", ">", 1)]}, "column 'age'"),
        ({"filters": [("row", "<", 0)]}, "there are no rows on any of 1 ranks"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    write(tmp_path, [[9]])

    def body(context: Context) -> None:
        with pytest.raises((ConfigError, DataError), match=problem):
            reader(context, tmp_path, **options)

    run_ranks(1, body)


def test_a_predicate_that_fails_on_one_rank_stops_all(tmp_path: Path) -> None:
    write(tmp_path, [[9], [9]])

    def include(values: dict[str, Any]) -> bool:
        if values["row"] == 12:
            raise KeyError("no such row")
        return True

    def body(context: Context) -> str:
        with pytest.raises((KeyError, FarandoleError)) as caught:
            reader(context, tmp_path, predicate=SimpleNamespace(get_fields=lambda: {"row"}, do_include=include))
        return str(caught.value)

    assert run_ranks(2, body) == ["rank 1: KeyError: 'no such row'", "'no such row'"]


def test_a_rank_without_rows_has_no_endless_epochs(tmp_path: Path) -> None:
    write(tmp_path, [[9], []])

    def body(context: Context) -> None:
        with reader(context, tmp_path, num_epochs=None) as made:
            if context.rank == 0:
                assert len([*itertools.islice(made.batches_of(3), 10)]) == 10
            else:
                with pytest.raises(DataError, match="9 rows leave this shard none; take fewer shards, or more rows"):
                    next(made)
        assert len(read(context, tmp_path, 3, num_epochs=1)) == (0 if context.rank else 3)

    run_ranks(2, body)
