"""Folders of Hugging Face's save_to_disk: the rows of the streams that state.json names."""

import json
from pathlib import Path

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa

from farandole.data import Loader, ParquetSource, SavedDataset
from farandole.errors import ConfigError, DataError, SourceError
from helpers.object_store import ObjectStore
from helpers.tables import note_stores


def save(folder: Path, files: list[list[int]], schema: pa.Schema | None = None) -> int:
    """Write a folder as `save_to_disk` does, with record batches of these rows; return the number of rows."""
    folder.mkdir(parents=True)
    first, names = 0, []
    for place, sizes in enumerate(files):
        names.append(f"data-{place:05}-of-{len(files):05}.arrow")
        kind = schema or pa.schema([("row", pa.int64()), ("text", pa.string()), ("x", pa.list_(pa.float32()))])
        with pa.OSFile(str(folder / names[-1]), "wb") as sink, pa.ipc.new_stream(sink, kind) as writer:
            for rows in sizes:
                numbers = range(first, first + rows)
                columns = {"row": numbers, "text": map(str, numbers), "x": [[number] * 3 for number in numbers]}
                writer.write_batch(
                    pa.record_batch(
                        [pa.array(list(columns[name]), kind.field(name).type) for name in kind.names], schema=kind
                    )
                )
                first += rows
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "x", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return first


def test_a_store_is_opened_once_to_find_and_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "saved", [[5]])
    opened = note_stores(monkeypatch)
    ParquetSource(str(tmp_path / "saved"))
    assert opened == [str(tmp_path / "saved")]


def test_rows_are_those_of_all_streams_on_any_number_of_ranks(tmp_path: Path) -> None:
    total = save(tmp_path / "saved", [[5, 0, 7], [], [1000, 1]])
    (tmp_path / "saved" / "cache-1234.arrow").write_bytes(b"left behind by map()")
    source = ParquetSource(str(tmp_path / "saved"))
    assert [group.rows for group in source.row_groups] == [5, 0, 7, 1000, 1]
    for size in (1, 3):
        batches = [
            batch
            for rank in range(size)
            for batch in Loader(source, batch_size=64, policy="join", rank=rank, size=size)
        ]
        rows = [
            (row, text, x)
            for batch in batches
            for row, text, x in zip(*(batch[name].tolist() for name in ("row", "text", "x")), strict=True)
        ]  # type: ignore[union-attr]
        assert sorted(rows) == [(row, str(row), [float(row)] * 3) for row in range(total)]


def test_folders_that_cannot_be_read_rightly_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "both" / "train", [[3]])
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(SourceError, match="holds the splits train, test; name the folder of one of them"):
        ParquetSource(str(tmp_path / "both"))
    with pytest.raises(ConfigError, match="version: is that of a table"):
        ParquetSource(str(tmp_path / "both" / "train"), version=1)
    state = json.loads((tmp_path / "both" / "train" / "state.json").read_text())
    (tmp_path / "both" / "train" / "state.json").write_text(
        json.dumps(state | {"_indices_data_files": [{"filename": "i"}]})
    )
    with pytest.raises(SourceError, match="chooses rows by indices"):
        SavedDataset(str(tmp_path / "both" / "train"))
    save(tmp_path / "words", [[3]], pa.schema([("text", pa.dictionary(pa.int32(), pa.string()))]))
    with pytest.raises(DataError, match="column 'text': is encoded with a dictionary"):
        SavedDataset(str(tmp_path / "words"))


def test_a_stream_that_was_cut_short_is_named(tmp_path: Path) -> None:
    save(tmp_path / "saved", [[500, 500]])
    file = tmp_path / "saved" / "data-00000-of-00001.arrow"
    whole = file.read_bytes()
    for length in (len(whole) // 2, len(whole) - 20, len(whole) - 8, 30):
        file.write_bytes(whole[:length])
        with pytest.raises(SourceError, match=r"data-00000-of-00001.arrow: is (cut short|no whole Arrow stream)"):
            SavedDataset(str(tmp_path / "saved"))


def test_a_stream_that_changes_is_named(tmp_path: Path) -> None:
    save(tmp_path / "saved", [[500, 500]])
    loader = Loader(SavedDataset(str(tmp_path / "saved")), batch_size=10, policy="drop")
    file = tmp_path / "saved" / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(SourceError, match=r"data-00000-of-00001.arrow: has changed"):
        list(loader)
    assert loader.epoch == 0


def test_the_files_of_a_store_are_opened_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("botocore")
    rows = save(tmp_path / "far", [[2]] * 6)
    with ObjectStore.serving(tmp_path / "far", latency=0.02) as store:
        source = SavedDataset("s3://bucket/data", options=store.options)
        assert sum(group.rows for group in source.row_groups) == rows
        assert store.most_at_once >= 3
