"""The channel between a launcher and the worker that makes a call."""

from datetime import timedelta

import pytest

from farandole.launch.channel import READY, Orders, WorkerEnd, WorkerFailure, open_channel


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
