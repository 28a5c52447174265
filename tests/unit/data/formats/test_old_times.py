"""Dates before 1582 in the files of Spark before 3.0, of its mode LEGACY, and of Hive."""

from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import Loader, ParquetSource, SelectedSource
from farandole.errors import DataError

SPARK = {"org.apache.spark.version": "3.5.1"}
LEGACY = SPARK | {"org.apache.spark.legacyDateTime": "", "org.apache.spark.timeZone": "America/Los_Angeles"}
LEGACY_UTC = LEGACY | {"org.apache.spark.timeZone": "UTC"}
# Days since 1970 in the Julian calendar before 1582-10-15, and the names of the days.
DAYS = {
    -719_164: "0001-01-01",
    -682_946: "0100-03-01",  # 29 February, which the Gregorian year 100 has not
    -682_945: "0100-03-01",
    -354_280: "1000-01-01",
    -171_595: "1500-03-01",
    -141_428: "1582-10-04",
    -141_427: "1582-10-15",
    0: "1970-01-01",
    20_000: "2024-10-04",
}


def write(path: Path, column: pa.Array, notes: dict[str, str], **options: Any) -> ParquetSource:
    """Write a file with notes in its footer, and open it."""
    table = pa.table({"day": column}).replace_schema_metadata(notes)
    pq.write_table(table, path, **options)
    return ParquetSource(str(path))


def read(source: ParquetSource | SelectedSource) -> list[str]:
    return [str(day) for batch in Loader(source, batch_size=99, policy="join") for day in sorted(batch["day"])]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "notes", [LEGACY, LEGACY_UTC, {"org.apache.spark.version": "2.4.8"}, {"writer.date.proleptic": "false"}]
)
def test_days_of_the_julian_calendar_keep_their_names(tmp_path: Path, notes: dict[str, str]) -> None:
    days = pa.array([*DAYS, None], pa.int32()).cast(pa.date32())
    source = write(tmp_path / "rows.parquet", days.drop_null(), notes)
    assert read(source) == sorted(DAYS.values())
    assert source.read(source.row_groups[0], ["day"])["day"].to_pylist() == [
        date.fromisoformat(day) for day in DAYS.values()
    ]
    with_null = write(tmp_path / "null.parquet", days, notes)
    assert with_null.read(with_null.row_groups[0], ["day"])["day"].null_count == 1


def test_files_of_todays_calendar_are_left_alone(tmp_path: Path) -> None:
    days = pa.array([*DAYS], pa.int32()).cast(pa.date32())
    for notes in (SPARK, {}, {"writer.date.proleptic": "true"}):
        assert read(write(tmp_path / "rows.parquet", days, notes))[0] == "0000-12-30"


def test_statistics_in_the_julian_calendar_leave_out_no_row(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.parquet", pa.array([-354_280], pa.int32()).cast(pa.date32()), LEGACY)
    assert read(SelectedSource(source, [("day", "<=", date(1000, 1, 1))])) == ["1000-01-01"]


def test_old_times_are_moved_in_utc_and_refused_elsewhere(tmp_path: Path) -> None:
    times = pa.array([datetime(1000, 1, 6, 12, 30), datetime(1960, 1, 1, 1)], pa.timestamp("us"))
    assert read(write(tmp_path / "rows.parquet", times, LEGACY_UTC))[0] == "1000-01-01T12:30:00.000000"
    with pytest.raises(DataError, match=r"rows.parquet holds values in the time zone America.* from 1000-01-06"):
        read(write(tmp_path / "rows.parquet", times, LEGACY))
    assert len(read(write(tmp_path / "rows.parquet", times[1:], LEGACY))) == 1


def test_int96_times_have_a_version_and_a_note_of_their_own(tmp_path: Path) -> None:
    times = pa.array([datetime(1850, 1, 1)], pa.timestamp("ns"))
    for notes in ({"org.apache.spark.version": "3.0.3"}, SPARK | {"org.apache.spark.legacyINT96": ""}):
        with pytest.raises(DataError, match="time zone unknown from 1850-01-01"):
            read(write(tmp_path / "rows.parquet", times, notes, use_deprecated_int96_timestamps=True))
    source = write(tmp_path / "rows.parquet", times, LEGACY, use_deprecated_int96_timestamps=True)
    assert read(source) == ["1850-01-01T00:00:00.000000000"]


def test_old_days_within_arrays_are_refused(tmp_path: Path) -> None:
    days = pa.array([[-354_280, 0]], pa.list_(pa.int32())).cast(pa.list_(pa.date32()))
    with pytest.raises(DataError, match="holds values in arrays from 1000-01-06 on"):
        read(write(tmp_path / "rows.parquet", days, LEGACY))
    recent = pa.array([[1, 0]], pa.list_(pa.int32())).cast(pa.list_(pa.date32()))
    source = write(tmp_path / "rows.parquet", recent, LEGACY)
    assert source.read(source.row_groups[0], ["day"])["day"].to_pylist() == [[date(1970, 1, 2), date(1970, 1, 1)]]
