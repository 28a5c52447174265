"""Row groups on local disk: read once, within a limit; and columns that folders' names tell."""

import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import CachedSource, Loader, ParquetSource, SelectedSource, Source, files
from farandole.data.formats.row_groups import RowGroup
from farandole.data.formats.sample_formats import Decode
from farandole.errors import CacheError, ConfigError, SourceError
from helpers.datasets import write_rows

LAYOUT = [[100, 100], [100, 100, 100]]


class Counting(ParquetSource):
    """Counts how often row groups are read from the files."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.reads = 0

    def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
        self.reads += 1
        return super().read(row_group, columns)


def read(source: Source) -> list[int]:
    loader = Loader(source, batch_size=50, policy="join")
    return [int(row) for _ in range(3) for batch in loader for row in batch["row"]]


def held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_row_groups_are_read_once(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "data", LAYOUT)
    source = Counting(str(tmp_path / "data"))
    expected = [*range(rows)] * 3
    assert sorted(read(CachedSource(source, tmp_path / "cache", 1 << 20))) == sorted(expected)
    assert source.reads == 5
    # Another job finds what the first one left, and the same rows as without a cache. It may name the folder by a text.
    assert read(CachedSource(source, str(tmp_path / "cache"), 1 << 20)) == read(Counting(str(tmp_path / "data")))
    assert source.reads == 5


def test_a_clock_that_jumps_while_a_row_group_is_written_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = write_rows(tmp_path / "data", LAYOUT)
    source, folder = Counting(str(tmp_path / "data")), tmp_path / "cache"
    cached = CachedSource(source, folder, 1 << 20)
    move, now = os.replace, time.time()

    def jump(name: str, path: Path) -> None:
        monkeypatch.setattr("time.time", lambda: now + 7200.0)
        CachedSource(source, folder, 1 << 20)  # of another rank, which takes the file for one that is left behind
        monkeypatch.setattr("os.replace", move)
        move(name, path)

    monkeypatch.setattr("os.replace", jump)
    assert sorted(read(cached)) == sorted([*range(rows)] * 3)
    assert "was removed before it was complete" in caplog.text


def test_a_file_that_another_rank_completes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "data", LAYOUT)
    source, folder = Counting(str(tmp_path / "data")), tmp_path / "cache"
    folder.mkdir()
    left = folder / ".unfinished-of-another-rank"
    left.touch()
    listed = Path.glob

    def complete(where: Path, pattern: str) -> list[Path]:
        found = list(listed(where, pattern))
        left.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "glob", complete)
    CachedSource(source, folder, 1 << 20)
    assert not left.exists()


def test_the_limit_holds_and_the_longest_unused_goes(tmp_path: Path) -> None:
    write_rows(tmp_path / "data", LAYOUT)
    source = Counting(str(tmp_path / "data"))
    one = held_by_one(source, tmp_path / "one")
    cached = CachedSource(source, tmp_path / "cache", int(2.5 * one))
    first, second, third = source.row_groups[:3]
    for place, group in enumerate((first, second)):
        cached.read(group, ["row"])
        newest = max((tmp_path / "cache").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (1000 + place, 1000 + place))
    cached.read(first, ["row"])  # used again: the second is older now
    cached.read(third, ["row"])
    assert held(tmp_path / "cache") <= 2.5 * one
    before = source.reads
    cached.read(first, ["row"])
    assert source.reads == before
    cached.read(second, ["row"])
    assert source.reads == before + 1


def test_storing_many_row_groups_lists_the_folder_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, listed, listings = write_rows(tmp_path / "data", [[1] * 100]), os.scandir, 0

    def scandir(path: str) -> object:
        nonlocal listings
        listings += 1
        return listed(path)

    cached = CachedSource(ParquetSource(str(tmp_path / "data")), tmp_path / "cache", 1 << 30)
    monkeypatch.setattr("os.scandir", scandir)
    for group in cached.row_groups:
        cached.read(group, ["row"])
    assert listings <= 2
    assert len(list((tmp_path / "cache").iterdir())) == rows


def test_the_limit_holds_with_many_row_groups(tmp_path: Path) -> None:
    write_rows(tmp_path / "data", [[1] * 400])
    source = ParquetSource(str(tmp_path / "data"))
    one = held_by_one(source, tmp_path / "one")
    limit = 300 * one
    cached = CachedSource(source, tmp_path / "cache", limit)
    for group in cached.row_groups:
        cached.read(group, ["row"])
    assert limit * 0.98 < held(tmp_path / "cache") <= limit + one


def held_by_one(source: Source, folder: Path) -> int:
    CachedSource(source, folder, 1 << 20).read(source.row_groups[0], ["row"])
    return held(folder)


def test_what_exceeds_the_limit_alone_is_not_kept(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "data", LAYOUT)
    assert sorted(set(read(CachedSource(ParquetSource(str(tmp_path / "data")), tmp_path / "cache", 10)))) == [
        *range(rows)
    ]
    assert held(tmp_path / "cache") == 0


def test_a_full_disk_is_named_and_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "data", LAYOUT)
    cached = CachedSource(ParquetSource(str(tmp_path / "data")), tmp_path / "cache", 1 << 20)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pa.ipc, "new_file", full)
    with pytest.raises(
        CacheError, match=r"cache .*/cache: cannot hold \d+ bytes more .*No space left.*lower its limit"
    ):
        read(cached)
    assert held(tmp_path / "cache") == 0


def test_a_damaged_file_of_the_cache_is_read_anew(tmp_path: Path) -> None:
    write_rows(tmp_path / "data", LAYOUT)
    source = Counting(str(tmp_path / "data"))
    expected = read(CachedSource(source, tmp_path / "cache", 1 << 20))
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(b"no arrow")
    assert read(CachedSource(source, tmp_path / "cache", 1 << 20)) == expected
    assert source.reads == 10


def test_a_flipped_bit_of_the_cache_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_rows(tmp_path / "data", LAYOUT)
    source = Counting(str(tmp_path / "data"))
    expected = read(CachedSource(source, tmp_path / "cache", 1 << 20))
    for place, path in enumerate(sorted((tmp_path / "cache").iterdir())):
        content = bytearray(path.read_bytes())
        content[(10, 70, len(content) // 2, len(content) - 300, len(content) - 1)[place]] ^= 4
        path.write_bytes(content)
    assert read(CachedSource(source, tmp_path / "cache", 1 << 20)) == expected
    assert source.reads == 10
    assert "its checksum does not match its content) and is read anew" in caplog.text
    assert read(CachedSource(source, tmp_path / "cache", 1 << 20)) == expected
    assert source.reads == 10


def test_the_checksums_of_parquet_pages_are_compared_if_asked(tmp_path: Path) -> None:
    path, rows = tmp_path / "1.parquet", range(1000, 2000)
    pq.write_table(pa.table({"row": rows}), path, write_page_checksum=True, compression="none", use_dictionary=False)
    content = path.read_bytes()
    place = content.index((1500).to_bytes(8, "little"))
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    assert 1500 not in read(ParquetSource(str(path)))
    with pytest.raises(SourceError, match=r"1.parquet: cannot be read: .*CRC"):
        read(ParquetSource(str(path), verify=True))
    path.write_bytes(content)
    assert sorted(read(ParquetSource(str(path), verify=True))) == sorted([*rows] * 3)


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def test_a_readable_file_of_another_user_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "data", LAYOUT)
    source = Counting(str(tmp_path / "data"))
    expected = read(CachedSource(source, tmp_path / "cache", 1 << 20))
    monkeypatch.setattr("os.utime", refuse)
    assert read(CachedSource(source, tmp_path / "cache", 1 << 20)) == expected
    assert source.reads == 5


def test_a_file_that_can_neither_be_read_nor_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "data", LAYOUT)
    cached = CachedSource(ParquetSource(str(tmp_path / "data")), tmp_path / "cache", 1 << 20)
    read(cached)
    monkeypatch.setattr(pa, "memory_map", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(CacheError, match=r"/cache: holds .*\.arrow, which can neither be read nor removed .*another"):
        read(cached)


def test_a_file_that_has_changed_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    write_rows(tmp_path / "data", LAYOUT)
    cached = CachedSource(ParquetSource(str(tmp_path / "data")), tmp_path / "cache", 1 << 20)
    read(cached)
    write_rows(tmp_path / "data", [[100, 99], [100, 100, 100]])
    with pytest.raises(SourceError, match="has changed"):
        read(cached)
    fresh = CachedSource(ParquetSource(str(tmp_path / "data")), tmp_path / "cache", 1 << 20)
    assert sorted(set(read(fresh))) == [*range(499)]


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "data", LAYOUT)
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="file/cache: cannot be used"):
        CachedSource(ParquetSource(str(tmp_path / "data")), tmp_path / "file" / "cache", 1)
    with pytest.raises(ConfigError, match="limit"):
        CachedSource(ParquetSource(str(tmp_path / "data")), tmp_path, 0)


def test_files_that_a_dead_job_left_unfinished_go(tmp_path: Path) -> None:
    write_rows(tmp_path / "data", LAYOUT)
    (tmp_path / "cache").mkdir()
    old, new = (tmp_path / "cache" / f".unfinished-{name}" for name in ("old", "new"))
    old.touch()
    new.touch()
    os.utime(old, (1000, 1000))
    CachedSource(ParquetSource(str(tmp_path / "data")), tmp_path / "cache", 1 << 20)
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize("kinds", [(pa.int32(), pa.int64()), (pa.int64(), pa.int32())])
def test_rows_that_were_cached_with_narrower_integers_are_not_taken(
    tmp_path: Path, kinds: tuple[pa.DataType, pa.DataType]
) -> None:
    """A file with wider integers is added after the other one was cached: both are read with the wider type."""
    for number, kind in enumerate(kinds):
        table = pa.table({"value": pa.array([number], kind)})
        pq.write_table(table, tmp_path / f"{number}.parquet")
        source = ParquetSource(str(tmp_path))
        cached = CachedSource(source, tmp_path / "cache", 1 << 20)
        for _ in range(2):
            kinds_read = {cached.read(group, ["value"]).schema.field("value").type for group in cached.row_groups}
            assert kinds_read == {source.schema.field("value").type}


def test_other_choices_of_the_same_rows_are_cached_apart(tmp_path: Path) -> None:
    write_rows(tmp_path / "data", [[50]])
    for where, expected in (([("row", "<", 25)], range(25)), ([("row", ">=", 25)], range(25, 50))):
        chosen = SelectedSource(ParquetSource(str(tmp_path / "data")), where)
        for source in (chosen, CachedSource(chosen, tmp_path / "other", 1 << 20)):
            cached = CachedSource(source, tmp_path / "cache", 1 << 20)
            assert cached.read(cached.row_groups[0], ["row"])["row"].to_pylist() == [*expected]


def scaled(factor: int) -> Decode:
    return lambda sample: {"row": factor * int(sample["text"])}


def test_results_of_other_functions_are_cached_apart(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("1\n2")
    for decode, expected in ((scaled(1), [1, 2]), (scaled(5), [5, 10]), (lambda sample: {"row": 0}, [0, 0])):
        cached = CachedSource(files(str(tmp_path / "1.txt"), decode=decode), tmp_path / "cache", 1 << 20)
        assert cached.read(cached.row_groups[0], ["row"])["row"].to_pylist() == expected
    assert len(list((tmp_path / "cache").iterdir())) == 3
    # The same function again, as in another job.
    decoded = files(str(tmp_path / "1.txt"), decode=scaled(5))
    CachedSource(decoded, tmp_path / "cache", 1 << 20).read(decoded.row_groups[0], ["row"])
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_windows_do_not_grow_when_whole_files_are_cached_or_selected(tmp_path: Path) -> None:
    (tmp_path / "1.bin").write_bytes(b"1")
    source = files(str(tmp_path / "1.bin"), format="bytes")
    cached = CachedSource(source, tmp_path / "cache", 1 << 20)
    for each in (source, cached, SelectedSource(cached, [("data", "=", b"1")])):
        assert each.least_window == 1


def test_a_function_that_cannot_be_told_from_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("1")
    lock = threading.Lock()

    def decode(sample: dict[str, Any]) -> dict[str, int]:
        with lock:
            return {"row": 1}

    with pytest.raises(ConfigError, match=r"decode: cannot be pickled .*lock.*; let it refer only to"):
        CachedSource(files(str(tmp_path / "1.txt"), decode=decode), tmp_path / "cache", 1 << 20)


def test_names_of_folders_tell_columns(tmp_path: Path) -> None:
    write_rows(tmp_path / "year=2023" / "site=a%20b", [[3]])
    write_rows(tmp_path / "year=2024" / "site=__HIVE_DEFAULT_PARTITION__", [[2]])
    source = ParquetSource(str(tmp_path))
    assert [(field.name, str(field.type)) for field in source.schema][1:] == [("year", "int64"), ("site", "string")]
    columns = ["year", "row"]
    (batch,) = Loader(source, batch_size=5, policy="join", columns=columns)
    assert list(batch) == columns
    pairs = zip(np.asarray(batch["year"]).tolist(), np.asarray(batch["row"]).tolist(), strict=True)
    assert sorted(pairs) == [(2023, 0), (2023, 1), (2023, 2), (2024, 0), (2024, 1)]
    assert source.read(source.row_groups[0], ["site"])["site"].to_pylist() == ["a b"] * 3
    assert source.read(source.row_groups[1], ["site"])["site"].to_pylist() == [None] * 2
