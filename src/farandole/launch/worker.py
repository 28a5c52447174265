"""Worker for one rank, started as `python -m farandole.launch.worker`: runs one pickled call, reports its outcome."""

import contextlib
import faulthandler
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import TypeAlias

from farandole.launch.channel import WORKER_FD, Orders, Outcome, WorkerEnd, WorkerFailure, WorkerValue
from farandole.launch.exceptions import dump_exception
from farandole.launch.failures import is_consequence
from farandole.launch.pickling import dumps, find_unpicklable

# Function that makes the call in the worker. It gets the channel, the orders, the function and its arguments.
Runner: TypeAlias = Callable[[WorkerEnd, Orders, Callable[..., object], Sequence[object], Mapping[str, object]], object]


def main() -> int:
    """Serve the launcher at the other end of FARANDOLE_WORKER_FD; returns this process's exit code."""
    faulthandler.enable()
    with socket.socket(fileno=int(os.environ.pop(WORKER_FD))) as connection:
        connection.set_inheritable(False)
        channel = WorkerEnd(connection)
        paths, runner, payload = channel.receive_call()
        sys.path[:] = paths  # the launcher's modules can be imported here, too
        outcome = run_call(payload, channel, runner)
        flush_output()
        channel.send_outcome(outcome)
    return outcome.code if isinstance(outcome, WorkerFailure) else 0


def flush_output() -> None:
    """Flush stdout and stderr as far as possible: the function may have closed, replaced or removed them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the interpreter's exit tries again, and has code 120 if that fails
            stream.flush()


def run_call(payload: bytes, channel: WorkerEnd | None = None, runner: str = "") -> Outcome:
    """Unpickle the call, make it according to the orders on `channel`, and pickle its value or its failure.

    Blocks until the orders arrive; without a channel the call begins at once. Unpickling imports the modules of the
    function, often a framework, before it waits for the orders."""
    try:
        fn, args, kwargs = pickle.loads(payload)
        run: Runner | None = resolve_name(runner) if runner else None
        orders = Orders() if channel is None else channel.receive_orders()
        os.environ.update(orders.env)
        value = fn(*args, **kwargs) if run is None or channel is None else run(channel, orders, fn, args, kwargs)
        return _value(value if orders.keep else None)
    except SystemExit as error:
        if not error.code:
            return _value(None)
        code = error.code if isinstance(error.code, int) else 1
        return _failure(f"called sys.exit({error.code!r})", error, code & 0xFF or 1)
    except BaseException as error:
        return _failure(_described(error), error, 1)


def _described(error: BaseException) -> str:
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    if str(error) or not frames or not isinstance(error, Exception):
        return text
    # As after a bare `assert`: the line says more.
    last = frames[-1]
    return f"{text} in {last.filename}, line {last.lineno}" + (f": {last.line}" if last.line else "")


def _value(value: object) -> Outcome:
    try:
        return WorkerValue(data=dumps(value))
    except Exception as error:
        path, why = find_unpicklable(value, "value") or ("value", f"{type(error).__name__}: {error}")
        reason = f"returned a value that cannot be pickled: {path} ({why}); return plain data instead"
        return replace(_failure(reason, error, 1), traceback="")  # the path says more than farandole's own frames


def _failure(reason: str, error: BaseException, code: int) -> WorkerFailure:
    # Without the first frame, that of run_call.
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return WorkerFailure(
        reason=reason,
        traceback="".join(traceback.format_exception(type(error), error, frames)),
        at=time.monotonic(),
        code=code,
        consequence=is_consequence(error),
        exception=dump_exception(error),
    )


if __name__ == "__main__":
    sys.exit(main())
