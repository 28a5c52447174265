"""Ranks that read one data set: they agree before they start, and what one cannot read all hear of."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

import farandole.numpy as hvd
from farandole.config import Config
from farandole.core.context import Context
from farandole.core.monitoring.timeline import timeline_path
from farandole.data import CachedSource, Loader, ParquetSource, Reading, Source, together
from farandole.data.loading.rounds import Columns
from farandole.errors import CacheError, ConfigError, DataError, SourceError
from farandole.event_file import EventFile
from farandole.integrations.reading import report_reading
from helpers.datasets import RAGGED, write_rows
from helpers.ranks import run_ranks


def make(context: Context, folder: Path, **settings: int) -> Loader:
    return Loader(
        ParquetSource(str(folder)),
        batch_size=settings.pop("batch_size", 4),
        policy="join",
        rank=context.rank,
        size=context.size,
        reading=Reading(**settings),  # type: ignore[arg-type]
        gather=hvd.allgather_object,
    )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "layout", [RAGGED["ragged"], [[7]], [[1, 0], [1]]], ids=["ragged", "one row group", "two rows"]
)
def test_ranks_together_read_every_row_once(tmp_path: Path, layout: list[list[int]], size: int) -> None:
    rows = write_rows(tmp_path, layout)

    def body(context: Context) -> list[int]:
        return [int(row) for batch in make(context, tmp_path) for row in batch["row"]]

    assert sorted(row for seen in run_ranks(size, body) for row in seen) == list(range(rows))


def test_ranks_that_ask_for_different_things_are_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "one", [[5, 5]])
    write_rows(tmp_path / "other", [[6, 5]])

    def different_seeds(context: Context) -> None:
        with pytest.raises(
            ConfigError, match=r"the loader: differs between ranks \(ranks 0 and 1: .*; rank 2: .*seed 7"
        ):
            make(context, tmp_path / "one", seed=7 if context.rank == 2 else 0)

    def different_data(context: Context) -> None:
        with pytest.raises(ConfigError, match=r"the data: differs between ranks \(rank 0: 2 row groups of 11 rows"):
            make(context, tmp_path / ("one" if context.rank else "other"))

    run_ranks(3, different_seeds)
    run_ranks(3, different_data)


def test_what_one_rank_cannot_read_stops_all_at_the_start_of_an_epoch(tmp_path: Path) -> None:
    for rank in range(3):
        write_rows(tmp_path / str(rank), [[5], [5]])

    def body(context: Context) -> None:
        loader = make(context, tmp_path / str(context.rank))
        assert sum(batch.rows for batch in loader) <= 10
        if context.rank == 1:
            (tmp_path / "1" / "part-001.parquet").unlink()
        whose = "" if context.rank == 1 else "rank 1: "
        with pytest.raises(SourceError, match=rf"^{whose}.*/1/part-001.parquet: is not there"):
            list(loader)

    run_ranks(3, body)


def vanish(file: Path) -> None:
    file.unlink()


def change(file: Path) -> None:
    pq.write_table(pa.table({"row": range(99, 104)}), file)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [(vanish, "vanished since it was listed"), (change, "has changed while"), (cut, "has changed while")],
)
def test_what_one_rank_cannot_read_within_an_epoch_all_hear_of_at_the_same_step(
    tmp_path: Path, spoil: Callable[[Path], None], text: str
) -> None:
    for rank in range(3):
        write_rows(tmp_path / str(rank), [[5]] * 12)

    def body(context: Context) -> dict[str, int]:
        mine = tmp_path / str(context.rank)
        reading = Reading(shuffle=False, window=1, workers=0, ahead=0)
        loader = Loader(
            ParquetSource(str(mine)),
            batch_size=2,
            policy="join",
            rank=context.rank,
            size=context.size,
            reading=reading,
            gather=hvd.allgather_object,
        )
        batches = iter(loader)
        next(batches)
        if context.rank == 1:
            spoil(mine / "part-005.parquet")
        whose = "" if context.rank == 1 else "rank 1: "
        with pytest.raises(SourceError, match=rf"^{whose}{mine.parent}/1/part-005.parquet: .*{text}"):
            list(batches)
        # The ranks are still together, and at one place: the last step that all of them had.
        assert hvd.allgather_object(context.rank) == [0, 1, 2]
        return loader.state_dict()

    states = run_ranks(3, body)
    assert states[0] == states[1] == states[2]
    # Rank 1 reads rows 20 to 40, of which 5 are gone: two steps with two rows of each rank.
    assert (states[0]["epoch"], states[0]["visited"]) == (0, 2 * 6)


def test_a_transform_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    write_rows(tmp_path, [[6], [6]])

    def body(context: Context) -> None:
        def broken(columns: Columns) -> Columns:
            raise KeyError("colour")

        loader = Loader(
            ParquetSource(str(tmp_path)),
            batch_size=2,
            policy="join",
            rank=context.rank,
            size=2,
            reading=Reading(transform=broken if context.rank else None),
            gather=hvd.allgather_object,
        )
        error, text = (KeyError, "colour") if context.rank else (SourceError, "rank 1: KeyError: 'colour'")
        with pytest.raises(error, match=text):
            list(loader)

    run_ranks(2, body)


def test_a_full_disk_under_the_cache_of_one_rank_stops_all(tmp_path: Path) -> None:
    write_rows(tmp_path / "data", [[20_000], [20_000]])

    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def body(context: Context) -> None:
        # The job's own shared memory is there now, and counts as a file.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        source: Source = ParquetSource(str(tmp_path / "data"))
        if context.rank == 1:
            source = CachedSource(source, tmp_path / "cache", 1 << 30)
        loader = Loader(source, batch_size=100, policy="join", rank=context.rank, size=2, gather=hvd.allgather_object)
        error, whose = (CacheError, "") if context.rank else (SourceError, "rank 1: ")
        with pytest.raises(error, match=f"^{whose}cache {tmp_path}/cache: cannot hold .* bytes more"):
            list(loader)
        assert loader.state_dict()["visited"] == 0

    try:
        run_ranks(2, body)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    ("odd", "error", "text"),
    [
        ({"row": range(5), "x": [[1]] * 5}, ConfigError, "columns: .*rank 0: row .*, x double; rank 1: .*, x int64.1."),
        ({"row": range(5)}, DataError, "column 'x': is not in the data, which has row"),
        ({"row": range(5), "x": [{"a": 1}] * 5}, DataError, "column 'x': no tensor holds struct<a: int64>"),
        ({"row": [], "x": []}, DataError, "there are no rows"),
        (None, SourceError, "no-such-folder: is not there"),
    ],
)
def test_what_one_rank_cannot_open_all_hear_of(
    tmp_path: Path, odd: dict[str, object] | None, error: type[Exception], text: str
) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        columns = odd if rank and odd is not None else {"row": range(5), "x": [0.5] * 5}
        pq.write_table(pa.table(columns), tmp_path / str(rank) / "a.parquet")

    def body(context: Context) -> None:
        folder = tmp_path / ("no-such-folder" if context.rank and odd is None else str(context.rank))
        with pytest.raises(error if context.rank or error is ConfigError else SourceError, match=text) as raised:
            source = together(lambda: ParquetSource(str(folder)), hvd.allgather_object)
            Loader(
                source,
                batch_size=2,
                policy="join",
                columns=["row", "x"],
                rank=context.rank,
                size=2,
                gather=hvd.allgather_object,
            )
        assert context.rank or error is ConfigError or str(raised.value).startswith("rank 1: ")

    run_ranks(2, body)


def test_speed_and_waiting_are_in_event_files_and_timelines(tmp_path: Path) -> None:
    write_rows(tmp_path / "data", RAGGED["even"])

    def body(context: Context) -> None:
        with EventFile(tmp_path / f"events{context.rank}") as events:
            loader = Loader(
                ParquetSource(str(tmp_path / "data")),
                batch_size=7,
                policy="join",
                rank=context.rank,
                size=context.size,
                report=report_reading(events),
            )
            for _ in range(2):
                list(loader)

    run_ranks(2, body, config=Config(timeline=str(tmp_path / "trace.json")))
    for rank in range(2):
        events = json.loads(timeline_path(tmp_path / "trace.json", rank).read_text())
        curves = [event for event in events if event["ph"] == "C"]
        assert [(curve["name"], curve["pid"]) for curve in curves] == [("data", rank)] * 2
        assert all(0 < curve["args"]["data/waiting_percent"] <= 100 for curve in curves)
        assert all(curve["args"]["data/rows_per_second"] > 0 for curve in curves)
        (file,) = (tmp_path / f"events{rank}").iterdir()
        assert file.read_bytes().count(b"data/waiting_percent") == 2


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (None, 3)])
def test_shares_that_no_rank_reads_are_told(tmp_path: Path, rank: int | None, size: int) -> None:
    write_rows(tmp_path, [[100]])

    def body(context: Context) -> None:
        mine = context.rank if rank is None else rank
        with pytest.raises(ConfigError, match="rows would be read twice or not at all; pass hvd"):
            Loader(
                ParquetSource(str(tmp_path)),
                batch_size=5,
                policy="join",
                rank=mine,
                size=size,
                gather=hvd.allgather_object,
            )

    run_ranks(2, body)
