"""Functions of the native core that read files and copy rows."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole._native import copy_rows, read_files


def test_parts_of_files_are_read_together(tmp_path: Path) -> None:
    path, empty = str(tmp_path / "na\udcffme"), str(tmp_path / "empty")
    Path(path).write_bytes(bytes(range(100)))
    Path(empty).touch()
    os.utime(path, ns=(1, 1_700_000_000_123_456_789))
    ranges = [(0, 100), (10, 11), (90, 200), (100, 101), (5, 5), (9, 3)]
    found = read_files([*((path, first, last) for first, last in ranges), (empty, 0, 10)])
    assert not any(isinstance(each, OSError) for each in found)
    assert [each[0] for each in found] == [*(bytes(range(100))[first:last] for first, last in ranges), b""]  # type: ignore[index]
    assert [each[1:] for each in found[:-1]] == [(100, 1_700_000_000_123_456_789)] * 6  # type: ignore[index]
    assert found[-1][1] == 0  # type: ignore[index]
    assert read_files([]) == []


def test_a_file_that_cannot_be_read_does_not_keep_others_from_being_read(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(b"abc")
    missing, folder, good = read_files([(str(tmp_path / name), 0, 3) for name in ("missing", "", "good")])
    assert isinstance(missing, FileNotFoundError) and missing.filename == str(tmp_path / "missing")
    assert isinstance(folder, IsADirectoryError) and folder.errno == errno.EISDIR
    assert good[0] == b"abc"  # type: ignore[index]
    with pytest.raises(ValueError, match="null byte"):
        read_files([("a\0b", 0, 1)])
    assert not [each for each in os.listdir("/proc/self/fd") if str(tmp_path) in _target(each)]


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # the descriptor of the listing itself
        return ""


@given(st.lists(st.binary(max_size=40)))
def test_rows_are_copied_one_after_the_other(rows: list[bytes]) -> None:
    target = np.zeros(sum(map(len, rows)), np.uint8)
    copy_rows(target, rows)
    assert target.tobytes() == b"".join(rows)


def test_rows_of_another_length_or_order_are_refused() -> None:
    target = np.zeros((2, 3), np.int32)
    for rows in ([np.zeros(3, np.int32)], [np.zeros(7, np.int32)]):
        with pytest.raises(ValueError, match="the rows are not as long as the target"):
            copy_rows(target, rows)
    with pytest.raises(ValueError, match="not C-contiguous"):
        copy_rows(target, [np.zeros((3, 2), np.int32).T])
    with pytest.raises(ValueError, match=r"read-only|not writeable"):
        copy_rows(np.frombuffer(bytes(24), np.int32), [target])
    with pytest.raises(TypeError):
        copy_rows(target, [1])
