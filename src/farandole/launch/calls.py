"""Call of a pickled function on one rank, in a process of its own."""

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Self

from farandole.launch.backend import OnLine
from farandole.launch.channel import (
    WORKER_FD,
    LauncherEnd,
    OnMessage,
    Orders,
    Outcome,
    WorkerFailure,
    WorkerValue,
    open_channel,
)
from farandole.launch.exceptions import load_exception
from farandole.launch.failures import Failure, exit_failure
from farandole.launch.processes import GRACE, RankProcess

log = logging.getLogger(__name__)

START_TIMEOUT = timedelta(seconds=120)
EXIT_TIMEOUT = timedelta(seconds=30)  # for a worker's exit handlers, once its function has ended

LAST_LINES = timedelta(milliseconds=200)  # for the last output of a failed rank

AT_ONCE = Orders()


def _ignore(kind: str, payload: Mapping[str, object]) -> None:
    """Ignore a message, for want of a handler."""


class RankCall:
    """A call (pickled by `pickling.dump_call`) that one rank makes in a process of its own.

    `farandole.run` starts one for each rank; a Spark task starts the one of its rank."""

    def __init__(self, process: RankProcess, channel: LauncherEnd, on_end: "Callable[[RankCall], None] | None") -> None:
        self.rank = process.rank
        self.process = process
        self.failure: Failure | None = None  # set when the function has failed; its process may still run
        self._value = b""
        self._channel = channel
        self._on_end = on_end
        self._ended = threading.Event()

    @classmethod
    def start(
        cls,
        payload: bytes,
        env: Mapping[str, str],
        *,
        rank: int,
        on_line: OnLine,
        executable: str = "",
        paths: Sequence[str] | None = None,
        cores: Iterable[int] = (),
        stop_limit: float = 0.0,
        start_timeout: timedelta = START_TIMEOUT,
        orders: Orders | None = AT_ONCE,
        runner: str = "",
        on_message: OnMessage = _ignore,
        on_end: "Callable[[RankCall], None] | None" = None,
    ) -> Self:
        """Start a Python with exactly `env`, and `sys.path` (or `paths`), that makes the call; do not wait for it.

        The worker imports the modules of the call, then makes the call with `orders`; if they are None, with those of
        `begin`. If there is a `runner`, "module:function", it makes the call in the worker. Threads of this rank pass
        the output to `on_line`, the call's messages to `on_message`, and the end, once, to `on_end`. An exception of
        `on_message` is logged. A worker that has not started within `start_timeout` has failed. For `stop_limit` see
        `RankProcess.start`."""
        ours, theirs = open_channel()
        with theirs:
            try:
                process = RankProcess.start(
                    # -P: a user's logging.py in this directory must not replace Python's. `paths` are set later.
                    [executable or sys.executable, "-P", "-m", "farandole.launch.worker"],
                    {**env, WORKER_FD: str(theirs.fileno())},
                    rank=rank,
                    on_line=on_line,
                    pass_fds=(theirs.fileno(),),
                    cores=cores,
                    stop_limit=stop_limit,
                )
            except BaseException:
                ours.close()
                raise
        call = cls(process, ours, on_end)
        if orders is not None:
            ours.begin(orders)
        arguments = (payload, tuple(sys.path if paths is None else paths), runner, start_timeout, on_message)
        threading.Thread(target=call._follow, args=arguments, name=f"farandole-call-{rank}", daemon=True).start()
        return call

    def begin(self, orders: Orders) -> None:
        """Let the call begin; the files in `orders` must stay open until it has ended."""
        self._channel.begin(orders)

    def wait(self, timeout: timedelta) -> bool:
        """Wait for the end of the call: its failure, or its value and the exit of its process."""
        return self._ended.wait(timeout.total_seconds())

    def value(self) -> bytes:
        """Return the function's pickled value, or raise its `RankFailed`. The call must have ended."""
        assert self._ended.is_set()
        if self.failure is not None:
            raise self.failure.error() from self.failure.cause
        return self._value

    def terminate(self, grace: timedelta = GRACE) -> None:
        """End the rank's process; see `RankProcess.terminate`."""
        self.process.terminate(grace)

    def wait_gone(self, timeout: timedelta) -> bool:
        """Wait until no process of the rank is left; see `RankProcess.wait_gone`."""
        return self.process.wait_gone(timeout)

    def _follow(
        self, payload: bytes, paths: Sequence[str], runner: str, start_timeout: timedelta, on_message: OnMessage
    ) -> None:
        """Send the call and wait for its outcome; the body of the thread."""

        def pass_on(kind: str, content: Mapping[str, object]) -> None:
            try:
                on_message(kind, content)
            except Exception:  # of a user's callback; the call goes on
                log.exception("on_message failed for a message of rank %d", self.rank)

        try:
            self._channel.hand_over(paths, runner, payload, start_timeout)
            outcome: Outcome | None = self._channel.receive_outcome(pass_on)
        except TimeoutError:
            self.failure = self._fail(f"did not start within {start_timeout.total_seconds():g} s")
            outcome = None
        except (OSError, EOFError):
            outcome = None  # the exit of the process gives the reason
        if self.failure is None:
            self.failure = self._judge(outcome)
        self._channel.close()
        self._ended.set()
        if self._on_end is not None:
            self._on_end(self)

    def _judge(self, outcome: Outcome | None) -> Failure | None:
        if isinstance(outcome, WorkerFailure):
            self.process.wait(LAST_LINES)
            cause, why = load_exception(outcome.exception)
            return Failure(
                rank=self.rank,
                reason=outcome.reason,
                code=outcome.code,
                at=outcome.at,
                consequence=outcome.consequence,
                traceback=outcome.traceback,
                tail=self.process.tail,
                cause=cause,
                no_cause=why,
            )
        exit = self.process.wait(EXIT_TIMEOUT)
        if isinstance(outcome, WorkerValue):
            self._value = outcome.data
            if exit is None:
                log.warning(
                    "rank %d returned its value but did not end within %g s (a thread or an exit handler of it still "
                    "runs); it is ended now",
                    self.rank,
                    EXIT_TIMEOUT.total_seconds(),
                )
                self.process.terminate()
            elif exit.code != 0:
                return self._fail(f"returned its value, but {exit.reason} while it ended", exit.shell_code)
            return None
        if exit is None:
            return self._fail("closed its connection to the launcher before its function returned")
        if exit.code == 0:
            return self._fail("exited with code 0 before its function returned (os._exit does that)")
        return exit_failure(exit, self.process.tail)

    def _fail(self, reason: str, code: int = 1) -> Failure:
        return Failure(rank=self.rank, reason=reason, code=code, tail=self.process.tail)
