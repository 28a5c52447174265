"""`_metadata` files: no footer is opened where they say it all, and footers count where they do not."""

import os
import pickle
from pathlib import Path

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import Loader, ParquetSource, SelectedSource
from farandole.data.formats.parquet_files import ParquetFiles
from helpers.object_store import ObjectStore

FILES = 12


def write(folder: Path, summarized: int = FILES) -> None:
    """Write files in two folders of partitions, and a summary of the first of them."""
    footers: list[pq.FileMetaData] = []
    for number in range(FILES):
        path = folder / f"part={number % 2}" / f"{number:02}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = pa.table({"row": range(10 * number, 10 * number + 10), "x": [f"{each:100}" for each in range(10)]})
        pq.write_table(rows, path, row_group_size=4, compression="none", metadata_collector=footers)
        footers[-1].set_file_path(str(path.relative_to(folder)))
    pq.write_metadata(rows.schema, folder / "_metadata", metadata_collector=footers[:summarized])


def rows_of(source: ParquetSource | SelectedSource) -> list[int]:
    return sorted(row for batch in Loader(source, batch_size=7, policy="join") for row in batch["row"].tolist())  # type: ignore[union-attr]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files whose footers are opened."""
    names: list[str] = []
    real = ParquetFiles._open

    def note(self: ParquetFiles, file: object) -> object:
        names.append(Path(file.path).name)  # type: ignore[attr-defined]
        return real(self, file)  # type: ignore[arg-type]

    monkeypatch.setattr(ParquetFiles, "_open", note)
    return names


@pytest.mark.parametrize("summarized", [FILES, 5])
def test_files_that_a_summary_describes_are_not_opened(tmp_path: Path, opened: list[str], summarized: int) -> None:
    write(tmp_path, summarized)
    source = ParquetSource(str(tmp_path))
    assert sorted(opened) == [f"{number:02}.parquet" for number in range(summarized, FILES)]
    (tmp_path / "_metadata").unlink()
    plain = ParquetSource(str(tmp_path))
    assert (source.row_groups, source.schema) == (plain.row_groups, plain.schema)
    assert source.nbytes(["row"]) == plain.nbytes(["row"])
    assert rows_of(pickle.loads(pickle.dumps(source))) == list(range(10 * FILES))
    where = [("row", ">=", 50), ("part", "=", 1)]
    assert rows_of(SelectedSource(source, where)) == rows_of(SelectedSource(plain, where)) != []


def test_files_that_have_changed_since_are_opened(tmp_path: Path, opened: list[str]) -> None:
    write(tmp_path)
    newer, shorter = tmp_path / "part=1/03.parquet", tmp_path / "part=0/04.parquet"
    pq.write_table(pa.table({"row": [1000], "x": ["z"]}), newer)
    pq.write_table(pa.table({"row": [1001], "x": ["z"]}), shorter)
    os.utime(newer, (os.stat(tmp_path / "_metadata").st_mtime + 1,) * 2)
    os.utime(shorter, (0, 0))
    assert rows_of(ParquetSource(str(tmp_path))) == [*range(30), *range(50, 10 * FILES), 1000, 1001]
    assert opened == ["04.parquet", "03.parquet"]
    opened.clear()
    (tmp_path / "_metadata").write_bytes(b"no summary")
    assert len(rows_of(ParquetSource(str(tmp_path)))) == 10 * FILES - 18
    assert len(opened) == FILES


def test_a_summary_of_a_store_takes_few_requests(tmp_path: Path) -> None:
    pytest.importorskip("botocore")
    write(tmp_path)
    with ObjectStore.serving(tmp_path) as store:
        source = ParquetSource("s3://bucket/data", store.options)
        assert store.requests["GET"] == 1  # the summary
        assert rows_of(source) == list(range(10 * FILES))
