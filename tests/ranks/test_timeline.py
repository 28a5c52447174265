"""The timeline: one file per rank, whole when the context has ended, and refused before anything starts."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from farandole.config import Config
from farandole.core.context import Context
from farandole.core.timeline import timeline_path
from farandole.errors import ConfigError
from farandole.rendezvous import SoloRendezvous
from helpers.ranks import run_ranks

ALLREDUCE = 0


def reduce_twice(context: Context) -> None:
    values = np.ones(1000, np.float32)
    for _ in range(2):
        context.engine.run(ALLREDUCE, "allreduce.x", values, values)


def test_each_rank_writes_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run_ranks(2, reduce_twice, config=Config(timeline=str(path)))
    for rank in range(2):
        events = json.loads(timeline_path(str(path), rank).read_text())
        reductions = [event for event in events if event["name"] == "allreduce"]
        assert len(reductions) == 2
        assert all(event["args"] == {"tensor": "allreduce.x", "bytes": 4000} for event in reductions)
        assert all(event["pid"] == rank and event["dur"] >= 0 for event in reductions)


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"timeline: cannot write .*No such file or directory"):
        Context(SoloRendezvous(), Config(timeline=str(tmp_path / "nowhere" / "trace.json")))


def test_settings_without_effect_are_named(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with (
        caplog.at_level(logging.WARNING),
        Context(SoloRendezvous(), Config(timeline="DYNAMIC", stall_check_disable=True)),
    ):
        pass
    assert "no effect in this version: stall_check_disable, timeline=DYNAMIC" in caplog.text
    assert not Path("DYNAMIC").exists()
