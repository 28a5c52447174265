"""Iceberg tables, compared with pyiceberg's own reader."""

import gzip
import json
import os
import pickle
from collections import Counter
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyiceberg")
pytest.importorskip("sqlalchemy")
pytest.importorskip("fsspec")

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog.memory import InMemoryCatalog
from pyiceberg.expressions import GreaterThan
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import LongType, StringType

from farandole.data import Growing, GrowingLoader, IcebergSource, Loader, ParquetSource, Reading, SelectedSource
from farandole.errors import DataError, SourceError
from helpers.tables import as_counter, iceberg_catalog, note_stores, rows_of, some_rows, start_pyiceberg

COLUMNS = ["id", "text", "day", "at", "number", "list"]


@pytest.fixture(scope="module", autouse=True)
def pyiceberg_threads() -> None:
    """Start pyiceberg's threads before the first test counts threads."""
    start_pyiceberg()


catalog = pytest.fixture(iceberg_catalog)


def make(catalog: InMemoryCatalog, partition: str | None = None, version: int = 2) -> Table:
    table = catalog.create_table("db.t", some_rows(0).schema, properties={"format-version": str(version)})
    if partition:
        with table.update_spec() as change:
            change.add_field(partition, IdentityTransform(), partition)
    table.append(some_rows(0))
    table.append(some_rows(10))
    return table


def check(table: Table, columns: list[str] | None = None, snapshot: int | None = None) -> None:
    """Compare with pyiceberg, as a catalog's table and as a folder."""
    names = columns or COLUMNS
    wanted = as_counter(table.scan(snapshot_id=snapshot).to_arrow().select(names))
    for source in (
        IcebergSource(table, snapshot=snapshot),
        IcebergSource(table.location(), snapshot=snapshot),
        IcebergSource(f"file://{table.metadata_location}", snapshot=snapshot),
        ParquetSource(table.location(), version=snapshot),
    ):
        assert rows_of(source, names) == wanted
        source.check()


def add_column(table: Table) -> None:
    with table.update_schema() as change:
        change.add_column("new", StringType())
    table.append(some_rows(50).append_column("new", [["x"] * 10]))


def rename(table: Table) -> None:
    with table.update_schema() as change:
        change.delete_column("at")
        change.rename_column("number", "at")
    with table.update_schema() as change:
        change.add_column("number", LongType())


CHANGES = {
    "append": (lambda table: table.append(some_rows(50)), COLUMNS),
    "overwrite": (lambda table: table.overwrite(some_rows(100, 5)), COLUMNS),
    "overwrite a part": (lambda table: table.overwrite(some_rows(100, 5), GreaterThan("id", 12)), COLUMNS),
    "delete": (lambda table: table.delete("id = 2 or id > 14"), COLUMNS),
    "delete all": (lambda table: table.delete(), COLUMNS),
    "merge": (lambda table: table.upsert(some_rows(5).drop_columns(["list"]), ["id"]), COLUMNS[:-1]),
    "add a column": (add_column, [*COLUMNS, "new"]),
    "rename": (rename, COLUMNS),
}


@pytest.mark.parametrize("partition", [None, "day", "text"])
@pytest.mark.parametrize("change", CHANGES)
def test_rows_are_those_of_pyiceberg_after(catalog: InMemoryCatalog, change: str, partition: str | None) -> None:
    table = make(catalog, partition)
    before = table.current_snapshot()
    assert before is not None
    act, columns = CHANGES[change]
    if change == "merge":
        table.delete()
        with table.update_schema() as schema:
            schema.delete_column("list")
        table.append(some_rows(0).drop_columns(["list"]))
    act(table)
    check(table, columns)
    if change in ("delete all", "add a column", "rename"):
        check(table, snapshot=before.snapshot_id)


