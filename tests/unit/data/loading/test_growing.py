"""Data that is still arriving: each row once on equal steps, with kills, other numbers of ranks, and late files."""

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from farandole.data import CachedSource, Growing, GrowingLoader, Reading, SelectedSource
from farandole.data.formats.file_systems import Files
from farandole.errors import ConfigError, DataError, SourceError
from helpers.meeting import Meeting
from helpers.tables import note_stores, start_deltalake

QUIET = Reading(workers=0, ahead=0)


class Writer:
    """Adds the files of the next moment to a folder whenever the folder is looked at."""

    def __init__(self, folder: Path, moments: Sequence[Sequence[int]]) -> None:
        self.folder, self._moments = folder, list(moments)
        self.rows = self._files = 0

    def __call__(self, paths: Sequence[str]) -> bool:
        """Return whether `paths` are all files; as `until`."""
        ended = not self._moments and len(paths) == self._files
        for count in self._moments.pop(0) if self._moments else ():
            self.add(count)
        return ended

    def add(self, count: int, name: str = "") -> None:
        rows = pa.table({"row": pa.array(range(self.rows, self.rows + count), pa.int64())})
        unfinished = self.folder / "_unfinished"
        pq.write_table(rows, unfinished, row_group_size=3)
        # Names are in no order of time.
        unfinished.rename(self.folder / (name or f"{(self._files * 7) % 10}-{self._files}.parquet"))
        self.rows, self._files = self.rows + count, self._files + 1


def loader_of(folder: Path | str, until: Any, rank: int = 0, size: int = 1, **how: Any) -> GrowingLoader:
    growing = how.pop("growing", None) or Growing(str(folder), until=until, poll=0, patience=5)
    return GrowingLoader(growing, **({"batch_size": 2, "rank": rank, "size": size, "reading": QUIET} | how))


def in_ranks(size: int, body: Callable[[int, Any], Any]) -> list[Any]:
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: body(rank, meeting.of(rank)), range(size)))


def rows_of(batches: Any) -> list[int]:
    return [row for batch in batches for row in batch["row"].tolist()]


