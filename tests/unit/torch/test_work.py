"""Futures and time limits of a process group's operations, without ranks."""

import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from unittest.mock import Mock

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from farandole.errors import CollectiveError, CollectiveTimeout
from farandole.torch.distributed import work
from farandole.torch.distributed.work import Follower, Underway, Work

SHORT = timedelta(milliseconds=20)


class Operation:
    """An operation that is under way until `event` is set."""

    def __init__(self, *, done: bool) -> None:
        self.event = threading.Event()
        if done:
            self.event.set()

    def done(self) -> bool:
        return self.event.is_set()

    def wait(self) -> None:
        assert self.event.wait(30)


class Failed(Operation):
    """An operation that has failed."""

    def wait(self) -> None:
        raise CollectiveTimeout("x", (1,), 1.0)


def as_it_is(error: CollectiveError) -> CollectiveError:
    return error


@pytest.fixture
def follower() -> Iterator[Follower]:
    made = Follower("futures")
    yield made
    made.close()


def test_a_completed_operation_is_not_late_because_of_an_older_one(follower: Follower) -> None:
    slow, late = Operation(done=False), Operation(done=False)
    Work([], Underway([slow], [], as_it_is), follower).get_future()
    assert Work([], Underway([Operation(done=True)], [], as_it_is), follower).wait(SHORT)
    waiting = Work([], Underway([late], [], as_it_is), follower)
    with pytest.raises(TimeoutError, match="not done after"):
        waiting.wait(SHORT)
    late.event.set()
    assert waiting.wait(SHORT)
    slow.event.set()


def test_later_futures_complete_after_one_that_could_not(
    follower: Follower, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        """A future of results on a GPU that has failed: it refuses any value."""

        def then(self, _: object) -> "Broken":
            return self

        def set_result(self, _: object) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

    done = Underway([Operation(done=True)], [], as_it_is)
    with monkeypatch.context() as patch:
        patch.setattr(work, "new_future", lambda _: Broken())
        follower.future_of(done)
    assert follower.future_of(done).wait() == []
    with pytest.raises(RuntimeError, match="'x'"):
        follower.future_of(Underway([Failed(done=True)], [], as_it_is)).wait()
    assert "device-side assert" in caplog.text


def test_a_stream_that_cannot_be_made_fails_the_future(follower: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoStreams:
        def current(self, _: object) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(work, "SideStreams", NoStreams)
    with pytest.raises(RuntimeError, match="device-side assert"):
        follower.future_of(Underway([Operation(done=True)], [], as_it_is)).wait()


def test_a_thread_that_could_not_start_is_tried_again(follower: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    done = Underway([Operation(done=True)], [], as_it_is)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start new thread"):
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        follower.future_of(done)
    assert follower.future_of(done).wait() == []


def test_a_work_of_which_only_the_native_half_is_kept_can_be_waited_for(follower: Follower) -> None:
    results = [torch.ones(1)]
    work = Work(results, Underway([Operation(done=True)], results, as_it_is), follower)
    native = work.boxed()  # holds what `DistributedDataParallel.join` holds
    del work
    kept = dist.Work.unbox(native)
    assert isinstance(kept, Work)  # else its wait would be the native one, which blocks for ever
    assert kept.wait() and kept.get_future().value() == results


def test_a_work_that_was_waited_for_frees_its_tensors(follower: Follower) -> None:
    for wait in (Work.wait, Work.get_future):
        results = [torch.ones(1)]
        freed = weakref.ref(results[0])
        work = Work(results, Underway([Operation(done=True)], results, as_it_is), follower)
        wait(work)
        follower.wait(Underway([], [], as_it_is), timedelta(seconds=30))  # the thread has let go of it
        del work, results
        assert freed() is None


def test_a_future_of_float16_holds_a_native_list(follower: Follower) -> None:
    results, slow = [torch.ones(1, dtype=torch.float16)], Operation(done=False)
    future = Work(results, Underway([slow], results, as_it_is), follower).get_future()
    assert not future.done()
    slow.event.set()
    first = torch.jit.CompilationUnit(
        "def first(f: Future[List[Tensor]]) -> Tensor:\n    return torch.jit.wait(f)[0]\n"
    )
    assert first.first(future) is results[0]
