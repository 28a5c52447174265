"""The channel between a launcher and the worker that makes a call."""

import fcntl
import resource
import socket
from collections.abc import Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import cast

import pytest

from farandole.launch.calls import RankCall
from farandole.launch.channel import READY, Orders, WorkerEnd, WorkerFailure, WorkerValue, open_channel
from farandole.launch.failures import Exit
from farandole.launch.processes import RankProcess

PATIENCE = timedelta(seconds=5)


def test_the_outcome_of_a_worker_that_is_gone_before_it_took_the_call_is_received() -> None:
    launcher, theirs = open_channel()
    launcher.begin(Orders())
    worker = WorkerEnd(theirs)
    failed = WorkerFailure(reason="no module", code=1, at=0.0, consequence=False, traceback="", exception=b"")
    worker._send(READY, b"")
    worker.send_outcome(failed)
    worker.close()
    launcher.hand_over([], "", b"call" * 100_000, timedelta(seconds=5))
    assert launcher.receive_outcome(lambda kind, payload: None) == failed
    with pytest.raises(EOFError):
        launcher.receive_outcome(lambda kind, payload: None)
    launcher.close()


@pytest.mark.parametrize("error", [ValueError("no such metric"), BrokenPipeError("closed"), TimeoutError("too slow")])
def test_a_handler_of_messages_that_raises_does_not_end_the_call(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be a user's callback, as `on_epoch` of an estimator."""
    launcher, theirs = open_channel()
    worker = WorkerEnd(theirs)
    worker._send(READY, b"")
    for number in range(2):
        worker.send("epoch", {"number": number})
    worker.send_outcome(WorkerValue(data=b"value"))
    worker.close()
    received: list[object] = []

    def refuse(kind: str, payload: Mapping[str, object]) -> None:
        received.append(payload["number"])
        raise error

    exit = Exit(rank=3, code=0, at=0.0, reason="")
    process = cast(RankProcess, SimpleNamespace(rank=3, tail=(), wait=lambda timeout: exit))
    ends: list[RankCall] = []
    call = RankCall(process, launcher, ends.append)
    call._follow(b"call", [], "", PATIENCE, refuse)
    assert ends == [call] and call.wait(PATIENCE)
    assert (call.failure, call.value(), received) == (None, b"value", [0, 1])
    assert [record.getMessage() for record in caplog.records] == ["on_message failed for a message of rank 3"] * 2


def test_a_patient_message_of_a_worker_with_many_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's descriptor has the launcher's number, and select(2) fails from the 1024th on."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 2000:
        pytest.skip("this process may not have 2000 open files (ulimit -n)")
    monkeypatch.setattr("farandole.launch.channel.PATIENCE", 0.05)
    launcher, theirs = open_channel()
    with theirs:
        worker = WorkerEnd(socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 2000)))
    while worker.send("log", {"text": "x" * 1000}):
        pass
    assert not worker.send("log", {"text": "x"}, patient=True)
    worker.close()
    launcher.close()