@settings(max_examples=25, deadline=None)
@given(
    moments=st.lists(st.lists(st.integers(0, 8), max_size=3), min_size=1, max_size=4).filter(
        lambda moments: any(map(any, moments))
    ),
    jobs=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(0, 4)), max_size=3),
)
def test_each_row_once_with_kills_and_other_numbers_of_ranks(
    moments: list[list[int]], jobs: list[tuple[int, int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder), moments)
        seen: list[int] = []
        state: Any = None
        for size, batch_size, most_steps in [*jobs, (2, 3, 9999)]:

            def read(rank: int, gather: Any) -> tuple[list[list[int]], str]:
                how: dict[str, Any] = {"batch_size": batch_size, "gather": gather, "state": state}  # noqa: B023
                loader = loader_of(folder, writer, rank, size, **how)  # noqa: B023
                batches = [batch["row"].tolist() for _, batch in zip(range(most_steps), loader, strict=False)]  # noqa: B023
                return batches, json.dumps(loader.state_dict())

            told = in_ranks(size, read)
            assert len({len(batches) for batches, _ in told}) == 1, "steps differ"
            assert len({text for _, text in told}) == 1, "states differ"
            seen += [row for batches, _ in told for batch in batches for row in batch]
            state = json.loads(told[0][1])
        assert sorted(seen) == list(range(writer.rows))


def test_training_begins_before_all_data_is_there(tmp_path: Path) -> None:
    writer = Writer(tmp_path, [])
    writer.add(4)
    loader = loader_of(tmp_path, "_DONE")
    batches = iter(loader)
    first = [next(batches)["row"].tolist(), next(batches)["row"].tolist()]
    assert sorted(first[0] + first[1]) == [0, 1, 2, 3]
    later = threading.Timer(0.05, lambda: (writer.add(3), (tmp_path / "_DONE").touch()))
    later.start()
    assert sorted(rows_of(batches)) == [4, 5, 6]
    later.join()
    assert list(loader) == []
    with pytest.raises(TypeError, match="number of steps is not known"):
        len(loader)


def test_a_folder_may_come_later_than_its_readers(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    later = threading.Timer(0.05, lambda: (folder.mkdir(), Writer(folder, []).add(3), (folder / "_DONE").touch()))
    later.start()
    assert sorted(rows_of(loader_of(folder, "_DONE"))) == [0, 1, 2]
    later.join()


@pytest.mark.parametrize("owner, name", [(LocalFileSystem, "exists"), (os.path, "isdir")], ids=["exists", "isdir"])
def test_a_folder_may_come_while_it_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    folder, look = tmp_path / "later", getattr(owner, name)

    def make_after_look(*place: Any) -> bool:
        found = bool(look(*place))
        if place[-1] == str(folder):
            folder.mkdir(exist_ok=True)
        return found

    monkeypatch.setattr(owner, name, make_after_look)
    files, listed, _ = Files.find(str(folder), ".parquet", growing=True)
    assert files.local
    assert listed == []
    assert folder.is_dir()


def test_nothing_new_ends_in_an_error_and_no_row_at_all_in_another(tmp_path: Path) -> None:
    writer = Writer(tmp_path, [])
    with pytest.raises(SourceError, match=r"has no new files since 0 s, and has not ended"):
        loader_of(tmp_path, None, growing=Growing(str(tmp_path), poll=0.01, patience=0.03))
    writer.add(0)
    with pytest.raises(DataError, match="has ended without a row"):
        loader_of(tmp_path, lambda paths: True)


def test_least_files_are_waited_for(tmp_path: Path) -> None:
    writer = Writer(tmp_path, [[1], [1], [1], [1], [1], []])
    growing = Growing(str(tmp_path), until=writer, least_files=2, poll=0, patience=5)
    loader = loader_of(tmp_path, None, growing=growing, batch_size=9)
    assert [len(batch["row"]) for batch in loader] == [2, 2, 1]


def test_too_few_new_files_end_in_an_error_that_says_so(tmp_path: Path) -> None:
    Writer(tmp_path, []).add(1)
    growing = Growing(str(tmp_path), least_files=2, poll=0.01, patience=0.03)
    with pytest.raises(SourceError, match=r"has fewer than 2 new files since 0 s, .* or lower least_files"):
        loader_of(tmp_path, None, growing=growing)


def test_rows_that_change_are_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path, [])
    writer.add(4, "a.parquet")
    batches = iter(loader_of(tmp_path, "_DONE", batch_size=4))
    next(batches)
    writer.add(9, "a.parquet")
    with pytest.raises(SourceError, match=r"a.parquet: has changed after its rows were read"):
        next(batches)
    writer.add(4, "b.parquet")
    batches = iter(loader_of(tmp_path, "_DONE", batch_size=99))
    next(batches)
    pq.write_table(pa.table({"row": ["x"]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"generation 1 has columns row str.*, those before have row int64"):
        next(batches)


def test_rows_are_chosen_and_cached_within_a_limit(tmp_path: Path) -> None:
    writer = Writer(tmp_path, [[30], [30], [30]])
    cache = tmp_path / "cache"

    def wrap(source: Any) -> Any:
        return SelectedSource(CachedSource(source, cache, 1500), [("row", ">=", 40)])

    assert sorted(rows_of(loader_of(tmp_path, writer, wrap=wrap))) == list(range(40, 90))
    assert 0 < sum(path.stat().st_size for path in cache.iterdir()) < 5000


def test_a_state_without_rows_by_another_condition_is_refused(tmp_path: Path) -> None:
    writer = Writer(tmp_path, [[6], [6], []])
    batches = iter(loader := loader_of(tmp_path, writer))
    rows_of(batch for _, batch in zip(range(4), batches, strict=False))
    state = loader.state_dict()
    assert state["generation"] == 1

    def wrap(source: Any) -> Any:
        return SelectedSource(source, [("row", "<", 6)])

    other = loader_of(tmp_path, "_DONE", wrap=wrap)
    for load in (lambda: other.load_state_dict(state), lambda: loader_of(tmp_path, "_DONE", wrap=wrap, state=state)):
        with pytest.raises(ConfigError, match=r"belongs to other data: `wrap` chooses no row of its generation 1"):
            load()


def test_settings_that_lose_rows_are_refused(tmp_path: Path) -> None:
    growing = Growing(str(tmp_path))
    for problem, how in (
        ("'drop' would leave out rows", {"policy": "drop"}),
        ("is needed", {"size": 2}),
        ("of a GrowingLoader holds", {"state": {"epoch": 1}}),
    ):
        with pytest.raises(ConfigError, match=problem):
            loader_of(tmp_path, None, growing=growing, **how)
    for how in ({"format": "csv"}, {"format": "images"}, {"least_files": 0}, {"until": 3, "format": "iceberg"}):
        with pytest.raises(ConfigError):
            Growing(str(tmp_path), **how)  # type: ignore[arg-type]
    Writer(tmp_path, []).add(4)
    loader = loader_of(tmp_path, lambda paths: True)
    with pytest.raises(ConfigError, match="cannot be chosen"):
        loader.set_epoch(3)


def test_samples_arrive(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.jsonl").write_text("".join(f'{{"row": {3 * number + each}}}\n' for each in range(3)))
    growing = Growing(str(tmp_path), format="jsonl", until=lambda paths: len(paths) == 4, poll=0)
    assert sorted(rows_of(loader_of(tmp_path, None, growing=growing))) == list(range(12))


@pytest.fixture(scope="module")
def deltalake() -> Any:
    """Start deltalake before a test that counts threads and descriptors."""
    found = pytest.importorskip("deltalake")
    start_deltalake()
    return found


def test_a_delta_table_grows_until_a_version(tmp_path: Path, deltalake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url, stores = str(tmp_path / "events"), note_stores(monkeypatch)

    def write(first: int, **how: Any) -> None:
        deltalake.write_deltalake(url, pa.table({"row": range(first, first + 3)}), mode="append", **how)

    write(0)
    batches = iter(loader_of(url, 2, batch_size=3))
    assert sorted(next(batches)["row"].tolist()) == [0, 1, 2]
    for first in (3, 6, 9):  # of which the last version is not read
        write(first)
    assert sorted(rows_of(batches)) == [3, 4, 5, 6, 7, 8]
    assert stores == [url], "each look connects anew"
    batches = iter(loader_of(url, 9, batch_size=99))
    next(batches)
    deltalake.DeltaTable(url).delete("row = 4")
    with pytest.raises(SourceError, match=r"version 4 has removed or rewritten files"):
        next(batches)


def test_waiting_ranks_sleep_between_looks(tmp_path: Path) -> None:
    Writer(tmp_path, []).add(1)
    looks: list[float] = []
    growing = Growing(str(tmp_path), until=lambda paths: bool(looks.append(time.monotonic())), poll=0.02, patience=0.1)
    with pytest.raises(SourceError, match="no new files"):
        list(loader_of(tmp_path, None, growing=growing))
    assert 3 <= len(looks) <= 8