def test_a_store_is_opened_once_to_find_and_read_a_table(
    catalog: InMemoryCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = make(catalog).location()
    opened = note_stores(monkeypatch)
    ParquetSource(url)
    assert opened == [url]


def test_planning_opens_no_file_of_data(catalog: InMemoryCatalog) -> None:
    table = make(catalog)
    wanted = as_counter(table.scan().to_arrow())
    folder = Path(table.location(), "data")
    away = folder.rename(folder.with_name("away"))
    source = IcebergSource(table.location())
    assert sum(group.rows for group in source.row_groups) == 20
    assert source.nbytes(COLUMNS) > 0
    with pytest.raises(SourceError, match=r"is not there: snapshot \d+ of .* was expired"):
        source.check()
    away.rename(folder)
    assert rows_of(source, COLUMNS) == wanted


@pytest.mark.parametrize(
    "where",
    [
        [("id", ">=", 13)],
        [("text", "=", "wo/rd %20 2")],
        [("day", "=", date(2024, 1, 2))],
        [("at", ">", datetime(2024, 1, 1, 0, 0, 0, 123460, tzinfo=UTC))],
        [("number", "<", 2.0)],
    ],
    ids=str,
)
def test_conditions_choose_the_same_rows_as_of_all(catalog: InMemoryCatalog, where: list[Any]) -> None:
    table = make(catalog, "day")
    wanted = as_counter(pa.concat_tables([some_rows(0), some_rows(10)]).filter(pq.filters_to_expression(where)))
    assert len(wanted) > 0
    assert rows_of(SelectedSource(IcebergSource(table), where), COLUMNS) == wanted


def test_conditions_read_no_file_that_holds_no_such_row(catalog: InMemoryCatalog) -> None:
    source = IcebergSource(make(catalog, "day"))
    asked = {name: source.bounds(name) for name in ("id", "day", "text", "at", "number")}
    assert all(bounds is not None and len(bounds.least) == 6 for bounds in asked.values())
    for group, day in zip(source.row_groups, asked["day"].least.to_pylist(), strict=True):  # type: ignore[union-attr]
        if day != date(2024, 1, 2):
            os.remove(group.file.path)
    chosen = SelectedSource(source, [("day", "==", date(2024, 1, 2)), ("id", "<", 9)])
    assert set(rows_of(chosen, ["id"])) == {("1",), ("4",), ("7",)}


def test_a_table_feeds_a_loader_while_it_grows(catalog: InMemoryCatalog) -> None:
    table = make(catalog)
    growing = Growing(table.location(), until=lambda paths: len(paths) >= 4, poll=0, patience=5)
    batches = iter(GrowingLoader(growing, batch_size=20, columns=["id"]))
    assert sorted(next(batches)["id"].tolist()) == list(range(20))  # type: ignore[union-attr]
    for first in (20, 30):
        table.append(some_rows(first))
    assert sorted(next(batches)["id"].tolist()) == list(range(20, 40))  # type: ignore[union-attr]
    assert next(batches, None) is None
    batches = iter(GrowingLoader(Growing(table.location(), poll=0, patience=5), batch_size=99, columns=["id"]))
    next(batches)
    table.overwrite(some_rows(50))
    with pytest.raises(SourceError, match="has removed or rewritten files of which rows were read"):
        next(batches)


def test_files_without_ids_are_read_by_the_name_mapping(catalog: InMemoryCatalog, tmp_path: Path) -> None:
    table = catalog.create_table("db.t", pa.schema({"id": pa.int64(), "part": pa.string()}))
    pq.write_table(pa.table({"id": [1, 2], "part": ["a", "b"]}), tmp_path / "added.parquet")
    table.add_files([str(tmp_path / "added.parquet")])
    check(table, ["id", "part"])
    with table.update_schema() as change:
        change.rename_column("id", "number")
    check(table, ["part", "number"])
    with table.transaction() as transaction:
        transaction.remove_properties("schema.name-mapping.default")
    with pytest.raises(SourceError, match="has no field ids"):
        rows_of(IcebergSource(table), ["number"])


def test_partitions_of_doubles_are_exact(catalog: InMemoryCatalog, tmp_path: Path) -> None:
    """pyiceberg reads doubles in manifests as floats, 0.1 as 0.10000000149."""
    table = catalog.create_table("db.t", pa.schema({"id": pa.int64(), "part": pa.float64()}))
    with table.update_spec() as change:
        change.add_field("part", IdentityTransform(), "part")
    pq.write_table(pa.table({"id": [1, 2], "part": [0.1, 0.1]}), tmp_path / "added.parquet")
    table.add_files([str(tmp_path / "added.parquet")])
    assert rows_of(IcebergSource(table), ["part"]) == Counter({("0.1",): 2})
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "added.parquet")
    with pytest.raises(DataError, match="'part': is a partition of doubles, which pyiceberg does not read exactly"):
        rows_of(IcebergSource(table), ["part"])


# Snapshots


def test_a_state_goes_on_with_its_snapshot(catalog: InMemoryCatalog) -> None:
    table = catalog.create_table("db.t", pa.schema({"id": pa.int64()}))
    with pytest.raises(SourceError, match="nothing was written"):
        IcebergSource(table)
    table.append(pa.table({"id": range(20)}))
    loader = Loader(ParquetSource(table.location()), batch_size=3, policy="join")
    batches = iter(loader)
    seen = [int(row) for _ in range(2) for row in next(batches)["id"]]
    batches.close()  # type: ignore[attr-defined]
    state = json.loads(json.dumps(loader.state_dict()))
    table.overwrite(pa.table({"id": range(100, 120)}))
    for source in (ParquetSource(table.location()), IcebergSource(table)):
        later = Loader(source, batch_size=3, policy="join")
        assert later.state_dict()["version"] != state["version"]
        later.load_state_dict(state)
        assert sorted(seen + [int(row) for batch in later for row in batch["id"]]) == list(range(20))
    table.maintenance.expire_snapshots().by_id(state["version"]).commit()
    with pytest.raises(SourceError, match=rf"has no snapshot {state['version']}; it was expired"):
        Loader(ParquetSource(table.location()), batch_size=3, policy="join").load_state_dict(state)


