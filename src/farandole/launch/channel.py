"""The pipe between the launcher and a worker that runs one function: the call goes in, a value or a failure comes out.

Both ends belong to one user and one job and the pipe has no name, so what comes over it is trusted.

    worker -> launcher   b"" when it has started
    launcher -> worker   sys.path (JSON), then the pickled (fn, args, kwargs)
    worker -> launcher   a pickled `WorkerValue` or `WorkerFailure`
"""

import json
import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from farandole.handshake import recv_frame, send_frame

__all__ = [
    "WORKER_FD",
    "Outcome",
    "WorkerFailure",
    "WorkerValue",
    "receive_call",
    "receive_outcome",
    "send_call",
    "send_outcome",
]

WORKER_FD = "FARANDOLE_WORKER_FD"  # the variable that tells a worker its end of the pipe
LARGEST = 1 << 48


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerValue:
    """What the function returned, pickled."""

    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFailure:
    """What the function raised, as far as it can travel."""

    reason: str  # "ValueError: the text", in words if it was no exception
    traceback: str
    at: float  # time.monotonic() when it was caught
    code: int  # the exit code that goes with it
    consequence: bool  # it says that another rank failed
    exception: bytes  # pickled; b"" when it cannot be


Outcome: TypeAlias = WorkerValue | WorkerFailure


def send_call(channel: socket.socket, paths: Sequence[str], payload: bytes, start_timeout: timedelta) -> None:
    """Hand the call to the worker once it has started; raises `TimeoutError` when it does not.

    Blocks until the worker has taken it; raises `OSError` or `EOFError` when the worker is gone."""
    channel.settimeout(start_timeout.total_seconds())
    recv_frame(channel, LARGEST)
    channel.settimeout(None)
    send_frame(channel, json.dumps(list(paths)).encode())
    send_frame(channel, payload)


def receive_call(channel: socket.socket) -> tuple[list[str], bytes]:
    """The worker's half of `send_call`: the paths and the pickled call."""
    send_frame(channel, b"")
    paths = json.loads(recv_frame(channel, LARGEST))
    return [str(path) for path in paths], recv_frame(channel, LARGEST)


def send_outcome(channel: socket.socket, outcome: Outcome) -> None:
    """Say how the function ended; blocks until the launcher has taken it."""
    send_frame(channel, pickle.dumps(outcome))


def receive_outcome(channel: socket.socket) -> Outcome:
    """Wait for the function to end, however long it runs; raises `EOFError` or `OSError` when the worker is gone."""
    outcome = pickle.loads(recv_frame(channel, LARGEST))
    assert isinstance(outcome, (WorkerValue, WorkerFailure)), outcome
    return outcome
