"""The process' own context: init, shutdown, and what launchers tell it."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import farandole.numpy as hvd
from farandole.config import Config
from farandole.core import default
from farandole.core.context import Context
from farandole.errors import ConfigError, EngineClosed, NotInitializedError
from farandole.meeting.rendezvous import SoloRendezvous
from helpers.ranks import run_ranks
from helpers.recurring import recurring


@pytest.fixture
def ended() -> Iterator[None]:
    yield
    hvd.shutdown()


@pytest.mark.usefixtures("ended")
def test_a_process_without_a_launcher_is_the_only_rank() -> None:
    hvd.init()
    first = default.context()
    hvd.init()
    assert default.context() is first
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.allreduce(np.arange(3.0)).tolist() == [0.0, 1.0, 2.0]
    assert hvd.allgather_object("only") == ["only"]


@pytest.mark.usefixtures("ended")
def test_it_can_be_started_again() -> None:
    for _ in range(3):
        hvd.init()
        assert hvd.allreduce(np.ones(2), name="x").tolist() == [1.0, 1.0]
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()


@pytest.mark.usefixtures("ended")
def test_settings_of_a_second_call_are_named(caplog: pytest.LogCaptureFixture) -> None:
    first = Config(fusion_threshold=1 << 20)
    hvd.init(config=first)
    hvd.init(config=Config(fusion_threshold=1 << 20))
    assert not caplog.records
    hvd.init(config=Config(cache_capacity=7))
    (record,) = caplog.records
    assert "fusion_threshold stays 1 MiB, cache_capacity stays 16384; call shutdown() before" in record.getMessage()
    assert default.context().config is first


@pytest.mark.usefixtures("ended")
def test_comm_may_only_be_all_ranks() -> None:
    for comm in ([1], [0, 1], object()):
        with pytest.raises(ConfigError, match="comm"):
            hvd.init(comm=comm)
        assert not hvd.is_initialized()
    hvd.init(comm=[0])
    with pytest.raises(ConfigError, match="comm"):
        hvd.init(comm=[0, 1])


def test_a_thread_of_its_own_does_not_touch_the_process() -> None:
    def body(context: Context) -> None:
        hvd.init()
        assert default.context() is context
        assert hvd.size() == 2
        hvd.barrier()
        hvd.shutdown()
        assert not hvd.is_initialized()
        with pytest.raises(EngineClosed):
            context.engine.run(recurring(5), "barrier", None, None)

    run_ranks(2, body)
    assert not hvd.is_initialized()


def sums(times: int = 3) -> list[float]:
    return [float(hvd.allreduce_(np.ones(1), op=hvd.Sum, name="x")[0]) for _ in range(times)]


@pytest.mark.usefixtures("ended")
def test_repeated_calls_find_their_own_job_while_threads_have_others() -> None:
    """They look for it in a shorter way than first calls."""
    hvd.init()
    assert sums() == [1.0] * 3
    assert run_ranks(2, lambda context: sums()) == [[2.0] * 3] * 2
    assert sums() == [1.0] * 3
    assert default.shared is default.membership()
    hvd.shutdown()
    with pytest.raises(NotInitializedError):
        sums()


def test_unnamed_operations_are_counted_per_context_and_kind() -> None:
    with Context(SoloRendezvous()) as context:
        for turn in range(2):
            with default.use(context):
                membership = default.membership()
                assert membership.wire_name("allreduce", None) == f"allreduce.noname.{2 * turn}"
                assert membership.wire_name("allreduce", None) == f"allreduce.noname.{2 * turn + 1}"
                assert membership.wire_name("broadcast", None) == f"broadcast.noname.{turn}"
                assert membership.wire_name("broadcast", "w") == "broadcast.w"
    with Context(SoloRendezvous()) as other, default.use(other):
        assert default.membership().wire_name("allreduce", None) == "allreduce.noname.0"


def test_a_process_that_does_not_shut_down_ends_well() -> None:
    program = "import farandole.numpy as hvd, numpy; hvd.init(); print(hvd.allreduce(numpy.ones(2)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=os.environ.copy()
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1. 1.]\n", "")


def test_a_thread_that_is_no_rank_is_told_so() -> None:
    """PyTorch runs backward for tensors on a GPU on a thread of its own."""
    errors: list[Exception] = []

    def backward() -> None:
        try:
            hvd.rank()
        except NotInitializedError as error:
            errors.append(error)

    with Context(SoloRendezvous()) as context, default.use(context):
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    backward()
    texts = [str(error) for error in errors]
    assert "on a thread that all of them share; let the ranks be processes there" in texts[0]
    assert texts[1] == "farandole has not been initialized; call init() first."
