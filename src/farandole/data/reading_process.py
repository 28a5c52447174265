"""Processes that read and transform row groups, for transforms that hold Python's lock.

Each process is a new interpreter that does not import the user's main module. It receives row groups and sends columns
over a socket. Arrays are sent outside of the pickles (PEP 574), and received into their final memory. A process ends
when its socket is closed, so none outlives the process that started it.
"""

import pickle
import queue
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe

import cloudpickle
import numpy as np

from farandole.data.rounds import Columns
from farandole.data.row_groups import RowGroup
from farandole.data.values import empty_aligned
from farandole.errors import SourceError

__all__ = ["ReadingProcesses"]

# Seconds for a child to end after its socket was closed; then it is killed.
_PATIENCE = 5.0


class ReadingProcesses:
    """`count` processes that call `act`, for as many calling threads; close it to end them.

    `act` is pickled by cloudpickle. Errors of `act` are raised in the calling thread; raises `SourceError` if a process
    dies."""

    def __init__(self, act: Callable[[RowGroup], Columns], count: int) -> None:
        self._children: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        # With the parent's module search path, to import objects that are pickled by name.
        sent = cloudpickle.dumps((sys.path, cloudpickle.dumps(act)))
        try:
            for number in range(count):
                ours, theirs = Pipe()
                with theirs:
                    command = [sys.executable, "-c", f"from {__name__} import main; main({theirs.fileno()})"]
                    child = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
                self._children.append((child, ours))
                ours.send_bytes(sent)
                self._idle.put(number)
        except BaseException:
            self.close()
            raise

    def __call__(self, row_group: RowGroup) -> Columns:
        """Return `act(row_group)` of a process; blocks while all processes are busy, and during the call."""
        number = self._idle.get()
        child, connection = self._children[number]
        try:
            connection.send_bytes(pickle.dumps(row_group))
            failed, made = _receive(connection)
        except (EOFError, OSError) as error:
            raise SourceError(
                str(row_group),
                f"the process that read it ended ({_ending(child)}); its own output says why. Was it short of memory?",
            ) from error
        finally:
            self._idle.put(number)
        if failed:
            raise made  # type: ignore[misc]
        return made  # type: ignore[return-value]

    def close(self) -> None:
        """End the processes; kill those that still run `act`. Call it when no thread makes new calls."""
        idle = set()
        while not self._idle.empty():
            idle.add(self._idle.get())
        for number, (child, connection) in enumerate(self._children):
            if number in idle:
                connection.close()
            else:
                child.kill()  # the thread that waits for its answer gets an error
        for child, _ in self._children:
            try:
                child.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _ending(child: "subprocess.Popen[bytes]") -> str:
    try:
        code = child.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        return "it does not answer"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _send(connection: Connection, message: object) -> None:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    connection.send_bytes(pickle.dumps(([len(each) for each in raw], head)))
    for each in raw:
        if len(each):
            connection.send_bytes(each)


def _receive(connection: Connection) -> tuple[bool, object]:
    sizes, head = pickle.loads(connection.recv_bytes())
    buffers = [empty_aligned((size,), np.dtype(np.uint8)) for size in sizes]
    for buffer in buffers:
        if len(buffer):
            connection.recv_bytes_into(buffer)
    found: tuple[bool, object] = pickle.loads(head, buffers=buffers)
    return found


def _sendable(error: Exception) -> Exception:
    """Return the error, or a `RuntimeError` with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def main(descriptor: int) -> None:
    """Answer requests until the socket is closed; the child's entry point."""
    with Connection(descriptor) as connection:
        try:
            sys.path[:], act_sent = pickle.loads(connection.recv_bytes())
            act = pickle.loads(act_sent)
            while True:
                row_group = pickle.loads(connection.recv_bytes())
                try:
                    answer = False, act(row_group)
                except Exception as error:
                    answer = True, _sendable(error)
                _send(connection, answer)
        except (EOFError, ConnectionError):
            return  # the parent has closed the socket, or has died
