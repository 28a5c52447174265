"""`make_reader` and `make_batch_reader`, as programs written for Petastorm call them."""

import itertools
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
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

from farandole.data import (
    FieldOptions,
    Loader,
    ParquetSource,
    Reading,
    make_batch_reader,
    make_feed_reader,
    make_reader,
)
from farandole.data.reader_options import ReaderOptions
from farandole.data.transform import TransformSpec
from farandole.errors import ConfigError, DataError, ReaderError
from helpers.datasets import RAGGED, write_rows

# Petastorm 0.13.1's arguments after the first three of make_batch_reader, which make_reader has, too.
PETASTORM = """
reader_pool_type workers_count results_queue_size seed shuffle_rows shuffle_row_groups shuffle_row_drop_partitions
predicate rowgroup_selector num_epochs cur_shard shard_count shard_seed cache_type cache_location cache_size_limit
cache_row_size_estimate cache_extra_settings hdfs_driver transform_spec filters storage_options zmq_copy_buffers
filesystem pyarrow_serialize convert_early_to_numpy
"""


def people(first: int, rows: int) -> pa.Table:
    numbers = np.arange(first, first + rows)
    return pa.table(
        {
            "row": numbers,
            "age": pa.array([None if number % 7 == 0 else number / 2 for number in numbers.tolist()], pa.float64()),
            "name": [f"n{number}" for number in numbers],
            "pixels": pa.array([[number, -number] for number in numbers.tolist()], pa.list_(pa.float32())),
        }
    )


@pytest.fixture
def url(tmp_path: Path) -> str:
    write_rows(tmp_path / "people", RAGGED["ragged"], people)
    return f"file://{tmp_path}/people"


ROWS = 122


def test_all_of_petastorms_arguments_are_known() -> None:
    own = {"gather", "nulls", "reading", "version"}
    assert {each.name for each in fields(ReaderOptions)} - own == set(PETASTORM.split())


@pytest.mark.parametrize("pool", ["thread", "process", "dummy"])
def test_rows_come_one_by_one(url: str, pool: str) -> None:
    with make_reader(url, schema_fields=["row", "name"], reader_pool_type=pool, workers_count=2) as reader:
        rows = list(reader)
        assert reader.last_row_consumed
    assert sorted(row.row for row in rows) == list(range(ROWS))
    assert all(row.name == f"n{row.row}" and row._fields == ("row", "name") for row in rows)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_shards_together_have_every_row_once_per_epoch(url: str, shards: int) -> None:
    seen: list[int] = []
    for shard in range(shards):
        options: dict[str, Any] = {"cur_shard": shard, "shard_count": shards, "nulls": {"age": float("nan")}}
        with make_batch_reader(url, num_epochs=2, seed=3, **options) as reader:
            for batch in reader:
                assert isinstance(batch.pixels, np.ndarray)
                assert batch.pixels[:, 0].tolist() == batch.row.tolist()
                assert np.isnan(batch.age[batch.row % 7 == 0]).all()
                seen += batch.row.tolist()
    assert Counter(seen) == Counter([*range(ROWS)] * 2)


def test_none_epochs_never_end_and_a_consumed_reader_starts_again(url: str) -> None:
    with make_reader(url, ["row"], num_epochs=None) as endless:
        rows = [row.row for row in itertools.islice(endless, 3 * ROWS)]
        assert Counter(rows) == Counter([*range(ROWS)] * 3)
        endless.reset()
        assert sorted(row.row for row in itertools.islice(endless, ROWS)) == list(range(ROWS))
    with make_reader(url, ["row"]) as reader:
        first = [row.row for row in reader]
        assert next(reader, None) is None
        reader.reset()
        second = [row.row for row in reader]
    assert sorted(first) == sorted(second) and first != second


def test_order_of_the_files_without_shuffling(url: str) -> None:
    with make_reader(url, ["row"], shuffle_row_groups=False) as reader:
        assert [row.row for row in reader] == list(range(ROWS))


def test_columns_by_pattern_and_by_object(url: str) -> None:
    with make_batch_reader(url, ["r.w", SimpleNamespace(name="name")]) as reader:
        assert next(reader)._fields == ("row", "name")
    with pytest.raises(RuntimeError, match="'rov': is not in the data, which has row, age, name, pixels"):
        make_reader(url, ["rov"])


