"""What the log says of stalls, and after how long what waits is given up."""

import gc
import threading
import weakref
from datetime import timedelta
from typing import cast

import pytest

from farandole._native import Engine
from farandole.config import Config
from farandole.core.monitoring.stalls import Stall, StallInspector, describe


def test_names_who_waits_for_whom_and_the_longest_wait() -> None:
    stalls = [Stall("allreduce.b", 61.2, (0, 1), (2,)), Stall("allreduce.a", 75.0, (0, 1), (2,))]
    (sentence,) = describe(stalls, 600)
    assert sentence.startswith(
        "ranks 0 and 1 waited 75 s for rank 2 to ask for allreduce.a, allreduce.b. They give up after"
    )
    assert "after 600 s" in sentence


def test_one_sentence_for_each_party() -> None:
    stalls = [Stall("x", 60, (0,), (1, 2)), Stall("y", 60, (0, 1), (2,)), Stall("z", 60, (0,), (1, 2))]
    sentences = list(describe(stalls, 0, "process set 1 (ranks 0-2)"))
    assert len(sentences) == 2
    assert "rank 0 of process set 1 (ranks 0-2) waited 60 s for ranks 1 and 2 to ask for x, z" in sentences[0]
    assert all("for ever" in each for each in sentences)


def test_many_names_are_counted() -> None:
    (sentence,) = describe([Stall(f"t{place:02}", 60, (0,), (1,)) for place in range(20)], 0)
    assert "t05 and 14 more" in sentence and "t06" not in sentence


def test_a_group_without_all_of_its_members() -> None:
    (sentence,) = describe([Stall("pair", 60, (0, 1), ())], 0)
    assert "the rest of pair" in sentence and "no rank" in sentence


@pytest.mark.parametrize(
    ("collective", "shutdown", "disabled", "seconds"),
    [(600, 0, False, 600), (600, 120, False, 120), (0, 120, False, 120), (90, 120, False, 90), (0, 120, True, 0)],
)
def test_the_shorter_of_two_limits_ends_a_wait(collective: int, shutdown: int, disabled: bool, seconds: float) -> None:
    config = Config(
        collective_timeout=timedelta(seconds=collective),
        stall_shutdown_time=timedelta(seconds=shutdown),
        stall_check_disable=disabled,
    )
    assert config.patience_seconds == seconds


def test_the_engine_of_a_removed_set_is_not_kept() -> None:
    checked = threading.Event()

    class Stalled:
        """An engine with an operation that has stalled."""

        def stalls(self) -> list[tuple[str, float, list[int], list[int]]]:
            checked.set()
            return [("x", 60.0, [0], [1])]

    engine = Stalled()
    gone = weakref.ref(engine)
    inspector = StallInspector(Config(stall_check_time=timedelta(milliseconds=20)))
    try:
        inspector.follow(cast(Engine, engine))
        assert checked.wait(20)
        inspector.leave(cast(Engine, engine))
        del engine
        gc.collect()
        assert gone() is None
    finally:
        inspector.close()
