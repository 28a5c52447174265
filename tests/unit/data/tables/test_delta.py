"""Delta tables, compared with deltalake's own readers."""

import json
import os
import pickle
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deltalake")
pytest.importorskip("fsspec")

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from farandole.data import DeltaSource, Loader, ParquetSource, Reading, SelectedSource
from farandole.data.tables import data_files as data_files_module
from farandole.data.tables.delta import _in_a_line
from farandole.errors import DataError, SourceError
from helpers.delta_logs import MAPPING, deletion_vector, mapped, write_log
from helpers.tables import as_counter, note_stores, rows_of, some_rows, start_deltalake

COLUMNS = ["id", "text", "day", "at", "number", "list"]


@pytest.fixture(scope="module", autouse=True)
def deltalake_threads() -> None:
    """Start deltalake before the first test counts threads and descriptors."""
    start_deltalake()


def expected(url: str, columns: list[str], version: int | None = None) -> Counter[tuple[Any, ...]]:
    """Count the rows that deltalake reads, by its query engine, which knows deletion vectors and column mapping."""
    builder = QueryBuilder().register("t", DeltaTable(url, version=version))
    names = ", ".join(f'"{name}"' for name in columns)
    return as_counter(pa.table(builder.execute(f"select {names} from t").read_all()))


def check(url: str, columns: list[str] | None = None, version: int | None = None) -> None:
    """Compare with deltalake, as `DeltaSource` and as a folder among Parquet files."""
    names = columns or COLUMNS
    wanted = expected(url, names, version)
    assert rows_of(DeltaSource(url, version=version), names) == wanted
    assert rows_of(ParquetSource(url, version=version), names) == wanted


def overwrite(url: str) -> None:
    write_deltalake(url, some_rows(100, 5), mode="overwrite")


def overwrite_a_part(url: str) -> None:
    write_deltalake(url, some_rows(0, 3).filter(pa.array([True, False, False])), mode="overwrite", predicate="id < 5")


def merge(url: str) -> None:
    merger = DeltaTable(url).merge(some_rows(5, 10), "t.id = s.id", source_alias="s", target_alias="t")
    merger.when_matched_update_all().when_not_matched_insert_all().execute()


def add_column(url: str) -> None:
    write_deltalake(url, pa.table({"id": pa.array([77]), "new": ["fresh"]}), mode="append", schema_mode="merge")


CHANGES = {
    "append": lambda url: write_deltalake(url, some_rows(50), mode="append"),
    "overwrite": overwrite,
    "overwrite a part": overwrite_a_part,
    "delete": lambda url: DeltaTable(url).delete("id % 2 = 0"),
    "delete all": lambda url: DeltaTable(url).delete(),
    "update": lambda url: DeltaTable(url).update(updates={"text": "'changed'"}, predicate="id > 12"),
    "merge": merge,
    "optimize": lambda url: DeltaTable(url).optimize.compact(),
    "z-order": lambda url: DeltaTable(url).optimize.z_order(["id"]),
    "add a column": add_column,
    "restore": lambda url: (overwrite(url), DeltaTable(url).restore(1)),
    "checkpoint": lambda url: (overwrite(url), DeltaTable(url).create_checkpoint()),
}


@pytest.mark.parametrize("partitions", [[], ["day"], ["text", "day"]], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_rows_are_those_of_deltalake_after(tmp_path: Path, change: str, partitions: list[str]) -> None:
    url = str(tmp_path / "ta ble")
    write_deltalake(url, some_rows(0), partition_by=partitions)
    write_deltalake(url, some_rows(10), mode="append")
    CHANGES[change](url)
    check(url, COLUMNS + ["new"] * (change == "add a column"))
    check(url, version=1)


def test_a_store_is_opened_once_to_find_and_read_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_deltalake(str(tmp_path), some_rows(0))
    opened = note_stores(monkeypatch)
    ParquetSource(str(tmp_path))
    assert opened == [str(tmp_path)]


def test_planning_opens_no_file_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path)
    write_deltalake(url, some_rows(0), partition_by=["day"])
    wanted = expected(url, COLUMNS)
    opened: list[Path] = []
    original = data_files_module.Files.fetching

    def counted(files: Any, file: Any) -> Any:
        opened.append(file.path)
        return original(files, file)

    monkeypatch.setattr(data_files_module.Files, "fetching", counted)
    source = DeltaSource(url)
    SelectedSource(source, [("id", ">", 1000)])
    assert (sum(group.rows for group in source.row_groups), opened) == (10, [])
    assert source.nbytes(COLUMNS) > 0
    assert rows_of(source, COLUMNS) == wanted
    assert len(opened) == len(source.row_groups)


