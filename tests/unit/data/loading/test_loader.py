"""Batches of Parquet files: every row once per epoch, on any number of ranks."""

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import ArrowSource, Batch, Loader, Metrics, ParquetSource, Policy, Reading, SelectedSource
from farandole.data.formats.row_groups import RowGroup
from farandole.data.loading.rounds import Columns
from farandole.data.loading.values import Values
from farandole.errors import ConfigError, DataError, ReaderError, SourceError
from helpers.datasets import RAGGED, read_all, write_rows

SMALL = Reading(lanes=4, window=7)


def rows_of(batches: list[Batch]) -> list[int]:
    return [int(row) for batch in batches for row in batch["row"]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("layout", RAGGED)
def test_no_row_is_short_and_none_doubled(tmp_path: Path, layout: str, size: int) -> None:
    epochs = 3
    rows = write_rows(tmp_path, RAGGED[layout])
    orders = []
    for ranks in read_all(
        ParquetSource(str(tmp_path)),
        size,
        epochs,
        lambda source, rank: Loader(source, batch_size=4, policy="join", rank=rank, size=size),
    ):
        assert len({len(batches) for batches in ranks}) == 1
        counts = Counter(row for batches in ranks for row in rows_of(batches))
        assert counts == Counter(range(rows))
        orders.append(tuple(rows_of(ranks[0])))
    assert len(set(orders)) == epochs


@pytest.mark.parametrize("reading", [SMALL, replace(SMALL, workers=0, ahead=0), Reading(shuffle=False), Reading()])
@pytest.mark.parametrize("size", [1, 3])
def test_ways_of_reading_agree(tmp_path: Path, reading: Reading, size: int) -> None:
    rows = write_rows(tmp_path, RAGGED["many small"])
    (ranks,) = read_all(
        ParquetSource(str(tmp_path)),
        size,
        1,
        lambda source, rank: Loader(source, batch_size=5, policy="join", rank=rank, size=size, reading=reading),
    )
    together = [row for batches in ranks for row in rows_of(batches)]
    assert sorted(together) == list(range(rows))
    # Unshuffled, each rank has a stretch of the files for itself.
    assert (together == list(range(rows))) == (not reading.shuffle)


def order_of(source: ParquetSource, size: int, seed: int, epoch: int) -> list[set[int]]:
    """The rows of each step of 24 rows."""
    steps: list[set[int]] = [set() for _ in range(99)]
    for rank in range(size):
        reading = Reading(seed=seed)
        loader = Loader(source, batch_size=24 // size, policy="join", rank=rank, size=size, reading=reading)
        loader.set_epoch(epoch)
        for step, batch in enumerate(loader):
            steps[step].update(rows_of([batch]))
    return steps


def test_a_seed_may_be_given_to_the_loader(tmp_path: Path) -> None:
    write_rows(tmp_path, [[10, 20], [30]])
    source = ParquetSource(str(tmp_path))

    def order(**settings: Any) -> list[int]:
        return rows_of(list(Loader(source, batch_size=8, policy="join", **settings)))

    assert order(seed=5) == order(reading=Reading(seed=5)) == order(reading=Reading(seed=6), seed=5)
    assert order(seed=5) != order(seed=6)


def test_orders_differ_by_epoch_and_seed_and_not_by_ranks(tmp_path: Path) -> None:
    write_rows(tmp_path, RAGGED["many small"])
    source = ParquetSource(str(tmp_path))
    first = order_of(source, 4, 1, 0)
    assert first == order_of(source, 2, 1, 0) == order_of(source, 3, 1, 0) == order_of(source, 1, 1, 0)
    assert first != order_of(source, 4, 1, 1)
    assert first != order_of(source, 4, 2, 0)


@pytest.mark.parametrize("policy", ["join", "pad", "drop"])
def test_an_epoch_goes_on_with_4_then_2_then_3_ranks(tmp_path: Path, policy: Policy) -> None:
    rows = write_rows(tmp_path, RAGGED["ragged"])
    source = ParquetSource(str(tmp_path))
    seen: list[int] = []
    state = None
    for size, steps in ((4, 3), (2, 5), (3, None)):
        states = []
        for rank in range(size):
            loader = Loader(source, batch_size=3, policy=policy, rank=rank, size=size, reading=SMALL)
            if state is not None:
                loader.load_state_dict(state)
            batches: Iterator[Batch] = iter(loader)
            for _ in range(len(loader) if steps is None else steps):
                batch = next(batches)
                seen += rows_of([batch])[: batch.rows - batch.repeated]
            batches.close()  # type: ignore[attr-defined]
            states.append(loader.state_dict())
        assert all(each == states[0] for each in states)
        state = states[0]
    left = (rows - 3 * 12 - 5 * 6) % 9
    assert max(Counter(seen).values()) == 1
    assert len(seen) == (rows - left if policy == "drop" else rows)
    assert state is not None
    assert (state["epoch"], state["visited"]) == (1, 0)
    assert all(isinstance(value, int) for value in state.values())


@pytest.mark.parametrize("shuffle", [True, False])
def test_loaders_take_other_ranks_within_an_epoch(tmp_path: Path, shuffle: bool) -> None:
    rows = write_rows(tmp_path, RAGGED["ragged"])
    reading = replace(SMALL, shuffle=shuffle)

    def made(rank: int, size: int) -> Loader:
        loader = Loader(
            ParquetSource(str(tmp_path)), batch_size=11, policy="join", of_all_ranks=True, rank=rank, size=size,
            reading=reading,
        )  # fmt: skip
        return loader

    def steps(loaders: list[Loader], count: int) -> Iterator[list[int]]:
        with ExitStack() as closing:
            batches = [iter(loader) for loader in loaders]
            for each in batches:
                closing.callback(each.close)  # type: ignore[attr-defined]
            for _ in range(count):
                found = [next(each) for each in batches]
                assert max(each.rows for each in found) - min(each.rows for each in found) <= 1
                assert sum(each.weight for each in found) == pytest.approx(len(found))
                yield sorted(rows_of(found))

    alone = made(0, 1)
    expected = [sorted(rows_of([batch])) for _ in range(2) for batch in alone]
    loaders = [made(rank, 4) for rank in range(4)]
    seen: list[list[int]] = []
    for size, count in ((4, 3), (2, 2), (3, 1), (1, 2), (7, None)):
        state = loaders[0].state_dict()
        loaders = [*loaders[:size], *(made(rank, size) for rank in range(len(loaders), size))]
        for rank, loader in enumerate(loaders):
            loader.load_state_dict(state)
            loader.resize(rank, size)
        seen += steps(loaders, len(loaders[0]) if count is None else count)
    assert loaders[0].epoch == 1
    seen += steps(loaders, len(loaders[0]))
    assert seen == expected
    assert sorted(row for batch in seen for row in batch) == sorted([*range(rows)] * 2)


def test_a_batch_of_all_ranks_needs_policy_join(tmp_path: Path) -> None:
    write_rows(tmp_path, RAGGED["ragged"])
    with pytest.raises(ConfigError, match="policy: must be 'join' with of_all_ranks"):
        Loader(ParquetSource(str(tmp_path)), batch_size=11, policy="pad", of_all_ranks=True)


def test_more_ranks_than_rows_of_a_step_are_refused(tmp_path: Path) -> None:
    rows = write_rows(tmp_path, RAGGED["ragged"])
    loader = Loader(ParquetSource(str(tmp_path)), batch_size=4, policy="drop")
    with pytest.raises(DataError, match="make no step"):
        loader.resize(0, rows)


def test_a_resumed_loader_gives_what_the_other_would_have_given(tmp_path: Path) -> None:
    write_rows(tmp_path, RAGGED["even"])
    source = ParquetSource(str(tmp_path))
    one, other = (Loader(source, batch_size=7, policy="join", reading=Reading(seed=seed)) for seed in (5, 6))
    batches = iter(one)
    for _ in range(11):
        next(batches)
    other.load_state_dict(one.state_dict())
    rest = [rows_of([batch]) for batch in batches]
    assert [rows_of([batch]) for batch in other] == rest
    assert [rows_of([batch]) for batch in other] == [rows_of([batch]) for batch in one]


def test_a_state_of_another_choice_of_as_many_rows_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path, [[5], [5]])

    def loader(first: int) -> Loader:
        chosen = SelectedSource(ParquetSource(str(tmp_path)), [("row", ">=", first), ("row", "<", first + 5)])
        return Loader(chosen, batch_size=1, policy="drop")

    state = loader(0).state_dict()
    loader(0).load_state_dict(state)
    for first in (3, 5):
        with pytest.raises(ConfigError, match=r"belongs to other data: .* another condition chooses rows"):
            loader(first).load_state_dict(state)


def test_a_state_of_other_data_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "one", [[5, 5]])
    write_rows(tmp_path / "other", [[6, 4]])
    one, other = (Loader(ParquetSource(str(tmp_path / name)), batch_size=1, policy="drop") for name in ("one", "other"))
    with pytest.raises(ConfigError, match="belongs to other data"):
        other.load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="holds the integers"):
        one.load_state_dict({"epoch": 1})
    with pytest.raises(ConfigError, match="has visited 11 of 10 rows"):
        one.load_state_dict(one.state_dict() | {"visited": 11})
    with pytest.raises(ConfigError, match="of epoch -1"):
        one.load_state_dict(one.state_dict() | {"epoch": -1})


