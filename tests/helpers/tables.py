"""Tables in small, and their rows as a loader gives them."""

from collections import Counter
from tempfile import TemporaryDirectory
from typing import Any

from farandole.data import Source

__all__ = ["as_counter", "rows_of", "start_deltalake", "start_pyiceberg"]


def start_deltalake() -> None:
    """Start deltalake's threads, which keep descriptors until the process ends, before tests count these."""
    import pyarrow as pa
    from deltalake import DeltaTable, QueryBuilder, write_deltalake

    with TemporaryDirectory() as folder:
        write_deltalake(folder, pa.table({"id": range(3)}))
        table = DeltaTable(folder)
        table.delete("id = 1")
        list(QueryBuilder().register("t", table).execute("select * from t"))


def start_pyiceberg() -> None:
    """Start all threads of pyiceberg's pool, which are kept until the process ends, before tests count them."""
    import threading

    from pyiceberg.utils.concurrent import ExecutorFactory

    pool: Any = ExecutorFactory.get_or_create()
    count = pool._max_workers
    barrier = threading.Barrier(count, timeout=20)
    for future in [pool.submit(barrier.wait) for _ in range(count)]:
        future.result()


def rows_of(source: Source, columns: list[str], **options: Any) -> Counter[tuple[Any, ...]]:
    """Count the rows of all row groups; each group has as many as it tells."""
    rows: Counter[tuple[Any, ...]] = Counter()
    for group in source.row_groups:
        table = source.read(group, columns)
        assert table.num_rows == group.rows
        assert table.schema.names == columns
        rows.update(as_counter(table))
    return rows


def as_counter(table: Any) -> Counter[tuple[Any, ...]]:
    """Count the rows of an Arrow table."""
    return Counter(tuple(map(repr, row.values())) for row in table.to_pylist())
