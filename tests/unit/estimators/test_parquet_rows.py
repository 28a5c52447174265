"""Parquet files as the rows of ranks: shares, types, and an order by content."""

import io
import json
import re
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pandas")

import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import ArrowShard, ParquetSource
from farandole.errors import ConfigError, DataError, RankFailed, SourceError
from farandole.estimators import training_job
from farandole.estimators.backend import SparkBackend
from farandole.estimators.feed import plan_feed
from farandole.estimators.parquet_feed import StoredRows
from farandole.estimators.store import Store
from farandole.estimators.trainers import parquet_rows
from farandole.estimators.trainers.parquet_rows import ParquetFolder, ParquetRows, lay_out
from farandole.estimators.trainers.row_hash import hash_rows
from farandole.estimators.trainers.rows import HASH, VALIDATES, fed_as
from farandole.spark.jobs.task_settings import TaskSettings

VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)


def table(count: int) -> pa.Table:
    sparse = [{"type": 0, "size": 3, "indices": [n % 3], "values": [float(n)]} for n in range(count)]
    return pa.table(
        {
            "id": pa.array(range(count), pa.int32()),
            "flag": pa.array([n % 2 == 0 for n in range(count)]),
            "pixels": pa.array([[n, n + 0.5] for n in range(count)], pa.list_(pa.float32(), 2)),
            "vector": pa.array(sparse, VECTOR),
            "word": pa.array([f"w{n}" for n in range(count)]),
        }
    )