@pytest.mark.parametrize(
    "move",
    [
        lambda loader: next(iter(loader)),
        lambda loader: loader.set_epoch(3),
        lambda loader: loader.resize(0, 2),
        lambda loader: loader.load_state_dict(loader.state_dict() | {"visited": 0}),
    ],
)
def test_an_iterator_whose_loader_was_moved_repeats_no_rows(tmp_path: Path, move: Callable[[Loader], object]) -> None:
    write_rows(tmp_path, RAGGED["even"])
    loader = Loader(ParquetSource(str(tmp_path)), batch_size=7, policy="join")
    batches = iter(loader)
    next(batches)
    move(loader)
    with pytest.raises(ReaderError, match="iterate over it anew"):
        next(batches)


def test_an_iterator_does_not_wait_for_threads_that_a_fork_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path, RAGGED["even"])
    batches = iter(Loader(ParquetSource(str(tmp_path)), batch_size=7, policy="join"))
    next(batches)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(ReaderError, match="this process was forked since it began; iterate over it anew"):
        next(batches)


@pytest.mark.parametrize("made", [None, {}, [1]])
def test_a_transform_that_returns_no_columns_is_named(tmp_path: Path, made: Any) -> None:
    write_rows(tmp_path, RAGGED["even"])
    loader = Loader(
        ParquetSource(str(tmp_path)), batch_size=7, policy="join", reading=Reading(transform=lambda rows: made)
    )
    with pytest.raises(DataError, match="the transform must return a dictionary of columns, got "):
        list(loader)


