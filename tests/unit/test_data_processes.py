"""Row groups read and transformed in processes."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

import pandas as pd

from farandole.data import FeedLoader, Loader, ParquetSource, Reading, make_batch_reader
from farandole.data.rounds import Columns
from farandole.data.transform import TransformSpec
from farandole.errors import ConfigError, DataError, SourceError
from helpers.datasets import RAGGED, write_rows

ROWS = 122


class Odd(Exception):
    """Cannot be unpickled: it wants two arguments."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one)


def loader_of(folder: Path, transform: Callable[[Columns], Columns] | None, **settings: Any) -> Loader:
    reading = Reading(transform=transform, **{"processes": True, "workers": 1, **settings})
    return Loader(ParquetSource(str(folder)), batch_size=20, policy="join", reading=reading)


@pytest.mark.parametrize("shuffle", [True, False])
def test_processes_and_threads_give_the_same_batches(tmp_path: Path, shuffle: bool) -> None:
    write_rows(tmp_path, RAGGED["ragged"])

    def transform(columns: Columns) -> Columns:
        rows = np.asarray(columns["row"])
        return {
            "row": rows,
            "pair": np.stack([rows, -rows], axis=1),
            "text": np.array([str(row) for row in rows], object),
            "here": np.full(len(rows), os.getpid()),
        }

    seen = []
    for processes in (False, True):
        loader = loader_of(tmp_path, transform, processes=processes, workers=2, shuffle=shuffle)
        batches = list(loader)
        pids = {int(pid) for batch in batches for pid in np.asarray(batch.pop("here"))}
        assert (os.getpid() in pids) != processes and len(pids) <= 2
        for batch in batches:
            batch["pair"][:] += 1  # type: ignore[index,operator]  # its memory is the batch's own
        seen.append([{name: np.asarray(values).tolist() for name, values in batch.items()} for batch in batches])
    assert seen[0] == seen[1]


def die(columns: Columns) -> Columns:
    os.kill(os.getpid(), signal.SIGKILL)
    return columns


def break_oddly(columns: Columns) -> Columns:
    raise Odd("one", "other")


def refuse(columns: Columns) -> Columns:
    raise DataError("row", "is not to my taste")


@pytest.mark.parametrize(
    ("transform", "error", "text"),
    [
        (die, SourceError, r"row group 0 of .*part-000.parquet: the process that read it ended \(signal 9\)"),
        (break_oddly, RuntimeError, "Odd: one"),
        (refuse, DataError, "column 'row': is not to my taste"),
        (lambda columns: {"row": columns["row"][:1]}, DataError, "the transform made 1 rows of 5"),
    ],
)
def test_what_goes_wrong_there_is_raised_here(
    tmp_path: Path, transform: Callable[[Columns], Columns], error: type[Exception], text: str
) -> None:
    write_rows(tmp_path, [[5]])
    loader = loader_of(tmp_path, transform)
    with pytest.raises(error, match=text):
        list(loader)
    assert loader.epoch == 0


def test_an_epoch_that_is_left_leaves_no_process(tmp_path: Path) -> None:
    write_rows(tmp_path, RAGGED["many small"])
    loader = loader_of(tmp_path, None, lanes=2, window=4)
    next(iter(loader))  # the police looks for its children
    rest = [int(row) for batch in loader for row in np.asarray(batch["row"])]
    assert len(rest) == loader.rows - 20


def double(frame: pd.DataFrame) -> pd.DataFrame:
    frame["pid"] = os.getpid()
    return frame


def test_readers_take_processes_for_transforms(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_rows(tmp_path, RAGGED["ragged"])
    spec = TransformSpec(double)
    with make_batch_reader(str(tmp_path), transform_spec=spec, reader_pool_type="process", workers_count=1) as reader:
        batches = list(reader)
    assert sorted(int(row) for batch in batches for row in batch.row) == list(range(ROWS))
    assert all(os.getpid() not in batch.pid for batch in batches)
    assert not caplog.text


def test_settings_without_meaning_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="processes: are as many as there are workers"):
        Reading(processes=True, workers=0)
    write_rows(tmp_path, [[5]])
    with pytest.raises(ConfigError, match="processes: cannot read what only this process has"):
        FeedLoader(ParquetSource(str(tmp_path)), batch_size=1, policy="join", reading=Reading(processes=True))