def filled_up(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.fillna({"age": -1.0})


def filled_by_columns(columns: dict[str, Any]) -> dict[str, Any]:
    return {**columns, "age": np.nan_to_num(columns["age"], nan=-1.0)}


def test_one_rule_for_nulls_of_floating_point_columns(url: str) -> None:
    """Refused without a value; NaN for a transform, which may fill them up."""
    refused = r"column 'age': row group [0-9] of .*rows are null; .*nulls=\{'age': ...\}"
    # All row groups have nulls, and several threads read: any of them may be the first.
    source, columns = ParquetSource(url), ["row", "age"]

    def loaded(**reading: Any) -> dict[int, float]:
        loader = Loader(source, batch_size=50, policy="join", columns=columns, reading=Reading(**reading))
        return {int(row): age for batch in loader for row, age in zip(batch["row"], batch["age"], strict=True)}

    def read(**options: Any) -> dict[int, float]:
        with make_batch_reader(url, columns, **options) as reader:
            return {int(row): age for batch in reader for row, age in zip(batch.row, batch.age, strict=True)}

    for rows in (loaded, read):
        with pytest.raises(DataError, match=refused):
            rows()
    want = {row: -1.0 if row % 7 == 0 else row / 2 for row in range(ROWS)}
    assert loaded(transform=filled_by_columns) == read(transform_spec=TransformSpec(filled_up)) == want
    assert loaded(fields=FieldOptions(nulls={"age": -1.0})) == read(nulls={"age": -1.0}) == want


def test_filters_and_predicates_choose_rows(url: str) -> None:
    in_names = SimpleNamespace(get_fields=lambda: {"name"}, do_include=lambda values: values["name"].endswith("3"))
    with make_reader(url, ["row"], predicate=in_names, filters=[("row", ">", 50)]) as reader:
        assert sorted(row.row for row in reader) == [53, 63, 73, 83, 93, 103, 113]


def test_a_predicate_takes_frames_of_files_with_arrow_types_of_pandas(tmp_path: Path) -> None:
    lists = pd.Series([[1], [2, 3], [4]], dtype=pd.ArrowDtype(pa.list_(pa.int32())))
    pd.DataFrame({"row": range(3), "items": lists}).to_parquet(tmp_path / "rows.parquet")
    chosen = SimpleNamespace(
        get_fields=lambda: {"row", "items"},
        do_include=lambda frame: frame["row"].isin([1]) & (frame["items"].map(len) == 2),
    )
    with make_batch_reader(str(tmp_path), ["row"], predicate=chosen) as reader:
        assert [batch.row.tolist() for batch in reader] == [[1]]


def double_frame(frame: pd.DataFrame) -> pd.DataFrame:
    frame["twice"] = frame["row"] * 2
    frame["pixels"] = frame["pixels"].map(lambda pixels: pixels + 1)
    return frame


def double_row(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "twice": row["row"] * 2, "pixels": row["pixels"] + 1}


def test_transforms_of_frames_and_rows(url: str) -> None:
    edit = [("twice", np.float32, (), False)]
    spec = TransformSpec(double_frame, edit_fields=edit, removed_fields=["age", "name"])
    with make_batch_reader(url, transform_spec=spec) as reader:
        batch = next(reader)
    assert batch._fields == ("row", "pixels", "twice")
    assert batch.twice.dtype == np.float32 and np.array_equal(batch.twice, batch.row * 2)
    assert np.array_equal(batch.pixels, np.stack([batch.row + 1, 1 - batch.row], axis=1))
    spec = TransformSpec(double_row, edit_fields=edit, selected_fields=["twice", "name", "pixels"])
    with make_reader(url, transform_spec=spec) as reader:
        row = next(reader)
    assert row._fields == ("twice", "name", "pixels")
    assert row.name == f"n{int(row.twice) // 2}" and row.pixels.tolist() == [row.twice / 2 + 1, 1 - row.twice / 2]


def test_a_transform_that_loses_rows_is_refused(url: str) -> None:
    with (
        make_batch_reader(url, transform_spec=TransformSpec(lambda frame: frame[frame["row"] > 10])) as reader,
        pytest.raises(DataError, match="it may not change their number"),
    ):
        list(reader)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rowgroup_selector", object()),
        ("filesystem", object()),
        ("cur_shard", 1),
        ("transform_spec", len),
        ("num_epochs", 0),
        ("reader_pool_type", "fibre"),
        ("cache_type", "remote"),
        ("cache_type", "local-disk"),
    ],
)
def test_options_that_cannot_be_kept_are_refused(url: str, option: str, value: object) -> None:
    with pytest.raises(ConfigError):
        make_reader(url, **{option: value})
    with pytest.raises(ConfigError, match="shard_count: must be >= 1, got 0"):
        make_reader(url, cur_shard=0, shard_count=0)
    with pytest.raises(TypeError, match="colour"):
        make_reader(url, colour=1)


def test_options_without_meaning_are_named(url: str, caplog: pytest.LogCaptureFixture) -> None:
    reader = make_reader(url, results_queue_size=7, hdfs_driver="libhdfs")
    for _ in range(2):
        reader.stop()
    with pytest.raises(ReaderError, match="was stopped"):
        next(reader)
    assert "results_queue_size means nothing here" in caplog.text
    assert "hdfs_driver means nothing here" in caplog.text