def test_two_iterators_of_a_loader_at_the_same_time_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path, RAGGED["even"])
    loader = Loader(ParquetSource(str(tmp_path)), batch_size=7, policy="join")
    with pytest.raises(ReaderError, match="make a loader for each iterator"):
        list(zip(loader, loader, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("policy", ["drop", "pad", "join"])
def test_policies_keep_their_word(tmp_path: Path, policy: Policy, size: int) -> None:
    rows = write_rows(tmp_path, RAGGED["ragged"])
    source = ParquetSource(str(tmp_path))
    (ranks,) = read_all(
        source,
        size,
        1,
        lambda source, rank: Loader(source, batch_size=6, policy=policy, rank=rank, size=size, reading=SMALL),
    )
    steps = [[batches[step] for batches in ranks] for step in range(len(ranks[0]))]
    for step, batches in enumerate(steps):
        assert all(len(batch["row"]) == batch.rows for batch in batches)
        full = [batch.rows == 6 for batch in batches]
        assert all(full) or (policy == "join" and step + 1 == len(steps))
        # The average over ranks of mean times weight is the mean over all rows of the step.
        means = [batch["row"].mean() * batch.weight if batch.rows else 0.0 for batch in batches]
        everything = np.concatenate([np.asarray(batch["row"]) for batch in batches])
        assert sum(means) / size == pytest.approx(everything.mean())
    real = [row for batches in ranks for batch in batches for row in batch["row"][: batch.rows - batch.repeated]]
    repeated = [row for batches in ranks for batch in batches for row in batch["row"][batch.rows - batch.repeated :]]
    assert Counter(real).most_common(1)[0][1] == 1
    assert len(real) == (rows - rows % (6 * size) if policy == "drop" else rows)
    assert len(repeated) == (-rows % (6 * size) if policy == "pad" else 0)
    assert set(repeated) <= set(range(rows))


def test_batches_may_be_changed_without_changing_others(tmp_path: Path) -> None:
    write_rows(tmp_path, RAGGED["even"])
    loader = Loader(ParquetSource(str(tmp_path)), batch_size=7, policy="pad", reading=Reading(shuffle=False))
    for _ in range(2):
        seen = []
        for batch in loader:
            seen += rows_of([batch])[: batch.rows - batch.repeated]
            batch["row"][:] = -1
        assert seen == list(range(180))


def test_transform_sees_every_row_and_may_not_change_their_number(tmp_path: Path) -> None:
    write_rows(tmp_path, RAGGED["even"])
    source = ParquetSource(str(tmp_path))

    def double(columns: dict[str, Values]) -> dict[str, Values]:
        assert isinstance(columns["row"], np.ndarray)
        return {"row": columns["row"], "twice": columns["row"] * 2}

    loader = Loader(source, batch_size=50, policy="join", reading=Reading(transform=double))
    assert all(np.array_equal(batch["twice"], batch["row"] * 2) for batch in loader)
    halved = Reading(transform=lambda columns: {name: values[:1] for name, values in columns.items()})
    with pytest.raises(DataError, match="made 1 rows of 180"):
        list(Loader(source, batch_size=50, policy="join", reading=halved))


def test_batches_without_rows_are_of_the_types_that_a_transform_makes(tmp_path: Path) -> None:
    write_rows(tmp_path, [[3]])

    def double(columns: Columns) -> Columns:
        rows = np.array([int(row) * 2.5 for row in columns["row"]])
        return {"pair": np.stack([rows, rows], axis=1).astype(np.float32), "text": np.array([str(row) for row in rows])}

    loaders = [
        Loader(
            ParquetSource(str(tmp_path)),
            batch_size=1,
            policy="join",
            rank=rank,
            size=2,
            reading=Reading(transform=double),
        )
        for rank in range(2)
    ]
    batches = [batch for loader in loaders for batch in loader]
    assert sorted(batch.rows for batch in batches) == [0, 1, 1, 1]
    for batch in batches:
        assert (batch["pair"].dtype, batch["pair"].shape) == (np.float32, (batch.rows, 2))  # type: ignore[union-attr]
        assert batch["text"].dtype.kind == "U"  # type: ignore[union-attr]


def test_rows_that_a_predicate_chooses_are_planned_like_any_others(tmp_path: Path) -> None:
    rows = write_rows(tmp_path, RAGGED["ragged"])

    class Odd:
        def get_fields(self) -> set[str]:
            return {"row"}

        def do_include(self, values: dict[str, int]) -> bool:
            return values["row"] % 2 == 1

    whole = ParquetSource(str(tmp_path))
    chosen = {
        tuple(range(1, rows, 2)): SelectedSource(whole, Odd()),
        tuple(range(30, 50)): SelectedSource(whole, [("row", ">=", 30), ("row", "<", 50)]),
        (3, 90, 91): SelectedSource(whole, [[("row", "==", 3)], [("row", "in", {90, 91})]]),
    }
    for expected, source in chosen.items():
        (ranks,) = read_all(
            source, 2, 1, lambda source, rank: Loader(source, batch_size=3, policy="join", rank=rank, size=2)
        )
        assert sorted(row for batches in ranks for row in rows_of(batches)) == list(expected)
    with pytest.raises(DataError, match="column 'age': is not in the data"):
        SelectedSource(whole, [("age", ">", 3)])
    with pytest.raises(DataError, match="no rows"):
        Loader(SelectedSource(whole, [("row", "<", 0)]), batch_size=1, policy="join")


def test_arrow_files_are_read_like_parquet(tmp_path: Path) -> None:
    for number in range(3):
        table = pa.table({"row": np.arange(number * 30, number * 30 + 30), "word": ["a"] * 30})
        with pa.ipc.new_file(tmp_path / f"{number}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    (ranks,) = read_all(
        ArrowSource(str(tmp_path)),
        3,
        1,
        lambda source, rank: Loader(source, batch_size=4, policy="join", columns=["row"], rank=rank, size=3),
    )
    assert sorted(row for batches in ranks for row in rows_of(batches)) == list(range(90))


def test_files_are_found_by_folder_glob_and_list(tmp_path: Path) -> None:
    write_rows(tmp_path / "a", [[3], [4]])
    (tmp_path / "a" / "_SUCCESS").touch()
    (tmp_path / "a" / ".hidden.parquet").touch()
    first, second = (str(tmp_path / "a" / f"part-00{number}.parquet") for number in (0, 1))
    for urls, rows in [
        (str(tmp_path / "a"), 7),
        (f"file://{tmp_path}/a", 7),
        (str(tmp_path / "*" / "part-*1.parquet"), 4),
        (str(tmp_path / "*"), 7),
        ([first, second], 7),
        ([first, str(tmp_path / "a")], 7),
        (first, 3),
    ]:
        assert Loader(ParquetSource(urls), batch_size=1, policy="join").rows == rows


def test_files_that_are_not_of_this_machine(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "data", RAGGED["ragged"])
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "data"), "/far", recursive=True)
    try:
        source = ParquetSource("memory://far")
        (ranks,) = read_all(
            source, 3, 1, lambda source, rank: Loader(source, batch_size=4, policy="join", rank=rank, size=3)
        )
        assert sorted(row for batches in ranks for row in rows_of(batches)) == list(range(rows))
        memory.rm("/far/part-001.parquet")
        with pytest.raises(SourceError, match=r"/far/part-001.parquet: is not there, or has vanished"):
            list(Loader(source, batch_size=4, policy="join"))
    finally:
        memory.rm("/far", recursive=True)