def test_a_snapshot_is_found_by_its_time(catalog: InMemoryCatalog) -> None:
    table = make(catalog)
    first = table.snapshots()[0]
    at = datetime.fromtimestamp(first.timestamp_ms / 1000, UTC)
    assert IcebergSource(table, timestamp=at).version == first.snapshot_id
    with pytest.raises(SourceError, match="has no snapshot of 2020"):
        IcebergSource(table, timestamp=datetime(2020, 1, 1))


def test_the_metadata_file_is_the_hinted_or_the_newest_one(catalog: InMemoryCatalog) -> None:
    table = make(catalog)
    notes = Path(table.location(), "metadata")
    older = next(path for path in notes.iterdir() if path.name.startswith("00001-"))
    (notes / "version-hint.text").write_text(older.name.removesuffix(".metadata.json"))
    assert IcebergSource(table.location()).version == table.snapshots()[0].snapshot_id
    (notes / "version-hint.text").unlink()
    newest = Path(table.metadata_location)
    (notes / "00002-failed-commit.metadata.json").write_text(newest.read_text())
    with pytest.raises(SourceError, match=r"several newest metadata files, 00002-.*only the catalog knows"):
        ParquetSource(table.location())
    assert IcebergSource(str(newest)).version == IcebergSource(table).version


def test_a_hint_that_is_late_is_followed_to_the_newest_version(catalog: InMemoryCatalog) -> None:
    """Writers without a catalog write the next numbered file first, and the hint later."""
    table = make(catalog)
    notes = Path(table.location(), "metadata")
    for number in range(3):
        (path,) = notes.glob(f"{number:05}-*.metadata.json")
        path.rename(notes / f"v{number + 1}.metadata.json")
    for hint in ("2", "3"):
        (notes / "version-hint.text").write_text(hint)
        assert sum(rows_of(IcebergSource(table.location()), ["id"]).values()) == 20
    packed = gzip.compress((notes / "v3.metadata.json").read_bytes())
    (notes / "v3.metadata.json").unlink()
    (notes / "v3.gz.metadata.json").write_bytes(packed)
    assert sum(rows_of(IcebergSource(table.location()), ["id"]).values()) == 20
    (notes / "version-hint.text").write_text("7")
    with pytest.raises(SourceError, match=r"has no metadata file of version 7, which its version-hint.text names"):
        IcebergSource(table.location())


def test_dates_that_became_times_are_cast(catalog: InMemoryCatalog) -> None:
    """Version 3 of the format has this change of types; the bounds in the manifests are still days."""
    table = catalog.create_table("db.t", pa.schema({"at": pa.date32()}))
    table.append(pa.table({"at": [date(2020, 1, 1), date(1960, 1, 1)]}))
    metadata = json.loads(Path(table.metadata_location).read_text())
    metadata["schemas"][0]["fields"][0]["type"] = "timestamp"
    later = Path(table.metadata_location).with_name("00009-x.metadata.json")
    later.write_text(json.dumps(metadata))
    chosen = SelectedSource(IcebergSource(str(later)), [("at", ">", datetime(2000, 1, 1))])
    assert rows_of(chosen, ["at"]) == Counter([(repr(datetime(2020, 1, 1)),)])


def test_types_that_were_widened_are_cast(catalog: InMemoryCatalog) -> None:
    table = catalog.create_table("db.t", pa.schema({"a": pa.int32(), "b": pa.float32()}))
    table.append(pa.table({"a": pa.array([1, 2], pa.int32()), "b": pa.array([1.5, 2.5], pa.float32())}))
    with table.update_schema() as change:
        change.update_column("a", LongType())
    check(table, ["a", "b"])
    assert rows_of(SelectedSource(IcebergSource(table), [("a", ">", 1)]), ["a"]) == Counter([("2",)])


def test_fields_of_structs_that_were_added_again_are_not_those_of_the_file(catalog: InMemoryCatalog) -> None:
    inner = pa.struct([("a", pa.int64()), ("b", pa.int64())])
    table = catalog.create_table("db.t", pa.schema({"id": pa.int64(), "s": inner, "l": pa.list_(inner)}))
    table.append(
        pa.table({"id": [1], "s": [{"a": 1, "b": 2}], "l": [[{"a": 1, "b": 2}]]}, schema=table.schema().as_arrow())
    )
    check(table, ["id", "s", "l"])
    for place in (("s",), ("l", "element")):
        with table.update_schema() as change:
            change.delete_column((*place, "a"))
        with table.update_schema() as change:
            change.add_column((*place, "a"), LongType())
            change.move_first((*place, "a"))
    check(table, ["id"])
    for name in ("s", "l"):
        with pytest.raises(
            DataError, match=f"'{name}': has fields that were dropped or added since .*parquet was written"
        ):
            rows_of(IcebergSource(table), [name])


def test_sources_can_be_pickled_and_read_by_ranks(catalog: InMemoryCatalog) -> None:
    source = pickle.loads(pickle.dumps(IcebergSource(make(catalog))))
    seen = []
    for rank in range(3):
        loader = Loader(
            source, batch_size=2, policy="join", columns=["id"], rank=rank, size=3, reading=Reading(lanes=2, window=3)
        )
        seen += [int(row) for batch in loader for row in batch["id"]]
    assert sorted(seen) == list(range(20))
