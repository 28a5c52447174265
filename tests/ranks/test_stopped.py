"""A rank that is stopped is named by another rank of its host, if farandole's launcher does not watch it."""

import logging
import os
import re
import signal
import threading

import numpy as np
import pytest

from farandole.config import Config
from farandole.core.context import Context
from farandole.core.default import use
from farandole.numpy import Sum, allreduce
from helpers.ranks import run_ranks


class Continue(logging.Handler):
    """Lets a process go on that a warning names, and keeps the warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        os.kill(int(re.findall(r"process (\d+)", self.lines[-1])[0]), signal.SIGCONT)


def stops(context: Context, victim: int) -> tuple[list[str], int]:
    handler = Continue()
    logging.getLogger("farandole.core.monitoring.stopped").addHandler(handler)
    with use(context):
        if context.rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        assert allreduce(np.ones(1), op=Sum)[0] == 3
    return handler.lines, os.getpid()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_first_rank_of_a_host_names_others_and_the_second_one_the_first(
    victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FARANDOLE_FAMILY", raising=False)
    results = run_ranks(3, stops, victim, how="processes")
    text = f"rank {victim} (process {results[victim][1]} on {os.uname().nodename}) is stopped; the other ranks wait"
    (lines,) = [lines for lines, _ in results if lines]
    assert lines == results[0 if victim else 1][0]
    assert len(lines) == 1 and lines[0].startswith(text)


@pytest.mark.parametrize("off", ["launcher", "setting"])
def test_nobody_watches_for_a_launcher_that_does_or_when_it_is_switched_off(
    off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if off == "launcher":
        monkeypatch.setenv("FARANDOLE_FAMILY", "word")
    config = Config(stall_check_disable=off == "setting")
    assert run_ranks(2, threads, config=config, how="processes") == [False, False]


def threads(context: Context) -> bool:
    return "farandole-stopped" in [thread.name for thread in threading.enumerate()]
