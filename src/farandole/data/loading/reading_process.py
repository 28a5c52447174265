"""The child's side of `farandole.data.loading.process_pool`: a process that reads and transforms row groups.

It is a new interpreter that does not import the user's main module. Requests and answers pass through a socket, arrays
through memory that both processes map. Arrays are sent outside of the pickles (PEP 574). A process ends when its socket
is closed, so none outlives the process that started it.
"""

import mmap
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import TypeAlias

from farandole.data.loading.rounds import Piece
from farandole.data.loading.values import ALIGNMENT

READY = b"ready"
# Bytes of the smallest array that passes through memory; the pickles hold smaller ones.
_LEAST_SHARED = 1 << 10

# A row group's rows, or the error of reading or transforming them.
Outcome: TypeAlias = Piece | BaseException


class SharedMemory:
    """Memory of a file descriptor, which two processes map; the child enlarges it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mapped: mmap.mmap | None = None

    def view(self, nbytes: int, *, enlarge: bool = False) -> memoryview:
        """Return the first `nbytes` >= 1; the caller must release the view before any other call."""
        if self._mapped is None or len(self._mapped) < nbytes:
            self.unmap()
            if enlarge:
                os.ftruncate(self._descriptor, nbytes)
            self._mapped = mmap.mmap(self._descriptor, 0)
        return memoryview(self._mapped)[:nbytes]

    def unmap(self, *, free: bool = False) -> None:
        """End the mapping; with `free` also free the memory, which no process may map then."""
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
        if free:
            os.ftruncate(self._descriptor, 0)


def main(idle: float, descriptor: int, *memories: int) -> None:
    """Serve one pool after the other, until none comes for `idle` seconds; the child's entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the parent, which decides
    shared = [SharedMemory(memory) for memory in memories]
    with Connection(descriptor) as connection:
        try:
            while connection.poll(idle):
                _serve(connection, shared)
        except (EOFError, ConnectionError):
            return  # the parent has closed the socket, or has died


def _serve(connection: Connection, shared: Sequence[SharedMemory]) -> None:
    """Outcome the requests of one pool until it sends None."""
    sys.path[:], sent = pickle.loads(connection.recv_bytes())
    act = _loaded(sent)
    connection.send_bytes(READY)
    while (asked := pickle.loads(connection.recv_bytes())) is not None:
        place, numbers = asked
        outcomes = [_sendable(each) if isinstance(each, BaseException) else each for each in act(numbers)]
        try:
            message = _written(outcomes, shared[place])
        except Exception as error:  # columns that cannot be pickled
            message = _written([_sendable(error)] * len(numbers), shared[place])
        connection.send_bytes(message)
    for memory in shared:
        memory.unmap(free=True)


def _loaded(sent: bytes) -> Callable[[Sequence[int]], Iterable[Outcome]]:
    """Return the parent's function, or one that answers with the error of loading it."""
    try:
        act: Callable[[Sequence[int]], Iterable[Outcome]] = pickle.loads(sent)
    except Exception as error:
        failure = error

        def act(numbers: Sequence[int]) -> Iterable[Outcome]:
            return [failure] * len(numbers)

    return act


def _written(outcomes: Sequence[Outcome], memory: SharedMemory) -> bytes:
    """Write arrays to the memory; return the message with all else."""
    buffers: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= _LEAST_SHARED:
            buffers.append(raw)
            return False
        return True

    head = pickle.dumps(outcomes, protocol=5, buffer_callback=is_small)
    spans, end = [], 0
    for raw in buffers:
        spans.append((end, end + raw.nbytes))
        end += -(-raw.nbytes // ALIGNMENT) * ALIGNMENT
    if end:
        with memory.view(end, enlarge=True) as view:
            for (first, last), raw in zip(spans, buffers, strict=True):
                view[first:last] = raw
    return pickle.dumps((end, spans, head))


def _sendable(error: BaseException) -> BaseException:
    """Return the error, or a `RuntimeError` with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
