"""Copies of a DataFrame that `make_spark_converter` writes, by a stand-in for Spark's writer."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from farandole.errors import SourceError
from farandole.spark.rows import written_rows
from farandole.spark.rows.converter import ROW_GROUP_BYTES, _write
from farandole.spark.rows.written_rows import WrittenRows


def frame(parquet: Callable[[str], None]) -> Any:
    writer: Any = SimpleNamespace(parquet=parquet)
    writer.option = lambda name, value: writer
    conf = SimpleNamespace(get=lambda name, default: default, set=lambda name, value: None, unset=lambda name: None)
    return SimpleNamespace(write=writer, sparkSession=SimpleNamespace(conf=conf))


def full(url: str) -> None:
    Path(url.removeprefix("file://")).mkdir()
    raise OSError("no space is left")


def test_a_failed_copy_is_removed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no space is left"):
        _write(frame(full), f"file://{tmp_path}/copy", "zstd", ROW_GROUP_BYTES)
    assert list(tmp_path.iterdir()) == []


def test_a_copy_that_cannot_be_removed_does_not_hide_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(rows: WrittenRows) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(WrittenRows, "close", refuse)
    with pytest.raises(OSError, match="no space is left"):
        _write(frame(full), f"file://{tmp_path}/copy", "zstd", ROW_GROUP_BYTES)
    assert f"the failed copy at file://{tmp_path}/copy stays there (not yours)" in caplog.text


def test_a_store_that_ranks_cannot_open_is_refused_before_spark_writes_there() -> None:
    with pytest.raises(SourceError, match="nowhere://bucket/copy"):
        _write(frame(pytest.fail), "nowhere://bucket/copy", "zstd", ROW_GROUP_BYTES)


def test_a_copy_is_removed_by_the_file_system_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    removed = []
    fs = SimpleNamespace(exists=lambda path: True, rm=lambda path, recursive: removed.append(path))
    monkeypatch.setattr(written_rows, "open_url", lambda url, options: (fs, "bucket/copy"))
    WrittenRows("s3a://bucket/copy", 3).close()
    assert removed == ["bucket/copy"]
