"""A rank that does not come is named in the coordinator's log while the others wait, in process sets too."""

import logging
import threading
from datetime import timedelta

import numpy as np
import pytest

import farandole.numpy as hvd
from farandole.config import Config
from farandole.core.context import Context
from farandole.core.default import use
from farandole.errors import CollectiveTimeout
from helpers.ranks import run_ranks

SOON = timedelta(milliseconds=100)


class Heard(logging.Handler):
    """Sets an event when a line has all of some words."""

    def __init__(self, *words: str) -> None:
        super().__init__()
        self.words, self.event, self.lines = words, threading.Event(), list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if all(word in self.lines[-1] for word in self.words):
            self.event.set()

    def __enter__(self) -> "Heard":
        logging.getLogger("farandole.core.monitoring.stalls").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("farandole.core.monitoring.stalls").removeHandler(self)


@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize("late", [0, 2])
def test_the_late_rank_and_what_waits_for_it(hosts: int, late: int) -> None:
    waiting = "ranks 0 and 1" if late == 2 else "ranks 1 and 2"
    with Heard(f"stall: {waiting} waited", f"for rank {late} to ask for", "allreduce.dense.") as heard:

        def body(context: Context) -> float:
            with use(context):
                hvd.allreduce(np.ones(3), name="dense.0", op=hvd.Sum)  # known by number the next time
                if context.rank == late:
                    assert heard.event.wait(20), heard.lines
                handles = [hvd.allreduce_async(np.ones(3), name=f"dense.{place}", op=hvd.Sum) for place in range(2)]
                return float(sum(hvd.synchronize(handle).sum() for handle in handles))

        assert run_ranks(3, body, config=Config(stall_check_time=SOON), hosts=hosts) == [18.0] * 3


def test_a_process_set_speaks_of_the_jobs_ranks() -> None:
    with Heard("stall: rank 1 of process set 1", "for rank 2 to ask for broadcast.part") as heard:

        def body(context: Context) -> None:
            with use(context):
                pair = hvd.add_process_set([1, 2])
                if context.rank == 2:
                    assert heard.event.wait(20), heard.lines
                if context.rank > 0:
                    hvd.broadcast(np.ones(1), 1, name="part", process_set=pair)

        run_ranks(3, body, config=Config(stall_check_time=SOON))


def test_a_stall_is_named_again_and_then_given_up() -> None:
    config = Config(stall_check_time=SOON, stall_shutdown_time=timedelta(seconds=1.5))
    done = threading.Event()

    def body(context: Context) -> None:
        with use(context):
            if context.rank == 1:
                assert done.wait(20)
                return
            try:
                with pytest.raises(CollectiveTimeout, match="rank 1"):
                    hvd.allreduce(np.ones(1), name="never")
            finally:
                done.set()

    with Heard("never") as heard:
        run_ranks(2, body, config=config)
    assert 2 <= len(heard.lines) <= 14
    assert all("They give up after 1.5 s" in line for line in heard.lines)


def test_nothing_is_looked_for_when_that_is_switched_off() -> None:
    def body(context: Context) -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "farandole-stalls"]

    assert run_ranks(2, body, config=Config(stall_check_disable=True)) == [[], []]
