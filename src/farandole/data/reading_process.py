"""Processes that read and transform row groups, for transforms that hold Python's lock.

Each is a fresh interpreter, so that the user's program is not run again. Its arguments and the columns that it makes go
over a socket. Arrays go beside the pickles (PEP 574) and are received where they stay. It ends when its socket does:
none outlives the process that started it.
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

# A child whose socket has closed ends; one that does not is killed.
_PATIENCE = 5.0


class ReadingProcesses:
    """Calls `act` in one of `count` processes, from as many threads; close it to end them.

    `act` is pickled by cloudpickle. Its errors are raised here; a process that died is a `SourceError`."""

    def __init__(self, act: Callable[[RowGroup], Columns], count: int) -> None:
        self._children: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        # The parent's module search path, for objects that are pickled by name.
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
        """Return `act(row_group)`; blocks while all processes are busy, and for the reading."""
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
        """End the processes, after the threads that call: one that is still at a row group is killed."""
        idle = set()
        while not self._idle.empty():
            idle.add(self._idle.get())
        for number, (child, connection) in enumerate(self._children):
            if number in idle:
                connection.close()
            else:
                child.kill()  # the thread that waits for it notices, and is done with the connection
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
    """Return the error, or its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def main(descriptor: int) -> None:
    """Answer until the socket ends."""
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
            return  # the parent needs no more, or is gone
