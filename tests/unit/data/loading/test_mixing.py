"""Windows of rows: how well they mix sorted rows, that they may lie in files, and that an order stays what it is."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import FieldOptions, Loader, ParquetSource, Ragged, Reading, make_batch_reader
from farandole.errors import CacheError, ConfigError
from helpers.datasets import write_rows

LABELS, GROUP = 10, 1000


def write_sorted(folder: Path, width: int) -> int:
    """Write two row groups of rows sorted by label, with `width` bytes more each; return the number of rows."""
    rows = 2 * GROUP
    column = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(rows * width, np.uint8)), width)
    table = pa.table({"row": np.arange(rows), "label": np.arange(rows) // (rows // LABELS), "x": column})
    pq.write_table(table, folder / "rows.parquet", row_group_size=GROUP)
    return rows


def labels_of(folder: Path, reading: Reading) -> list[int]:
    loader = Loader(ParquetSource(str(folder)), batch_size=100, policy="join", reading=reading)
    return [len(np.unique(np.asarray(batch["label"]))) for batch in loader]


def test_batches_of_sorted_rows_have_all_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table stands for one of 60 MB per row group: rounds and windows are a thousandth of the usual ones."""
    write_sorted(tmp_path, 64)
    monkeypatch.setattr("farandole.data.loading.loader.ROUND_BYTES", 4 << 10)
    assert min(labels_of(tmp_path, Reading(shuffle_bytes=512 << 10))) >= 9
    assert np.mean(labels_of(tmp_path, Reading(shuffle_bytes=4 << 10))) < 3
    assert min(labels_of(tmp_path, Reading(shuffle_bytes=4 << 10, shuffle_window=2 * GROUP))) >= 9


def test_windows_smaller_than_a_row_group_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_sorted(tmp_path, 16)
    told = f"fewer than the {GROUP} of a row group"
    labels_of(tmp_path, Reading())
    assert told not in caplog.text
    labels_of(tmp_path, Reading(shuffle_window=GROUP - 1))
    assert f"{GROUP - 1} rows are shuffled together, {told}" in caplog.text


def write_kinds(folder: Path) -> None:
    """Write rows with arrays, lists of different lengths, texts, and rows that are large."""
    for file in range(3):
        rows = range(file * 40, file * 40 + 40)
        columns = {
            "row": rows,
            "array": [[float(row)] * 3 for row in rows],
            "ragged": [[row] * (row % 4) for row in rows],
            "text": [str(row) for row in rows],
            "large": [[row] * (16 << 7) for row in rows],
        }
        pq.write_table(pa.table(columns), folder / f"{file}.parquet", row_group_size=20)


def read(folder: Path, reading: Reading, size: int = 1, state: dict[str, int] | None = None, steps: int = 99) -> Any:
    """Return the cells of each rank's rows from `state` on, for `steps` steps, and the state after them."""
    found: list[Any] = []
    for rank in range(size):
        loader = Loader(
            ParquetSource(str(folder)), batch_size=12 // size, policy="join", rank=rank, size=size, reading=reading
        )
        if state is not None:
            loader.load_state_dict(state)
        batches: Any = iter(loader)
        for number, batch in enumerate(batches):
            ragged = [each.tolist() for each in batch["ragged"].rows()]
            cells = zip(*(batch[name].tolist() for name in ("row", "array", "text", "large")), ragged, strict=True)
            found += [(number, cell) for cell in cells]
            if number + 1 == steps:
                break
        batches.close()
    return found, loader.state_dict()


FIELDS = FieldOptions(ragged=["ragged"])
READINGS = {
    "pieces": Reading(shuffle_window=90, lanes=2, fields=FIELDS),
    "in files": Reading(shuffle_window=90, lanes=2, memory=0, fields=FIELDS),
    "in files, from processes": Reading(shuffle_window=90, lanes=2, memory=0, processes=True, workers=1, fields=FIELDS),
    "in order": Reading(shuffle_window=50, lanes=2, shuffle_row_groups=False, memory=0, fields=FIELDS),
}