@pytest.mark.parametrize("take", ["batches", "batches_of", "__iter__"])
def test_stopping_ends_all_iterators_and_their_threads(url: str, take: str) -> None:
    before = set(threading.enumerate())
    with make_batch_reader(url, ["row"], num_epochs=None) as reader:
        iterators = [getattr(reader, take)(*([3] if take == "batches_of" else [])) for _ in range(2)]
        for each in iterators:
            next(each)
    left = set(threading.enumerate()) - before
    assert [thread.name for thread in left if thread.name.startswith("farandole-")] == []
    for each in iterators:
        with pytest.raises(ReaderError, match=r"was stopped|has begun another pass"):
            next(each)


def taken(batches: Iterable[Any]) -> list[int]:
    return sorted(int(row) for batch in batches for row in np.atleast_1d(batch["row"]))


@pytest.mark.parametrize("make", [make_reader, make_batch_reader, make_feed_reader])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_pass_begins_at_the_first_row_however_the_last_was_left(url: str, make: Any, epochs: int) -> None:
    rows = sorted([*range(ROWS)] * epochs)
    with make(ParquetSource(url) if make is make_feed_reader else url, ["row"], num_epochs=epochs) as reader:
        next(reader)
        assert taken(reader.batches_of(32)) == rows
        for _ in reader.batches_of(32):
            break
        assert taken(reader.batches()) == rows
        left = reader.batches_of(ROWS)
        assert len(next(left)["row"]) == ROWS
        assert taken(reader.batches_of(50)) == rows
        if epochs == 2:
            with pytest.raises(ReaderError, match="has begun another pass"):
                next(left)
        assert reader.last_row_consumed
        reader.reset()
        for _ in reader:
            break
        rest = list(reader)  # an iterator goes on where it stood
        reader.reset()
        assert len(rest) == len(list(reader)) - 1


@pytest.mark.parametrize("epochs", [1, None])
def test_passes_of_shards_that_were_left_at_different_rows_fit_together(url: str, epochs: int | None) -> None:
    seen: list[int] = []
    for shard in range(3):
        with make_batch_reader(url, ["row"], num_epochs=epochs, cur_shard=shard, shard_count=3) as reader:
            # Shards have 40 or 41 rows: with endless epochs, some begin the second one here, and others do not.
            list(itertools.islice(reader.batches_of(1), 41 if epochs is None else 1 + 10 * shard))
            seen += taken(itertools.islice(reader.batches_of(1), 40 if epochs is None else None))
    assert len(set(seen)) == len(seen) == (120 if epochs is None else ROWS)


def test_a_pass_begins_where_the_program_has_moved_the_loader(url: str) -> None:
    with make_batch_reader(url, ["row"], num_epochs=2, shuffle_row_groups=False) as reader:
        state = reader.loader.state_dict()
        for _ in reader.batches():
            break
        reader.loader.load_state_dict({**state, "epoch": 5, "visited": 100})
        assert taken(reader.batches()) == sorted([*range(100, ROWS), *range(ROWS)])
        assert reader.loader.epoch == 7
        assert taken(reader.batches()) == sorted([*range(ROWS)] * 2)


@pytest.mark.parametrize("make", [make_batch_reader, make_feed_reader])
def test_a_state_of_the_place_where_the_last_pass_stopped_moves_the_loader(tmp_path: Path, make: Any) -> None:
    rows, first = 2500, 1024  # a pass of one batch stops in the middle of the epoch
    write_rows(tmp_path / "rows", [[500]] * 5)
    path = str(tmp_path / "rows")
    source = ParquetSource(path) if make is make_feed_reader else path
    with make(source, shuffle_row_groups=False, num_epochs=1) as reader:
        assert taken(itertools.islice(reader.batches(), 1)) == [*range(first)]
        reader.loader.load_state_dict(reader.loader.state_dict())
        assert taken(reader.batches()) == [*range(first, rows)]
        assert taken(reader.batches()) == [*range(rows)]


def test_the_readers_loader_can_go_on_elsewhere(url: str) -> None:
    reading = Reading(lanes=2, window=16, fields=FieldOptions())
    with make_batch_reader(url, ["row"], num_epochs=1, reading=reading) as reader:
        state = reader.loader.state_dict()
        assert (state["lanes"], state["window"]) == (2, 16)
        list(reader)
        assert reader.metrics is not None and reader.metrics.rows == ROWS
        assert set(reader.diagnostics) == {"data/rows_per_second", "data/waiting_percent"}
        assert reader.loader.state_dict() == state | {"epoch": 1}
