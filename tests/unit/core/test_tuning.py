"""Autotune's decisions, on made-up machines; and its file."""

import importlib.util
import itertools
import random
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farandole.config import Config
from farandole.core.autotune.knobs import Knobs
from farandole.core.autotune.tuning import Outcome, Terms, Trial, score, search, space_of
from farandole.core.autotune.tuning_log import HEAD, Row, TuningLog
from farandole.errors import ConfigError

DEFAULT = Knobs.of(Config())
ONE_HOST = space_of(Config(), 1, False, 512 << 10)
GRID = space_of(Config(), 2, True, 512 << 10)


def tune(speed: Callable[[Knobs], float], space: Any = ONE_HOST, **how: Any) -> tuple[Outcome, list[Trial]]:
    """Search on a machine where knobs have that speed; returns the outcome and the trials."""
    pytest.importorskip("optuna")
    steps = search(space, DEFAULT, how.pop("saved", None), Terms(warmup=3, samples=20, **how))
    tried: list[Trial] = []
    try:
        tried.append(next(steps))
        while True:
            tried.append(steps.send(speed(tried[-1].knobs)))
    except StopIteration as end:
        return end.value, tried


def test_finds_what_is_faster() -> None:
    outcome, tried = tune(lambda knobs: 3e9 if knobs.slot_bytes >= 1 << 18 else 1e9)
    assert outcome.knobs.slot_bytes >= 1 << 18 and outcome.gain == 3
    phases = [trial.phase for trial in tried]
    assert phases == sorted(phases, key=["warmup", "search", "confirm"].index)
    assert (phases.count("warmup"), phases.count("search"), phases.count("confirm")) == (3, 20, 18)
    # The default is among the trials, and of the confirming ones it is one half, first and second in turns.
    assert tried[3].knobs == DEFAULT
    turns = [trial.knobs for trial in tried if trial.phase == "confirm"]
    assert turns == [outcome.knobs, DEFAULT, DEFAULT, outcome.knobs] * 4 + [outcome.knobs, DEFAULT]


def test_the_default_wins_ties_without_confirmation() -> None:
    outcome, tried = tune(lambda knobs: 1e9, GRID)
    assert outcome == Outcome(DEFAULT, 1.0)
    assert all(trial.phase != "confirm" for trial in tried)


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_end_worse_than_the_default(seed: int) -> None:
    """A machine whose samples vary by a factor of three, and on which the default is the best by a tenth."""
    chance = random.Random(seed)

    def speed(knobs: Knobs) -> float:
        return (1.1e9 if knobs == DEFAULT else 1e9) * 3 ** chance.uniform(-0.5, 0.5)

    assert tune(speed, GRID, seed=seed)[0].knobs == DEFAULT


def test_a_machine_that_becomes_faster_misleads_nobody() -> None:
    samples = itertools.count(1)
    assert tune(lambda knobs: 1e6 * 1.1 ** next(samples), GRID)[0].knobs == DEFAULT


def test_the_same_seed_tries_the_same() -> None:
    def speed(knobs: Knobs) -> float:
        return float(knobs.fusion_threshold % 1000 + knobs.slot_bytes)

    assert tune(speed, GRID, seed=5) == tune(speed, GRID, seed=5)


def test_an_earlier_result_is_confirmed_and_no_more_or_else_forgotten() -> None:
    saved = replace(DEFAULT, slot_bytes=1 << 16)
    outcome, tried = tune(lambda knobs: 2e9 if knobs == saved else 1e9, saved=saved)
    assert outcome == Outcome(saved, 2.0) and len(tried) == 3 + 18
    assert tried[0].knobs == saved
    outcome, tried = tune(lambda knobs: 0.1e9 if knobs == saved else 1e9, saved=saved)
    assert outcome == Outcome(DEFAULT, 1.0)
    # Two turns told, and the search was made.
    assert [trial.phase for trial in tried[3:8]] == ["confirm"] * 4 + ["search"]


def test_what_is_given_and_what_changes_nothing_is_not_tried() -> None:
    assert set(ONE_HOST) == {"fusion_threshold", "slot_bytes"}
    assert set(GRID) == {"fusion_threshold", "slot_bytes", "link_chunk", "link_small", "hierarchical"}
    assert set(space_of(Config(), 3, False, 4096)) == {"fusion_threshold", "link_chunk", "link_small"}
    given = Config.from_environment({"HOROVOD_FUSION_THRESHOLD": "1KiB", "FARANDOLE_LINK_CHUNK": "256KiB"})
    space = space_of(given, 2, True, 64 << 10)
    assert set(space) == {"slot_bytes", "link_small", "hierarchical"} and space["slot_bytes"] == (14, 16)
    pytest.importorskip("optuna")
    steps = search(space, Knobs.of(given), None, Terms(warmup=0, samples=20))
    trial = next(steps)
    for _ in range(19):
        assert (trial.knobs.fusion_threshold, trial.knobs.link_chunk) == (1024, 256 << 10)
        assert trial.knobs == Knobs.of(given) or trial.knobs.slot_bytes <= 64 << 10
        trial = steps.send(1e9)
    steps.close()


