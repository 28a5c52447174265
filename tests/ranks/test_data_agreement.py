"""Ranks that read one data set: they agree before they start, and what one cannot read all hear of."""

import json
from pathlib import Path

import pytest

import farandole.numpy as hvd
from farandole.config import Config
from farandole.core.context import Context
from farandole.core.events import EventFile
from farandole.core.timeline import timeline_path
from farandole.data import Loader, ParquetSource, Reading
from farandole.errors import ConfigError, SourceError
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
def test_ranks_together_read_every_row_once(tmp_path: Path, size: int) -> None:
    rows = write_rows(tmp_path, RAGGED["ragged"])

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