@pytest.mark.parametrize(
    "where",
    [
        [("id", ">=", 13)],
        [("text", "=", "wo/rd %20 2")],
        [("day", "=", date(2024, 1, 2))],
        [("day", "in", [date(2024, 1, 3)])],
        # The log holds milliseconds: 123 for 123.456.
        [("at", ">", datetime(2024, 1, 1, 0, 0, 0, 123460, tzinfo=UTC))],
        [("number", "<", 2.0)],
    ],
    ids=str,
)
def test_conditions_choose_the_same_rows_as_of_all(tmp_path: Path, where: list[Any]) -> None:
    url = str(tmp_path)
    for first in (0, 10):
        write_deltalake(url, some_rows(first), mode="append", partition_by=["day"])
    table = pa.concat_tables([some_rows(0), some_rows(10)])
    wanted = as_counter(table.filter(pq.filters_to_expression(where)).select(COLUMNS))
    assert len(wanted) > 0
    assert rows_of(SelectedSource(DeltaSource(url), where), COLUMNS) == wanted


def test_conditions_on_partitions_read_no_other_file(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), some_rows(0), partition_by=["day"])
    source = DeltaSource(str(tmp_path))
    for group in source.row_groups:
        if "day=2024-01-02" not in group.file.path:
            os.remove(group.file.path)
    chosen = SelectedSource(source, [("day", "==", date(2024, 1, 2))])
    assert set(rows_of(chosen, ["id"])) == {("1",), ("4",), ("7",)}


def test_large_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, table = str(tmp_path), pa.table({"id": range(1000)})
    write_deltalake(url, table)
    (path,) = tmp_path.glob("*.parquet")
    pq.write_table(table, path, row_group_size=300)
    retell(tmp_path, path.name, size=path.stat().st_size)
    monkeypatch.setattr(data_files_module, "PIECE_BYTES", path.stat().st_size // 6)
    source = DeltaSource(url)
    assert len(source.row_groups) == 7
    seen = []
    for rank in range(2):
        loader = Loader(source, batch_size=10, policy="join", rank=rank, size=2, reading=Reading(lanes=2))
        seen += [int(row) for batch in loader for row in batch["id"]]
    assert sorted(seen) == list(range(1000))


def retell(folder: Path, name: str, **facts: object) -> None:
    """Change what the log says about a file."""
    log = folder / "_delta_log" / f"{0:020}.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        if action.get("add", {}).get("path") == name:
            action["add"] |= facts
    log.write_text("\n".join(map(json.dumps, actions)))


def test_a_log_without_statistics_is_read_with_the_footers(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), some_rows(0))
    (path,) = tmp_path.glob("*.parquet")
    retell(tmp_path, path.name, stats=None)
    check(str(tmp_path))


def test_a_file_unlike_the_log_is_refused(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), some_rows(0))
    source = DeltaSource(str(tmp_path))
    (path,) = tmp_path.glob("*.parquet")
    pq.write_table(some_rows(0, 9), path)
    with pytest.raises(SourceError, match="has changed"):
        source.check()
    with pytest.raises(SourceError, match="has 9 rows, but 10 in the table's log"):
        rows_of(source, COLUMNS)


def test_sources_can_be_pickled(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path), some_rows(0))
    source = pickle.loads(pickle.dumps(DeltaSource(str(tmp_path))))
    assert rows_of(source, COLUMNS) == as_counter(some_rows(0))


def test_partitions_of_bytes_are_those_that_were_written(tmp_path: Path) -> None:
    written = pa.table({"id": [1, 2, 3], "key": pa.array([b"\x00\xff", b"abc", None])})
    write_deltalake(str(tmp_path), written, partition_by=["key"])
    source = DeltaSource(str(tmp_path))
    assert rows_of(source, ["id", "key"]) == as_counter(written)
    assert rows_of(SelectedSource(source, [("key", "=", b"abc")]), ["id"]) == Counter([("2",)])