def test_a_score_is_that_of_the_middle_step() -> None:
    marks = [(at * 10_000_000, at * 1000) for at in range(11)]
    assert score(marks, 10, 50_000_000) == pytest.approx(1e5)
    assert score(marks[:10], 10, 50_000_000) is None
    assert score(marks, 10, 200_000_000) is None
    late = [*marks[:4], *((ns + 10**10, moved) for ns, moved in marks[4:])]
    assert score(late, 10, 50_000_000) == pytest.approx(1e5)


def test_optuna_is_asked_for_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from farandole.core.monitoring.monitors import Monitors

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optuna" else find(name))
    monkeypatch.delitem(sys.modules, "optuna", raising=False)
    with pytest.raises(ConfigError, match=r"pip install farandole\[autotune\]"):
        Monitors(0, 2, "host", Config(autotune=True))
    Monitors(1, 2, "host", Config(autotune=True)).close()  # decides nothing


def row(phase: str, knobs: Knobs = DEFAULT, ranks: int = 2) -> Row:
    return Row(phase, ranks, 1, knobs, 1.5e9)


def test_a_log_is_read_by_the_next_job(tmp_path: Path) -> None:
    path = str(tmp_path / "log.csv")
    first, second = replace(DEFAULT, hierarchical=False), replace(DEFAULT, slot_bytes=65536)
    with TuningLog(path) as log:
        assert log.result(2, 1) is None
        for each in (row("search", second), row("chosen", first), row("chosen", second, ranks=4)):
            log.add(each)
    with TuningLog(path) as log:
        assert log.rows == [row("search", second), row("chosen", first), row("chosen", second, ranks=4)]
        assert log.result(2, 1) == first and log.result(4, 1) == second and log.result(4, 2) is None
        log.add(row("chosen", second))
    assert (tmp_path / "log.csv").read_text().count("\n") == 5
    # A kill in the middle of a line.
    with open(path, "a") as file:
        file.write("search,2,1,13")
    with TuningLog(path) as log:
        assert log.result(2, 1) == second
        log.add(row("chosen", first))
    with TuningLog(path) as log:
        assert log.result(2, 1) == first and len(log.rows) == 5


GOOD = "search,2,1,134217728,131072,262144,65536,1,1.5e9"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("fusion,cycle,score\n", r"line 1 cannot be read: a log begins with phase,ranks,hosts,fusion_threshold"),
        (f"{','.join(HEAD)}\n{GOOD}\n{GOOD},3\n", r"line 3 cannot be read: it has 10 columns and not 9"),
        (f"{','.join(HEAD)}\n{GOOD.replace('search', 'winner')}\n", r"line 2 cannot be read: 'winner' is none of"),
        (f"{','.join(HEAD)}\n{GOOD.replace('131072', 'x')}\n", r"line 2 cannot be read: invalid literal .*'x'"),
        (f"{','.join(HEAD)}\n{GOOD.replace('262144', '100')}\n", r"line 2 cannot be read: link_chunk must be at least"),
        (f"{','.join(HEAD)}\n{GOOD.replace('134217728', '-1')}\n", r"line 2 cannot be read: a knob is out of range"),
        (
            f"{','.join(HEAD)}\n{GOOD.replace('134217728', '9' * 20)}\n",
            r"line 2 cannot be read: fusion_threshold: must be",
        ),
        (f"{','.join(HEAD)}\n{GOOD.replace('131072', '1073741824')}\n", r"line 2 cannot be read: slot_bytes: must be"),
        (f"{','.join(HEAD)}\n\n", r"line 2 cannot be read: it has 0 columns"),
        ("\x00\xff\n", r"line 1 cannot be read"),
    ],
)
def test_what_is_no_log_is_refused_with_its_place(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(path)) + ", " + problem):
        TuningLog(str(path))
    assert path.read_text() == text


@pytest.mark.parametrize("text", ['{"lr": 0.1}', "phase\rranks"])
def test_another_file_of_one_line_stays_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings.json"
    path.write_bytes(text.encode())
    with pytest.raises(ConfigError, match=re.escape(f"{path} is not a log of autotune, which begins with phase,ranks")):
        TuningLog(str(path))
    assert path.read_bytes() == text.encode()
    # A kill may leave the beginning of a log's first line.
    path.write_text("phase,rank")
    with TuningLog(str(path)) as log:
        assert not log.rows
    assert path.read_text() == f"{','.join(HEAD)}\n"


def test_a_log_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"autotune_log: cannot read and write .*No such file"):
        TuningLog(str(tmp_path / "none" / "log.csv"))
    binary = tmp_path / "model.pt"
    binary.write_bytes(b"\x80\x02\xff")
    with pytest.raises(ConfigError, match=r"cannot read and write .*model\.pt"):
        TuningLog(str(binary))


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Let this process write no file beyond `size` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_the_log_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log.csv"
    with TuningLog(str(path)) as log:
        log.add(row("search"))
        with files_up_to(path.stat().st_size + 5):
            log.add(row("search"))
            log.add(row("chosen"))
    assert log.rows == [row("search"), row("search"), row("chosen")]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    with files_up_to(5), pytest.raises(ConfigError, match=r"cannot read and write .*File too large"):
        TuningLog(str(tmp_path / "other.csv"))
