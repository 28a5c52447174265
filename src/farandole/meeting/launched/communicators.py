"""Communicators of mpi4py, which programs of Horovod pass to `init` and to process sets."""

import ctypes
import logging
import sys
from collections.abc import Sequence
from typing import Protocol, TypeGuard

log = logging.getLogger(__name__)


class Communicator(Protocol):
    """The methods of `mpi4py.MPI.Comm` that farandole calls."""

    def Get_size(self) -> int: ...

    def Get_group(self) -> object: ...


def is_communicator(given: object) -> TypeGuard[Communicator]:
    """Return whether `given` is a communicator of mpi4py, which this function does not import."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and isinstance(given, mpi.Comm)


def handle_of(communicator: Communicator) -> int:
    """Return the communicator as MPI's library knows it: an address or a number."""
    mpi = sys.modules["mpi4py.MPI"]
    return int.from_bytes(ctypes.string_at(mpi._addressof(communicator), mpi._sizeof(communicator)), sys.byteorder)


def own_place() -> int:
    """Return this process' rank in MPI_COMM_WORLD."""
    return int(sys.modules["mpi4py.MPI"].COMM_WORLD.Get_rank())


def places_of(communicator: Communicator) -> Sequence[int]:
    """Return the ranks in MPI_COMM_WORLD of the communicator's processes; none for MPI_COMM_NULL."""
    mpi = sys.modules["mpi4py.MPI"]
    if communicator == mpi.COMM_NULL:
        return []
    ranks = list(range(communicator.Get_size()))
    # mpi4py 3 has a function of the class, mpi4py 4 a method.
    return list(mpi.Group.Translate_ranks(communicator.Get_group(), ranks, mpi.COMM_WORLD.Get_group()))


def spans(communicator: Communicator, size: int) -> bool:
    """Return whether the communicator has the `size` ranks of the job, or MPI knows this process alone."""
    return communicator.Get_size() == size or _processes() == 1


def warn_of_lone_processes(size: int) -> None:
    """Log a warning if mpi4py runs in this rank of `size` ranks, which were started without MPI."""
    if size > 1 and _processes() == 1:
        log.warning(
            "mpi4py runs in this rank, but its COMM_WORLD has one process, because the launcher has started the %d "
            "ranks without MPI; start them with: horovodrun --mpi -np %d, farandole run --mpi, or mpirun",
            size,
            size,
        )


def _processes() -> int:
    """Return the size of MPI_COMM_WORLD; 0 where mpi4py has not started MPI."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi.COMM_WORLD.Get_size() if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else 0