def test_speed_and_waiting_are_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "farandole")
    write_rows(tmp_path, RAGGED["even"])
    told: list[Metrics] = []
    loader = Loader(ParquetSource(str(tmp_path)), batch_size=50, policy="join", report=told.append)
    assert loader.metrics is None
    for _ in range(2):
        list(loader)
        assert loader.metrics == told[-1], "the time after an epoch does not count"
    assert [(each.epoch, each.rows, each.steps) for each in told] == [(0, 180, 4), (1, 180, 4)]
    assert all(0 < each.waited <= each.seconds and 0 < each.waiting <= 100 for each in told)
    assert told[0].scalars() == {
        "data/rows_per_second": told[0].rows_per_second,
        "data/waiting_percent": told[0].waiting,
    }
    logged = r"rank 0, epoch 1: 180 rows in 4 steps and [\d.e-]+ s, [\d.e+]+ rows/s, waiting for data [\d.]+ %"
    assert re.search(logged, caplog.text)


@pytest.mark.parametrize(
    ("setting", "value"), [("seed", -1), ("lanes", 0), ("window", 0), ("workers", -1), ("ahead", -1), ("timeout", 0)]
)
def test_settings_that_make_no_sense_are_refused(setting: str, value: int) -> None:
    with pytest.raises(ConfigError, match=setting):
        Reading(**{setting: value})  # type: ignore[arg-type]


