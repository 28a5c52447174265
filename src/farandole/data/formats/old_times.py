"""Dates and times in Parquet files that Arrow does not read as their writer meant them."""

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from farandole.errors import DataError

# Arrow before 23 wrote an INT96 time before 1970 as a day and negative nanoseconds, modulo 2**64. Such a time cannot be
# distinguished from one between 2262 and 2554.
_OLD_ARROW = re.compile(r"parquet-cpp-arrow version (1?\d|2[0-2])\.")
_WRAPPED = 2**64 // 1000  # microseconds
_SWITCH = -141_427  # 1582-10-15, the first day of the Gregorian calendar, in days since 1970
_ZONES_AGREE = -25_567  # 1900-01-01; for earlier times, Java's old and new classes use different offsets of time zones
_UTC = (b"UTC", b"Etc/UTC", b"GMT", b"Z", b"+00:00")
_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


def times_as_meant(
    stream: pa.NativeFile, footer: pq.FileMetaData, row_groups: Sequence[int], table: pa.Table, path: str
) -> pa.Table:
    """Return `table`, read from these row groups of a file, with its old dates in the calendar of Arrow and NumPy.

    `is_julian` says which files count in another calendar. Raises `DataError` for old times in a time zone other than
    UTC or within arrays, and for INT96 times, also within arrays, that nanoseconds cannot hold."""
    kinds = {field.name: _item(field.type) for field in table.schema}
    names = [name for name, kind in kinds.items() if pa.types.is_timestamp(kind) or pa.types.is_date(kind)]
    if not names or not table.num_rows:
        return table
    int96 = _int96_columns(footer, table.schema)
    if int96:
        _check_int96(stream, footer, row_groups, table.select(int96), path)
    for name in names:
        if is_julian(footer, int96=name in int96):
            place = table.schema.get_field_index(name)
            chunks = [_moved(chunk, footer, name, path) for chunk in table.column(place).chunks]
            field = table.schema.field(place)
            table = table.set_column(place, field, pa.chunked_array(chunks, field.type))
    return table


def has_old_times(footer: pq.FileMetaData) -> bool:
    """Return whether `times_as_meant` may change or refuse columns of this file."""
    return is_julian(footer) or bool(_int96_columns(footer, footer.schema.to_arrow_schema()))


def is_julian(footer: pq.FileMetaData, *, int96: bool = False) -> bool:
    """Return whether a file counts the days before 1582-10-15 by the Julian calendar.

    Spark before 3.0 does (in INT96 before 3.1), Spark's mode LEGACY, and Hive unless it states otherwise."""
    notes = footer.metadata or {}
    version = notes.get(b"org.apache.spark.version")
    if version is None:
        return bool(notes.get(b"writer.date.proleptic") == b"false")
    mode = b"org.apache.spark.legacyINT96" if int96 else b"org.apache.spark.legacyDateTime"
    numbers = tuple(map(int, re.findall(rb"\d+", version)[:2]))
    return mode in notes or numbers < ((3, 1) if int96 else (3, 0))


def _moved(column: pa.Array, footer: pq.FileMetaData, name: str, path: str) -> pa.Array:
    """Return dates or times whose day in the Julian calendar has become the same day in the Gregorian one."""
    flat = _flat(column)
    dates = pa.types.is_date(flat.type)
    zone = (footer.metadata or {}).get(b"org.apache.spark.timeZone", b"unknown")
    counted = flat.view(pa.int32() if pa.types.is_date32(flat.type) else pa.int64())
    numbers = counted.fill_null(0).to_numpy().astype(np.int64)
    day = 1 if pa.types.is_date32(flat.type) else _DAY["ms" if dates else flat.type.unit]
    days = numbers // day
    first = days.min(initial=0)
    if first >= (_SWITCH if dates or zone in _UTC else _ZONES_AGREE):
        return column
    if flat is not column or not (dates or zone in _UTC):
        what = "in arrays" if flat is not column else f"in the time zone {zone.decode()}"
        raise DataError(
            name,
            f"{path} holds values {what} from {np.datetime64(int(first), 'D')} on, in the calendar and time zones of "
            "Spark before 3.0; write the file anew with spark.sql.parquet.datetimeRebaseModeInWrite=CORRECTED and "
            "int96RebaseModeInWrite=CORRECTED",
        )
    moved = numbers + np.where(days < _SWITCH, _in_gregorian(days) - days, 0) * day
    nulls = flat.is_null().to_numpy(zero_copy_only=False)
    return pa.array(moved.astype(counted.type.to_pandas_dtype()), mask=nulls).view(flat.type)


def _in_gregorian(days: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the days of the Gregorian calendar that have the names of these days of the Julian calendar.

    29 February of a year that is no leap year becomes 1 March, as in Spark."""
    # Years begin with March, so that a leap day is the last of its year.
    since = days + 719_470  # days since 1 March of the Julian year 0, which is 2 days before the Gregorian one
    year = (4 * since + 3) // 1461
    named: NDArray[np.int64] = since - year * 1461 // 4 + 365 * year + year // 4 - year // 100 + year // 400 - 719_468
    return named


def _int96_columns(footer: pq.FileMetaData, schema: pa.Schema) -> list[str]:
    """Return the columns of INT96 times, and of arrays of these."""
    kinds = {field.name: _item(field.type) for field in schema}
    nanos = [name for name, kind in kinds.items() if pa.types.is_timestamp(kind) and kind.unit == "ns"]
    if not nanos:
        return []
    leaves = [footer.schema.column(leaf) for leaf in range(footer.num_columns)]
    old = [leaf.path for leaf in leaves if leaf.physical_type == "INT96"]
    # The leaf of an array has a path such as "days.list.element".
    return [name for name in nanos if any(path == name or path.startswith(f"{name}.") for path in old)]


def _check_int96(
    stream: pa.NativeFile, footer: pq.FileMetaData, row_groups: Sequence[int], table: pa.Table, path: str
) -> None:
    """Raise `DataError` for INT96 times, which Spark writes, that are out of the range of Arrow's nanoseconds.

    Arrow silently turns them into other times. So these columns are decoded a second time, as microseconds, and
    compared."""
    with pq.ParquetFile(stream, metadata=footer, coerce_int96_timestamp_unit="us") as parquet:
        again = parquet.read_row_groups(row_groups, columns=table.column_names, use_threads=False)
    for name in table.column_names:
        nanos, micros = (_numbers(each[name]) for each in (table, again))
        apart = micros - nanos // 1000
        if _OLD_ARROW.match(footer.created_by or ""):
            apart = np.where((nanos < 0) & (apart >= _WRAPPED), apart - _WRAPPED, apart)
        if np.abs(apart).max(initial=0) > 1:
            raise DataError(
                name,
                f"{path} holds times before 1677 or after 2262 as INT96, which timestamp[ns] cannot hold; write them "
                "as microseconds (spark.sql.parquet.outputTimestampType=TIMESTAMP_MICROS)",
            )


def _numbers(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return times as numbers, 0 for nulls; those of arrays follow each other."""
    chunks = [_flat(chunk).cast(pa.int64()).fill_null(0).to_numpy() for chunk in column.chunks]
    return np.concatenate(chunks)


def _flat(column: pa.Array) -> pa.Array:
    while pa.types.is_nested(column.type):
        column = column.flatten()
    return column


def _item(kind: pa.DataType) -> pa.DataType:
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return kind
