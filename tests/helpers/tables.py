"""Small tables, and counts of their rows."""

from collections import Counter
from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from farandole.data import Source
from farandole.data.formats.file_systems import Files

if TYPE_CHECKING:
    from pyiceberg.catalog.memory import InMemoryCatalog


def start_deltalake() -> None:
    """Start deltalake's threads before tests count descriptors, because they keep theirs until the process ends."""
    from deltalake import DeltaTable, QueryBuilder, write_deltalake

    with TemporaryDirectory() as folder:
        write_deltalake(folder, pa.table({"id": range(3)}))
        table = DeltaTable(folder)
        table.delete("id = 1")
        list(QueryBuilder().register("t", table).execute("select * from t"))


def start_pyiceberg() -> None:
    """Start all threads of pyiceberg's pool before tests count threads, because they run until the process ends."""
    import threading

    from pyiceberg.utils.concurrent import ExecutorFactory

    pool: Any = ExecutorFactory.get_or_create()
    count = pool._max_workers
    barrier = threading.Barrier(count, timeout=20)
    for future in [pool.submit(barrier.wait) for _ in range(count)]:
        future.result()


def iceberg_catalog(tmp_path: Path) -> "Iterator[InMemoryCatalog]":
    """Yield a catalog of Iceberg tables with a namespace "db"; its folder has a blank in its name."""
    from pyiceberg.catalog.memory import InMemoryCatalog

    made = InMemoryCatalog("here", warehouse=str(tmp_path / "ware house"))
    made.create_namespace("db")
    yield made
    made.close()


def note_stores(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the URL of each store that is opened from now on."""
    opened: list[str] = []
    open_store = Files.at.__func__  # type: ignore[attr-defined]

    def noting(cls: type[Files], url: str, *arguments: Any, **how: Any) -> Any:
        opened.append(url)
        return open_store(cls, url, *arguments, **how)

    monkeypatch.setattr(Files, "at", classmethod(noting))
    return opened


def some_rows(first: int, count: int = 10) -> pa.Table:
    """Return `count` rows of many types with ids from `first` on; some texts are null, some numbers NaN."""
    numbers = range(first, first + count)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "text": pa.array([None if n % 7 == 3 else f"wo/rd %20 {n % 3}" for n in numbers]),
            "day": pa.array([date(2024, 1, 1 + n % 3) for n in numbers]),
            "at": pa.array([datetime(2024, 1, 1, 0, 0, 0, 123456 + n) for n in numbers], pa.timestamp("us", "UTC")),
            "number": pa.array([float("nan") if n % 5 == 4 else n / 2 for n in numbers]),
            "list": [[n, n + 1] for n in numbers],
        }
    )


def rows_of(source: Source, columns: list[str], **options: Any) -> Counter[tuple[Any, ...]]:
    """Read all row groups, check their numbers of rows, and return the rows with their counts."""
    rows: Counter[tuple[Any, ...]] = Counter()
    for group in source.row_groups:
        table = source.read(group, columns)
        assert table.num_rows == group.rows
        assert table.schema.names == columns
        rows.update(as_counter(table))
    return rows


def as_counter(table: Any) -> Counter[tuple[Any, ...]]:
    """Return the rows of an Arrow table with their counts."""
    return Counter(tuple(map(repr, row.values())) for row in table.to_pylist())
