"""Exchange through an MPI that the program has started, here by a stand-in for its library."""

import ctypes
import threading
from datetime import timedelta
from typing import Any

import pytest

from farandole.errors import RendezvousError
from farandole.meeting.frames import Deadline
from farandole.meeting.launched import mpi
from farandole.meeting.launched.mpi import MpiProcess

SINGLE, MULTIPLE = 0, 3
LIMIT = timedelta(seconds=30)


class Library:
    """MPI that runs already and allows `level` of threads; a broadcast ends once the other rank has arrived."""

    def __init__(self, level: int) -> None:
        self.arrived = threading.Event()
        self.caller: threading.Thread | None = None  # of the broadcast
        for name, value in (("Initialized", 1), ("Finalized", 0), ("Query_thread", level)):
            setattr(self, f"MPI_{name}", lambda result, value=value: _fill(result, value))
        for name, value in (("rank", 0), ("size", 2)):
            setattr(self, f"MPI_Comm_{name}", lambda world, result, value=value: _fill(result, value))

    def MPI_Bcast(self, *arguments: object) -> int:
        self.caller = threading.current_thread()
        assert self.arrived.wait(LIMIT.total_seconds())
        return 0


def _fill(result: Any, value: int) -> int:
    result._obj.value = value
    return 0


def process(library: Library, monkeypatch: pytest.MonkeyPatch) -> MpiProcess:
    monkeypatch.setattr(mpi._Abi, "of", lambda library: mpi._Abi("MPICH's ABI", 1, 2, 3, MULTIPLE))
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: library)
    return MpiProcess("libmpi.so.12", "PMI_SIZE", Deadline(LIMIT))


def test_a_rank_that_does_not_call_init_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(MULTIPLE)
    joined = process(library, monkeypatch)
    assert (joined.rank, joined.size) == (0, 2)
    opener = threading.Timer(5.0, library.arrived.set)  # ends a broadcast without a deadline
    opener.start()
    with pytest.raises(RendezvousError, match="MPI did not connect the processes in time; did all of them call init"):
        joined.broadcast(ctypes.create_string_buffer(8), Deadline(timedelta(seconds=0.1)))
    opener.cancel()
    library.arrived.set()
    opener.join()
    assert library.caller is not None
    library.caller.join(LIMIT.total_seconds())


def test_an_mpi_without_threads_is_called_by_the_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(SINGLE)
    library.arrived.set()
    process(library, monkeypatch).broadcast(ctypes.create_string_buffer(8), Deadline(LIMIT))
    assert library.caller is threading.current_thread()