@pytest.mark.parametrize("kind", READINGS)
def test_rows_of_large_windows_come_whole_and_in_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    write_kinds(tmp_path)
    at_once, _ = read(tmp_path, READINGS[kind])
    assert sorted(cell[0] for _, cell in at_once) == list(range(120))
    assert all(
        (array, text, set(large), ragged) == ([row] * 3, str(row), {row}, [row] * (row % 4))
        for _, (row, array, text, large, ragged) in at_once
    )
    monkeypatch.setattr("farandole.data.loading.reading.ROUND_BYTES", 9000)  # pieces of a row
    assert read(tmp_path, READINGS[kind])[0] == at_once
    # In the middle of a window, with other numbers of ranks.
    begun, state = read(tmp_path, replace(READINGS[kind], processes=False), size=2, steps=4)
    rest, _ = read(tmp_path, READINGS["pieces"], size=3, state=state)
    assert sorted(begun + [(number + 4, cell) for number, cell in rest]) == sorted(at_once)


def test_rows_in_files_leave_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, scratch = tmp_path / "data", tmp_path / "scratch"
    data.mkdir()
    scratch.mkdir()
    write_rows(data, [[40, 40]])
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    loader = Loader(ParquetSource(str(data)), batch_size=8, policy="join", reading=Reading(memory=0))
    for _ in loader:
        assert not list(scratch.iterdir())


def test_a_full_disk_is_told_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_rows(tmp_path, [[40, 40]])
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(CacheError, match=r"No space left on device.*TMPDIR.*shuffle_bytes"):
        list(Loader(ParquetSource(str(tmp_path)), batch_size=8, policy="join", reading=Reading(memory=0)))


def test_a_window_is_set_once() -> None:
    with pytest.raises(ConfigError, match="window: is shuffle_window divided by the number of lanes"):
        Reading(window=5, shuffle_window=10)


def test_petastorms_capacity_is_the_least_window(tmp_path: Path) -> None:
    write_rows(tmp_path, [[1000] * 3])
    with make_batch_reader(str(tmp_path), reading=Reading(shuffle_window=7, lanes=1)) as reader:
        for capacity, window in ((5, 7), (50, 50), (8, 50)):
            reader.loader.shuffle_within(capacity)
            state = reader.loader.state_dict()
            assert (state["window"], state["permuted"]) == (window, 1)
        next(reader)
        reader.loader.shuffle_within(60)  # the epoch has begun
        assert reader.loader.state_dict()["window"] == 50


def test_shuffled_rows_are_of_their_row_groups_if_these_are_not_shuffled(tmp_path: Path) -> None:
    write_rows(tmp_path, [[100] * 10])
    reading = Reading(shuffle_window=200)
    with make_batch_reader(str(tmp_path), shuffle_rows=True, shuffle_row_groups=False, reading=reading) as reader:
        rows = np.concatenate([batch.row for batch in reader])
    assert rows.tolist() != list(range(1000))
    assert np.abs(rows - np.arange(1000)).max() < 200


@pytest.mark.parametrize("odd", [None, 2499], ids=["null", "shorter"])
def test_a_transform_gets_odd_rows_also_where_large_rounds_are_copied_in_pieces(
    odd: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farandole.data.loading.reading.ROUND_BYTES", 1 << 15)  # pieces of 3 of the 80 rows
    width, rows = 2500, 80  # rows of 10 KB stand loose
    cells: list[list[float] | None] = [[float(row)] * width for row in range(rows)]
    cells[25] = None if odd is None else [25.0] * odd
    table = pa.table({"row": np.arange(rows), "x": pa.array(cells, pa.list_(pa.float32()))})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=10, use_dictionary=False, compression="none")

    def padded(columns: dict[str, Any]) -> dict[str, Any]:
        given = columns["x"].rows() if isinstance(columns["x"], Ragged) else columns["x"]
        made = np.zeros((len(columns["row"]), width), np.float32)
        for place, cell in enumerate(given):
            if cell is not None:
                made[place, : len(cell)] = cell
        return {**columns, "x": made}

    reading = Reading(transform=padded, shuffle_window=rows)
    found = {}
    for batch in Loader(ParquetSource(str(tmp_path)), batch_size=10, policy="join", reading=reading):
        found |= dict(zip(np.asarray(batch["row"]).tolist(), np.asarray(batch["x"]).sum(axis=1).tolist(), strict=True))
    assert found == {row: (0.0 if odd is None else 25.0 * odd) if row == 25 else 2500.0 * row for row in range(rows)}