# Tables of other writers, made by hand: deltalake writes neither column mapping nor deletion vectors.


def test_mapped_columns_are_found_by_their_names_in_files(tmp_path: Path) -> None:
    # "b" was dropped, "a" renamed to "b", and a new "a" and "p" added; the files still hold the old "b".
    for number in range(2):
        pq.write_table(pa.table({"col-1": [number, 5], "col-2": ["old", "old"]}), tmp_path / f"part-{number}.parquet")
    stats = {"numRecords": 2, "minValues": {"col-1": 0}, "maxValues": {"col-1": 5}, "nullCount": {"col-1": 0}}
    adds = [
        {"path": f"part-{number}.parquet", "stats": json.dumps(stats), "partitionValues": {"col-4": f"{number}"}}
        for number in range(2)
    ]
    schema = [mapped("b", "col-1", "long", 1), mapped("a", "col-3", "string", 3), mapped("p", "col-4", "integer", 4)]
    write_log(tmp_path, schema, adds, features=["columnMapping"], configuration=MAPPING, partitions=["p"])
    check(str(tmp_path), ["b", "a", "p"])
    assert rows_of(DeltaSource(str(tmp_path)), ["p", "b", "a"]) == Counter(
        [("0", "0", "None"), ("0", "5", "None"), ("1", "1", "None"), ("1", "5", "None")]
    )
    chosen = SelectedSource(DeltaSource(str(tmp_path)), [("b", "=", 5), ("p", "=", 1)])
    assert rows_of(chosen, ["b", "p"]) == Counter([("5", "1")])


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "part.parquet")
    adds = [{"path": "part.parquet", "stats": json.dumps({"numRecords": 2})}]
    by_id = MAPPING | {"delta.columnMapping.mode": "id"}
    write_log(tmp_path, [mapped("a", "a", "long", 1)], adds, features=["columnMapping"], configuration=by_id)
    with pytest.raises(SourceError, match="maps columns by 'id'"):
        DeltaSource(str(tmp_path))
    inner = {"type": "struct", "fields": [mapped("x", "col-7", "long", 2) | {"nullable": True}]}
    columns = [mapped("s", "b", inner, 1), mapped("n", "a", "long", 3)]
    write_log(tmp_path, columns, adds, features=["columnMapping"], configuration=MAPPING)
    check(str(tmp_path), ["n"])
    with pytest.raises(DataError, match="'s': has fields that column mapping renamed"):
        rows_of(DeltaSource(str(tmp_path)), ["n", "s"])
    write_log(tmp_path, [{"name": "a", "type": "long"}], adds, features=["newFangled"])
    with pytest.raises(SourceError, match="newFangled"):
        DeltaSource(str(tmp_path))
    for name in ("s3://elsewhere/part.parquet", "file:///elsewhere/part.parquet", "file:/elsewhere/part.parquet"):
        write_log(tmp_path, [{"name": "a", "type": "long"}], adds)
        retell(tmp_path, "part.parquet", path=name)
        with pytest.raises(SourceError, match="shallow clone"):
            DeltaSource(str(tmp_path))


def test_a_folder_that_deltalake_would_mistake_is_refused(tmp_path: Path) -> None:
    for number, name in enumerate(("a%41", "aA")):
        write_log(tmp_path / name, [{"name": f"c{number}", "type": "long"}], [])
    with pytest.raises(SourceError, match="has '%41' in its path, which deltalake reads as 'A'; rename the folder"):
        DeltaSource(str(tmp_path / "a%41"))
    assert DeltaSource(str(tmp_path / "aA")).schema.names == ["c1"]


