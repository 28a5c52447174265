"""Pool of processes that read and transform row groups, for functions that hold Python's lock.

Starting an interpreter takes longer than many an epoch of small files. So the processes of a closed pool wait for the
next one, in another epoch or of another loader; see `farandole.data.loading.reading_process`."""

import atexit
import functools
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe
from typing import TypeAlias

import cloudpickle
import numpy as np

from farandole.data.loading import reading_process
from farandole.data.loading.pool import PATIENCE, Pending, ReadPool, attempt
from farandole.data.loading.reading_process import READY, Outcome, SharedMemory
from farandole.data.loading.rounds import Piece
from farandole.data.loading.values import empty_aligned
from farandole.errors import SourceError

_Asked: TypeAlias = list[tuple[int, Pending[Piece]]]

# Seconds until a process ends that no pool uses.
_IDLE = 60.0
# Requests that a process has at once: it reads for the second while this process takes the answer to the first.
_DEPTH = 2
# Seconds for a process to end its requests when the pool is closed; then it is killed.
_PATIENCE = 1.0


class ProcessPool(ReadPool[int, Piece]):
    """`count` processes that act on runs of row groups, each with a thread here; close the pool to let them go.

    Arguments are the row groups' numbers, and `name` returns their names. `act` is pickled by cloudpickle. `keep` takes
    each result here. The error of a result is that of `act` or `keep`, or `SourceError` if a process has died."""

    def __init__(
        self,
        act: Callable[[Sequence[int]], Iterable[Outcome]],
        count: int,
        weigh: Callable[[int], int],
        name: Callable[[int], object],
        keep: Callable[[Piece], Piece] = lambda piece: piece,
    ) -> None:
        super().__init__(act, lambda: count, weigh)
        # With this process's module search path, to import objects that are pickled by name.
        self._sent = pickle.dumps((sys.path, cloudpickle.dumps(act)))
        self._name, self._keep = name, keep
        self._leased: list[_Process] = []

    def close(self) -> None:
        """Cancel all unfinished results, and end the threads; kill processes that do not end their requests soon."""
        self.cancel()
        self.join(_PATIENCE)
        for process in list(self._leased):
            process.kill()
        self.join(PATIENCE)

    def _work(self) -> None:
        process: _Process | None = None
        underway: deque[_Asked] = deque()
        while True:
            while len(underway) < _DEPTH and (asked := self._take(wait=not underway)):
                underway.append(asked)
                try:
                    process = process or self._lease()
                    process.ask([number for number, _ in asked])
                except Exception as error:  # no process can be started
                    self._settle((pending, error) for _, pending in underway.pop())
            if process is None or not underway:
                break
            asked = underway.popleft()
            try:
                found = process.answer()
                outcomes = [each if isinstance(each, BaseException) else attempt(self._keep, each) for each in found]
            except (EOFError, OSError) as error:
                outcomes = [_lost(process, self._name(number), error) for number, _ in asked]
            except Exception as error:  # an answer cannot be unpickled here
                outcomes = [error] * len(asked)
            self._settle(zip((pending for _, pending in asked), outcomes, strict=True))
        if process is not None:
            self._leased.remove(process)
            if process.finish():
                _idle_processes().append(process)
            else:
                _end(process)

    def _lease(self) -> "_Process":
        """Return a process that has loaded the function; if a new one ends at once, its first answer tells."""
        while True:
            try:
                process, fresh = _idle_processes().pop(), False
            except IndexError:
                process, fresh = _Process(), True
            self._leased.append(process)  # before the function is loaded, so that `close` can kill the process
            if process.begin(self._sent) or fresh or self._closed.is_set():
                return process
            self._leased.remove(process)
            _end(process)  # it had no pool for too long


class _Process:
    """A process, with its socket and the memory of its answers."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._memories = [os.memfd_create("farandole-rows") for _ in range(_DEPTH)]
        self._shared = [SharedMemory(memory) for memory in self._memories]
        self._asked = self._answered = 0
        passed = [theirs.fileno(), *self._memories]
        program = f"from {reading_process.__name__} import main; main{(_IDLE, *passed)}"
        try:
            with theirs:
                command = [sys.executable, "-P", "-c", program]  # -P: ignores a logging.py in this directory
                self._child = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL)
        except BaseException:
            self.disconnect()
            raise

    def begin(self, sent: bytes) -> bool:
        """Give the process the function that it is to call, and wait for it; return whether the process is alive."""
        try:
            self._connection.send_bytes(sent)
            return self._connection.recv_bytes() == READY
        except (EOFError, OSError):
            return False

    def ask(self, numbers: Sequence[int]) -> None:
        """Request these row groups; the process must have fewer than `_DEPTH` requests.

        Does not wait for the process, which may wait until its answer is received: a socket holds a run of numbers."""
        with suppress(OSError):  # the process has died, which `answer` raises
            self._connection.send_bytes(pickle.dumps((self._asked % _DEPTH, numbers)))
        self._asked += 1

    def answer(self) -> list[Outcome]:
        """Return the answers to the oldest request; blocks. Raises `EOFError` or `OSError` if the process has died."""
        nbytes, spans, head = pickle.loads(self._connection.recv_bytes())
        memory = self._shared[self._answered % _DEPTH]
        self._answered += 1
        copied = empty_aligned((nbytes,), np.dtype(np.uint8))
        if nbytes:
            with memory.view(nbytes) as view:
                copied[:] = view
        outcomes: list[Outcome] = pickle.loads(head, buffers=[copied[first:last] for first, last in spans])
        return outcomes

    def finish(self) -> bool:
        """Let the process wait for the next pool; return whether it is alive. It must have no request."""
        for memory in self._shared:
            memory.unmap()
        try:
            self._connection.send_bytes(pickle.dumps(None))
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """Kill the process; whoever waits for its answer gets an error."""
        self._child.kill()

    def disconnect(self, *, of_parent: bool = False) -> None:
        """Close socket and memory, which ends the process; it is not waited for if it belongs to this one's parent."""
        self._connection.close()
        for memory, descriptor in zip(self._shared, self._memories, strict=True):
            memory.unmap()
            os.close(descriptor)
        if of_parent:
            self._child.returncode = 0

    def ending(self) -> str:
        """Wait for the end of the process, or kill it; return how it ended."""
        try:
            code = self._child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            return "it did not answer"
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def _lost(process: _Process, row_group: object, error: Exception) -> SourceError:
    problem = f"the process that read it ended ({process.ending()}); its own output says why. Was it short of memory?"
    lost = SourceError(str(row_group), problem)
    lost.__cause__ = error
    return lost


@functools.cache
def _idle_processes() -> list[_Process]:
    """Return the processes that wait for a pool, a list that threads may change.

    They end with this process; one that was forked leaves them to its parent."""
    idle: list[_Process] = []

    def forget() -> None:
        while idle:
            idle.pop().disconnect(of_parent=True)

    atexit.register(end_idle)
    os.register_at_fork(after_in_child=forget)
    return idle


def end_idle() -> None:
    """End the processes that wait for a pool."""
    ended = []
    with suppress(IndexError):
        while True:
            ended.append(_idle_processes().pop())
    for process in ended:
        process.disconnect()
    for process in ended:
        process.ending()


def _end(process: _Process) -> None:
    process.disconnect()
    process.ending()