def write(folder: Path, rows: pa.Table, *, files: int = 2, row_group: int = 4) -> Path:
    folder.mkdir(parents=True)
    for number in range(files):
        first, last = (rows.num_rows * place // files for place in (number, number + 1))
        pq.write_table(rows.slice(first, last - first), folder / f"part-{number}.parquet", row_group_size=row_group)
    return folder


def seen(folder: Path | str) -> ParquetFolder:
    return ParquetFolder.of(str(folder), ParquetSource(str(folder)))


def laid_out(asked: ParquetRows, size: int) -> list[pa.Table]:
    tables = []
    for rank in range(size):
        rows = lay_out(asked, rank=rank, size=size)
        shard = ArrowShard(Path(f"/proc/self/fd/{rows.file.fileno()}"))
        rows.close()
        tables.append(shard._table)
    return tables


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_each_row_is_one_ranks(tmp_path: Path, size: int) -> None:
    train, held = write(tmp_path / "train", table(21)), write(tmp_path / "held", table(5), files=1)
    asked = ParquetRows(
        train=seen(train), held=seen(held), storage_options={}, columns=("id", "flag", "pixels", "vector"),
        as_they_are=frozenset(), validation_col=None,
    )  # fmt: skip
    tables = laid_out(asked, size)
    for validates, count in ((0, 21), (1, 5)):
        parts = [each.filter(pa.compute.equal(each[VALIDATES], validates)) for each in tables]
        assert max(each.num_rows for each in parts) - min(each.num_rows for each in parts) <= 1
        whole = pa.concat_tables(parts)
        assert sorted(whole[fed_as(0)].to_pylist()) == list(range(count))
        for row in whole.to_pylist():
            number = row[fed_as(0)]
            vector = [float(number) if place == number % 3 else 0.0 for place in range(3)]
            assert row[fed_as(1)] == int(number % 2 == 0)
            assert (row[fed_as(2)], row[fed_as(3)]) == ([number, number + 0.5], vector)
    assert {each.schema for each in tables} == {tables[0].schema}


def rows_of(folder: ParquetFolder, *columns: str, as_they_are: Iterable[str] = ()) -> ParquetRows:
    return ParquetRows(
        train=folder, held=None, storage_options={}, columns=columns, as_they_are=frozenset(as_they_are),
        validation_col=None,
    )  # fmt: skip


def test_ranks_read_the_files_that_the_driver_saw(tmp_path: Path) -> None:
    asked = rows_of(seen(write(tmp_path / "train", table(8))), "id")
    lay_out(asked, rank=0, size=2).close()
    pq.write_table(table(3), tmp_path / "train" / "part-2.parquet")
    with pytest.raises(SourceError, match=r"train: does not have the files on .* that the driver saw when the fit"):
        lay_out(asked, rank=0, size=2)


def test_ranks_read_the_version_of_a_table_that_the_driver_saw(tmp_path: Path) -> None:
    folder = write(tmp_path / "train", table(8))
    (folder / "_spark_metadata").mkdir()

    def finish(batch: int) -> None:
        path = folder / f"part-{batch}.parquet"
        facts = {"path": path.as_uri(), "size": path.stat().st_size, "modificationTime": 0, "action": "add"}
        (folder / "_spark_metadata" / str(batch)).write_text(f"v1\n{json.dumps(facts)}")

    finish(0)
    asked = rows_of(seen(folder), "id")
    finish(1)
    for where, count in ((asked, 4), (rows_of(seen(folder), "id"), 8)):
        assert sum(each.num_rows for each in laid_out(where, 2)) == count


def test_vectors_are_filled_up_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = rows_of(seen(write(tmp_path / "train", table(20), files=1, row_group=20)), "vector", "id")
    (whole,) = laid_out(asked, 1)
    monkeypatch.setattr(parquet_rows, "_NUMBERS_AT_ONCE", 11)
    (pieces,) = laid_out(asked, 1)
    assert [len(chunk) for chunk in pieces[HASH].chunks] == [3] * 6 + [2]
    assert pieces.to_pylist() == whole.to_pylist()


def test_equal_vectors_have_one_hash_however_they_are_written(tmp_path: Path) -> None:
    sparse: dict[str, Any] = {"type": 0, "size": 3, "indices": [1], "values": [5.0]}
    dense: dict[str, Any] = {"type": 1, "size": None, "indices": None, "values": [0.0, 5.0, 0.0]}
    folder = seen(write(tmp_path / "train", pa.table({"v": pa.array([sparse, dense, sparse, dense], VECTOR)})))
    hashes = [laid_out(rows_of(folder, "v", as_they_are=kept), 1)[0][HASH] for kept in ((), ("v",))]
    assert len({value for each in hashes for value in each.to_pylist()}) == 1


def run_job(tasks: TaskSettings, **more: Any) -> Any:
    settings: dict[str, Any] = {"name": "", "num_proc": 2, "verbose": 0, "env": {}, "max_attempts": 1, **more}
    return training_job.run_training_job(object(), int, dataframe=None, tasks=tasks, **settings)  # type: ignore[arg-type]


def test_a_file_that_a_rank_cannot_read_ends_a_fit_as_a_source_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RankFailed(1, "SourceError: part-0: is gone", "") from SourceError("part-0", "is gone")

    monkeypatch.setattr(training_job, "run_barrier_job", fail)
    with pytest.raises(SourceError, match="part-0: is gone"):
        run_job(TaskSettings())


def test_an_estimators_job_takes_all_that_its_backend_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(training_job, "run_barrier_job", lambda *_, **more: given.update(more) or [b"value"])
    stdout = io.StringIO()
    backend = SparkBackend(
        num_proc=4, stdout=stdout, prefix_output_with_timestamp=True, executable="/opt/python", start_timeout=7,
        ranks_per_task=2, nics="eth7", env={"A": "b"},
    )  # fmt: skip
    run_job(backend.tasks())
    assert given["verbosity"] == "all"
    given["show"]("stdout", "[0] a line\n")
    assert re.fullmatch(r"\w{3} \w{3} .*\[0\] a line\n", stdout.getvalue())
    assert (given["executable"], given["start_timeout"], given["ranks_per_task"]) == (
        "/opt/python",
        timedelta(seconds=7),
        2,
    )
    assert backend.tasks().env == {"A": "b", "FARANDOLE_INTERFACE": "eth7"}

    for verbose, shown in ((None, "log_callback_only"), (0, "log_callback_only"), (1, "all")):
        run_job(SparkBackend(num_proc=1, verbose=verbose).tasks())
        assert given["verbosity"] == shown
    run_job(SparkBackend(num_proc=1, verbose=0).tasks(), verbose=2)
    assert given["verbosity"] == "log_callback_only"


def test_a_backend_refuses_what_it_cannot_use() -> None:
    with pytest.raises(
        ConfigError, match="start_timeot: no such argument; a SparkBackend takes start_timeout, use_mpi"
    ):
        SparkBackend(num_proc=1, start_timeot=3)
    with pytest.raises(ConfigError, match="use_mpi: ranks of a Spark job connect by themselves"):
        SparkBackend(num_proc=1, use_mpi=True)


@pytest.mark.parametrize("nics", ["a,b", ["a", "b"]])
def test_a_backend_passes_on_several_interfaces(nics: str | list[str]) -> None:
    assert SparkBackend(num_proc=1, nics=nics).tasks().env["FARANDOLE_INTERFACE"] == "a,b"


def test_columns_may_stay_as_they_are_and_one_may_choose(tmp_path: Path) -> None:
    train = write(tmp_path / "train", table(9))
    asked = ParquetRows(
        train=seen(train.as_uri()), held=None, storage_options={}, columns=("word", "vector"),
        as_they_are=frozenset({"word", "vector"}), validation_col="flag",
    )  # fmt: skip
    (whole,) = laid_out(asked, 1)
    assert whole.schema.field(fed_as(1)).type == VECTOR
    chosen = dict(zip(whole[fed_as(0)].to_pylist(), whole[VALIDATES].to_pylist(), strict=True))
    assert chosen == {f"w{n}": int(n % 2 == 0) for n in range(9)}
    assert len(set(whole[HASH].to_pylist())) == 9


def test_a_hash_depends_on_the_rows_values_alone() -> None:
    columns: dict[str, Any] = {
        "number": pa.array([1.0, -0.0, None, 3.5]),
        "ints": pa.array([[1, 2], [2, 1], [], [1, 2]], pa.list_(pa.int16())),
        "word": pa.array(["a", "b", None, "a"]),
        "pair": pa.array([{"a": 1}, {"a": 2}, None, {"a": 1}]),
    }
    whole = hash_rows(list(columns.values()))
    assert len(set(whole)) == 4
    tail = hash_rows([each.slice(1) for each in columns.values()])
    np.testing.assert_array_equal(tail, whole[1:])
    equal = hash_rows([each.take(pa.array([3, 0, 0])) for name, each in columns.items() if name != "number"])
    assert len(set(equal)) == 1
    np.testing.assert_array_equal(hash_rows([pa.array([0.0])]), hash_rows([pa.array([-0.0])]))
    fixed = pa.array([[1, 2], [2, 1]], pa.list_(pa.int16(), 2))
    np.testing.assert_array_equal(hash_rows([fixed]), hash_rows([columns["ints"].slice(0, 2)]))
    swapped = hash_rows([columns["ints"]])
    assert swapped[0] != swapped[1] and swapped[0] == swapped[3]


def test_what_is_stored_is_looked_at_on_the_driver(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    with pytest.raises(ConfigError, match=r"has no rows to train on: .*intermediate_train_data\.3 does not exist"):
        StoredRows.of_store(store, 3)
    write(tmp_path / "intermediate_train_data", table(4).append_column("tiny", pa.array([1] * 4, pa.uint8())))
    stored = StoredRows.of_store(store, None)
    schema = stored.schema(["id", "vector"])
    feed = plan_feed(schema, features=["vector", "flag"], labels=["id"], validation=None)
    assert stored.planned(feed).columns == ("vector", "flag", "id")
    assert stored.validation(0.25) == 0.25
    with pytest.raises(DataError, match="column 'word': no tensor holds string"):
        plan_feed(schema, features=["word"], labels=["id"], validation=None)
    with pytest.raises(DataError, match="column 'tiny': Spark has no type for uint8"):
        stored.schema(["tiny"])
    write(tmp_path / "intermediate_val_data", table(4).drop_columns(["flag"]))
    again = StoredRows.of_store(store, None)
    assert (again.validation(0.25), again.validation_name(feed)) == (None, "intermediate_val_data")
    with pytest.raises(DataError, match="'flag': is bool in the rows to train on, None in intermediate_val_data"):
        again.planned(feed)
