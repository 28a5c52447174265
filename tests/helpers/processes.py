"""Ranks as processes, on the parent's side. The child's side is `rank_process.py`."""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Self

import cloudpickle

from farandole.config import Config
from farandole.meeting.frames import Deadline, recv_frame, send_frame
from farandole.meeting.handshake import new_secret
from farandole.meeting.rendezvous import RendezvousServer
from farandole.topology import JobEnvironment
from helpers.outcomes import Death, Outcome
from helpers.programs import WarmProcess

GRACE = 10.0  # seconds for the other ranks to end by themselves after the first failure
TAIL = 4000  # last characters of a failed rank's output to show
LARGEST_RESULT = 1 << 30
CHILD = Path(__file__).with_name("rank_process.py")


class _Child:
    """One rank's process, with a process group of its own, its output in a file, and its result on a socket."""

    def __init__(self, rank: int, env: dict[str, str], prefix: Sequence[str], framework: str | None) -> None:
        self.rank = rank
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in `end`
        self.channel, theirs = socket.socketpair()
        self.process: subprocess.Popen[bytes] | WarmProcess
        with theirs:
            command = [*prefix, sys.executable, str(CHILD), str(theirs.fileno())]
            if framework is not None:
                output = self.output.fileno()
                self.process = WarmProcess(
                    command, framework, env=env, stdout=output, stderr=output, pass_fds=(theirs.fileno(),)
                )
                return
            self.process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )

    def outcome(self) -> Outcome:
        """Read the outcome that the process has sent, or return its death if it has sent none."""
        try:
            deadline = Deadline(timedelta(seconds=30))
            value, error, trace, at = cloudpickle.loads(recv_frame(self.channel, LARGEST_RESULT, deadline=deadline))
        except (EOFError, ConnectionError):
            death = Death(self.process.wait(30))
            # at=0.0: a death counts as the first failure. Ranks that fail because of it may report theirs earlier.
            return Outcome(rank=self.rank, value=death, trace=f"its process {death}", output=self.tail(), at=0.0)
        output = self.tail() if error is not None else ""
        return Outcome(rank=self.rank, value=value, error=error, trace=trace, output=output, at=at)

    def stacks(self, timeout: float) -> Outcome:
        """Have the process print the stacks of its threads; return them as the outcome of a rank that hangs."""
        size = self._output_size()
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGUSR1)
            deadline = time.monotonic() + 2.0
            while self._output_size() == size and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.05)  # the process prints the stacks with several writes
        return Outcome(
            rank=self.rank,
            trace=f"did not end within {timeout:g} s, or of the first failure",
            output=self.tail() or "(no output)",
        )

    def tail(self) -> str:
        start = max(0, self._output_size() - TAIL)
        return os.pread(self.output.fileno(), TAIL, start).decode(errors="replace")

    def _output_size(self) -> int:
        return os.fstat(self.output.fileno()).st_size

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # no process of the group is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        self.channel.close()
        self.output.close()


class _Children:
    """The processes of all ranks; the end of the `with` block kills them."""

    def __init__(
        self, envs: list[dict[str, str]], prefixes: Sequence[Sequence[str]], framework: str | None = None
    ) -> None:
        self.all: list[_Child] = []
        self.envs, self.prefixes, self.framework = envs, prefixes, framework

    def __enter__(self) -> Self:
        try:
            for rank, (env, prefix) in enumerate(zip(self.envs, self.prefixes, strict=True)):
                self.all.append(_Child(rank, env, prefix, self.framework))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.all:
            child.end()


def run_processes(
    size: int,
    body: Callable[..., object],
    args: tuple[object, ...],
    *,
    timeout: float,
    config: Config,
    dies: Collection[int] = (),
    address: str = "127.0.0.1",
    prefixes: Sequence[Sequence[str]] | None = None,
    framework: str | None = None,
) -> list[Outcome]:
    """Run `body(context, *args)` in `size` processes; return the outcomes in the order in which they arrived.

    `address` is that of the rendezvous; `prefixes` are words before each rank's command, such as `ip netns exec`. With
    a `framework`, which excludes `prefixes`, processes start with its modules imported."""
    task = _pickled(body, args, config)
    secret = new_secret()
    with RendezvousServer(size, secret, host=address) as server:
        envs = [
            os.environ
            | JobEnvironment(rank=rank, size=size, rendezvous=server.address, secret=secret, job="test").write()
            for rank in range(size)
        ]
        with _Children(envs, prefixes or [()] * size, framework) as children, selectors.DefaultSelector() as selector:
            for child in children.all:
                child.channel.settimeout(30)
                with contextlib.suppress(BrokenPipeError):  # the process is dead; its outcome shows that
                    send_frame(child.channel, task)
                selector.register(child.channel, selectors.EVENT_READ, child)
            return _collect(selector, size, timeout, dies)


def _collect(selector: selectors.BaseSelector, size: int, timeout: float, dies: Collection[int]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + timeout
    while len(outcomes) < size and (left := deadline - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            child: _Child = key.data
            selector.unregister(child.channel)
            outcome = _judge(child.outcome(), dies)
            outcomes.append(outcome)
            if outcome.failed:
                deadline = min(deadline, time.monotonic() + GRACE)
    waiting: list[_Child] = [key.data for key in selector.get_map().values()]
    return outcomes + [child.stacks(timeout) for child in waiting]


def _judge(outcome: Outcome, dies: Collection[int]) -> Outcome:
    """Return the outcome, with death as success for a rank in `dies`, and anything else as its failure."""
    if outcome.rank not in dies:
        return outcome
    if isinstance(outcome.value, Death):
        return Outcome(rank=outcome.rank, value=outcome.value)
    return Outcome(rank=outcome.rank, error=outcome.error, trace=f"was expected to die\n{outcome.trace}")


def _pickled(body: Callable[..., object], args: tuple[object, ...], config: Config) -> bytes:
    """Pickle the task, with test modules by value, because a child cannot import them under pytest's names."""
    module = sys.modules[body.__module__]
    by_value = not body.__module__.startswith("helpers.")
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps((sys.path, config, cloudpickle.dumps((body, args)))))
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