@pytest.mark.parametrize("pieces", [1, 3])
def test_deleted_rows_are_left_out(tmp_path: Path, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = [{"name": "id", "type": "long"}, {"name": "p", "type": "string"}]
    adds: list[Mapping[str, Any]] = []
    for number, deleted in enumerate(([0, 4, 29], [], [7])):
        folder = f"p=a%20b{number}"
        (tmp_path / folder).mkdir()
        name = f"{folder}/part-{number}.parquet"
        pq.write_table(pa.table({"id": range(number * 100, number * 100 + 30)}), tmp_path / name, row_group_size=8)
        add = {"path": name.replace("%", "%25"), "partitionValues": {"p": f"a b{number}"}, "stats": '{"numRecords":30}'}
        adds.append(add | ({"deletionVector": deletion_vector(deleted)} if deleted else {}))
        if pieces > 1:
            monkeypatch.setattr(data_files_module, "PIECE_BYTES", (tmp_path / name).stat().st_size // (pieces - 1) + 1)
    write_log(tmp_path, schema, adds, features=["deletionVectors"], partitions=["p"])
    source = DeltaSource(str(tmp_path))
    assert len(source.row_groups) == 3 * (1 if pieces == 1 else 2)
    assert sum(group.rows for group in source.row_groups) == 86
    check(str(tmp_path), ["id", "p"])
    assert "4" not in {row[0] for row in rows_of(source, ["id"])}
    # With more rows deleted the same files are not the same data.
    marks = {group.file.mark for group in source.row_groups}
    assert len(marks) == 3


def test_a_deletion_vector_that_cannot_be_read_is_an_error_of_the_table(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "part.parquet")
    add = {"path": "part.parquet", "stats": '{"numRecords":2}'}
    gone = {"storageType": "p", "pathOrInlineDv": f"file://{tmp_path}/gone.bin", "offset": 1, "sizeInBytes": 40}
    for vector, stats in ((gone | {"cardinality": 1}, add["stats"]), (deletion_vector([0]), None)):
        adds = [add | {"deletionVector": vector, "stats": stats}]
        write_log(tmp_path, [{"name": "id", "type": "long"}], adds, features=["deletionVectors"])
        with pytest.raises(SourceError, match=f"{tmp_path}: has deletion vectors that cannot be read: "):
            DeltaSource(str(tmp_path))


def test_widened_types_are_cast(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"a": pa.array([1, 2], pa.int32()), "d": [Decimal("1.5"), None]}), tmp_path / "part.parquet"
    )
    schema = [{"name": "a", "type": "long"}, {"name": "d", "type": "decimal(12,3)"}]
    write_log(tmp_path, schema, [{"path": "part.parquet", "stats": '{"numRecords":2}'}], features=["typeWidening"])
    source = DeltaSource(str(tmp_path))
    (group,) = source.row_groups
    assert source.read(group, ["a", "d"]).to_pydict() == {"a": [1, 2], "d": [Decimal("1.500"), None]}
    pq.write_table(pa.table({"a": ["x", "y"]}), tmp_path / "part.parquet")
    with pytest.raises(DataError, match="is int64 in the table, but string in"):
        source.read(group, ["a"])


@pytest.mark.parametrize(
    ("stored", "kind"),
    [
        (pa.array([0.1]), "float"),
        (pa.array([2]), "boolean"),
        (pa.array(["1"]), "long"),
        (pa.array([1]), "string"),
        (pa.array([0.1]), "decimal(5,1)"),
        (pa.array([datetime(2024, 1, 1, 12)]), "date"),
    ],
    ids=lambda each: str(getattr(each, "type", each)),
)
def test_types_whose_values_would_change_are_refused(tmp_path: Path, stored: pa.Array, kind: str) -> None:
    pq.write_table(pa.table({"a": stored}), tmp_path / "part.parquet")
    write_log(tmp_path, [{"name": "a", "type": kind}], [{"path": "part.parquet", "stats": '{"numRecords":1}'}])
    with pytest.raises(DataError, match=r"'a': is .* in the table, but .* in"):
        rows_of(DeltaSource(str(tmp_path)), ["a"])


def test_an_error_of_deltalake_is_told_with_its_causes() -> None:
    lines = ["Kernel error -> Generic S3 error", "   \x1b[31m\u21b3\x1b[0m HTTP error", "  \u21b3 UnknownIssuer"]
    assert _in_a_line(OSError("\n".join(lines))) == "Kernel error -> Generic S3 error: HTTP error: UnknownIssuer"
