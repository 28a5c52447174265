"""`python -m farandole.launch.worker`: run one pickled function as one rank, and tell the launcher how it ended."""

import faulthandler
import os
import pickle
import socket
import sys
import time
import traceback
from dataclasses import replace

from farandole.launch.channel import WORKER_FD, Outcome, WorkerFailure, WorkerValue, receive_call, send_outcome
from farandole.launch.failures import is_consequence
from farandole.launch.pickling import dumps, find_unpicklable

__all__ = ["main"]


def main() -> int:
    """Serve the launcher at the other end of FARANDOLE_WORKER_FD; returns this process's exit code."""
    faulthandler.enable()
    with socket.socket(fileno=int(os.environ.pop(WORKER_FD))) as channel:
        channel.set_inheritable(False)
        paths, payload = receive_call(channel)
        sys.path[:] = paths  # what the launcher can import can be imported here
        outcome = _run(payload)
        sys.stdout.flush()
        sys.stderr.flush()
        send_outcome(channel, outcome)
    return outcome.code if isinstance(outcome, WorkerFailure) else 0


def _run(payload: bytes) -> Outcome:
    """Unpickle the call, make it, and pickle what comes of it."""
    try:
        fn, args, kwargs = pickle.loads(payload)
        return _value(fn(*args, **kwargs))
    except SystemExit as error:
        if not error.code:
            return _value(None)
        code = error.code if isinstance(error.code, int) else 1
        return _failure(f"called sys.exit({error.code!r})", error, code & 0xFF or 1)
    except BaseException as error:
        return _failure("".join(traceback.format_exception_only(error)).strip(), error, 1)


def _value(value: object) -> Outcome:
    try:
        return WorkerValue(data=dumps(value))
    except Exception as error:
        path, why = find_unpicklable(value, "value") or ("value", f"{type(error).__name__}: {error}")
        reason = f"returned a value that cannot be pickled: {path} ({why}); return plain data instead"
        return replace(_failure(reason, error, 1), traceback="")  # the path says more than our own frames


def _failure(reason: str, error: BaseException, code: int) -> WorkerFailure:
    # The first frame is that of _run itself.
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return WorkerFailure(
        reason=reason,
        traceback="".join(traceback.format_exception(type(error), error, frames)),
        at=time.monotonic(),
        code=code,
        consequence=is_consequence(error),
        exception=_exception(error),
    )


def _exception(error: BaseException) -> bytes:
    """`error` pickled, if it comes out again; many classes with arguments of their own do not."""
    try:
        data = dumps(error)
        return data if isinstance(pickle.loads(data), type(error)) else b""
    except Exception:
        return b""  # its text and trace travel in any case


if __name__ == "__main__":
    sys.exit(main())
