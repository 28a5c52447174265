"""Row groups read and transformed in processes."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pickle import PicklingError
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

import pandas as pd

from farandole.data import FeedLoader, Loader, ParquetSource, Reading, make_batch_reader
from farandole.data.loading import process_pool
from farandole.data.loading.batches import rows_of
from farandole.data.loading.rounds import Columns, Piece
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


def test_processes_and_threads_give_the_same_batches(tmp_path: Path) -> None:
    write_rows(tmp_path, RAGGED["ragged"])

    def transform(columns: Columns) -> Columns:
        rows = np.asarray(columns["row"])
        return {
            "row": rows,
            "pair": np.stack([rows, -rows], axis=1),
            "text": np.array([str(row) for row in rows], object),
            "here": np.full(len(rows), os.getpid()),
        }

    for shuffle in (True, False):
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


def texts(numbers: Sequence[int]) -> Iterator[Piece]:
    return ({"text": np.array([f"{number}" * 10_000], object)} for number in numbers)


def test_answers_larger_than_a_socket_s_memory_come_while_more_are_requested() -> None:
    pool = process_pool.ProcessPool(texts, 1, lambda _: 0, str)
    pending = [pool.submit(number) for number in range(1000)]
    assert pool.wait(pending, 60)
    for number, each in enumerate(pending):
        assert each.result()["text"][0] == f"{number}" * 10_000  # type: ignore[index]
    pool.close()


def die(columns: Columns) -> Columns:
    os.kill(os.getpid(), signal.SIGKILL)
    return columns


def break_oddly(columns: Columns) -> Columns:
    raise Odd("one", "other")


def refuse(columns: Columns) -> Columns:
    raise DataError("row", "is not to my taste")


def make_functions(columns: Columns) -> Columns:
    return {"row": np.array([lambda: None] * rows_of(columns), object)}


def refuse_to_load() -> Callable[[Columns], Columns]:
    raise ImportError("I am strange")


class Strange:
    """A transform that another process cannot load."""

    def __call__(self, columns: Columns) -> Columns:
        return columns

    def __reduce__(self) -> Any:
        return refuse_to_load, ()


# A transform, and the class and text of the error that it causes.
WRONG: list[tuple[Callable[[Columns], Columns], type[Exception] | tuple[type[Exception], ...], str]] = [
    (die, SourceError, r"row group 0 of .*part-000.parquet: the process that read it ended \(signal 9\)"),
    (break_oddly, RuntimeError, "Odd: one"),
    (make_functions, (AttributeError, PicklingError), "lambda"),  # by version of Python
    (Strange(), ImportError, "I am strange"),
    (refuse, DataError, "column 'row': is not to my taste"),
    (lambda columns: {"row": columns["row"][:1]}, DataError, "the transform made 1 rows of 5"),
]


def test_what_goes_wrong_there_is_raised_here(tmp_path: Path) -> None:
    write_rows(tmp_path, [[5]])
    for transform, error, text in WRONG:
        loader = loader_of(tmp_path, transform)
        with pytest.raises(error, match=text):
            list(loader)
        assert loader.epoch == 0


def test_the_rest_of_an_epoch_that_was_left(tmp_path: Path) -> None:
    write_rows(tmp_path, RAGGED["many small"])
    loader = loader_of(tmp_path, None, lanes=2, window=4)
    next(iter(loader))
    rest = [int(row) for batch in loader for row in np.asarray(batch["row"])]
    assert len(rest) == loader.rows - 20


def mark(columns: Columns) -> Columns:
    return {"row": columns["row"], "pid": np.full(rows_of(columns), os.getpid())}


def pids_of(loader: Loader) -> set[int]:
    return {int(pid) for batch in loader for pid in np.asarray(batch["pid"])}


def test_processes_are_used_again_unless_they_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path, [[5]])
    loader = loader_of(tmp_path, mark)
    (first,) = pids_of(loader)
    assert pids_of(loader) == pids_of(loader_of(tmp_path, lambda columns: mark(columns))) == {first}
    os.kill(first, signal.SIGKILL)
    monkeypatch.setattr(process_pool, "_IDLE", 0.1)
    (second,) = pids_of(loader)
    os.waitid(os.P_PID, second, os.WEXITED | os.WNOWAIT)  # it had nothing to do
    assert pids_of(loader).isdisjoint({first, second})


def test_a_forked_process_leaves_them_to_its_parent(tmp_path: Path) -> None:
    write_rows(tmp_path, [[5]])
    loader = loader_of(tmp_path, mark)
    before = pids_of(loader)
    child = os.fork()
    if child == 0:
        process_pool.end_idle()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert pids_of(loader) == before


def test_a_process_that_hangs_is_killed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path, [[5], [5]])
    monkeypatch.setattr(process_pool, "_PATIENCE", 0.1)
    hangs = tmp_path / "hangs"

    def hang(columns: Columns) -> Columns:
        if 5 in np.asarray(columns["row"]):
            hangs.touch()
            time.sleep(600)
        return mark(columns)

    batches = iter(
        Loader(
            ParquetSource(str(tmp_path)),
            batch_size=5,
            policy="join",
            reading=Reading(transform=hang, processes=True, workers=2, shuffle=False),
        )
    )
    next(batches)
    deadline = time.monotonic() + 60
    while not hangs.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    batches.close()  # type: ignore[attr-defined]  # the police looks for the process


def double(frame: pd.DataFrame) -> pd.DataFrame:
    frame["pid"] = os.getpid()
    return frame


def test_a_module_of_the_working_directory_replaces_none_of_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logging.py").write_text("raise SystemExit('a file of the user')")
    monkeypatch.chdir(tmp_path)
    process_pool.end_idle()
    write_rows(tmp_path / "rows", [[5]])
    assert len(pids_of(loader_of(tmp_path / "rows", mark))) == 1


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