def test_a_rank_outside_the_job_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path, [[3]])
    with pytest.raises(ConfigError, match=r"rank: must be in 0\.\.1"):
        Loader(ParquetSource(str(tmp_path)), batch_size=1, policy="join", rank=2, size=2)


def test_wide_row_groups_are_read_within_a_window(tmp_path: Path) -> None:
    table = pa.table({"row": np.arange(10_000)})
    pq.write_table(table, tmp_path / "one.parquet")
    loader = Loader(ParquetSource(str(tmp_path)), batch_size=64, policy="join", reading=Reading(window=100))
    first = rows_of([next(iter(loader))])
    assert max(first) < 100


@pytest.mark.parametrize(
    ("ahead", "row_bytes", "least", "most"), [(1, 8, 20, 77), (0, 8, 10, 12), (1, 64 << 20, 10, 13)]
)
def test_idle_threads_read_ahead_within_limits(
    tmp_path: Path, ahead: int, row_bytes: int, least: int, most: int
) -> None:
    write_rows(tmp_path, [[1]] * 120)
    reads: list[RowGroup] = []

    class Counted(ParquetSource):
        def nbytes(self, columns: Sequence[str]) -> int:
            return 120 * row_bytes

        def read(self, row_group: RowGroup, columns: Sequence[str]) -> pa.Table:
            reads.append(row_group)
            return super().read(row_group, columns)

    reading = Reading(lanes=1, window=1, ahead=ahead)
    batches = iter(Loader(Counted(str(tmp_path)), batch_size=1, policy="join", reading=reading))
    for _ in range(10):
        next(batches)
        time.sleep(0.02)  # a step, in which the threads become idle
    batches.close()  # type: ignore[attr-defined]
    # The thread that gathers rounds has made one more, and waits for the next.
    assert least <= len(reads) <= most
