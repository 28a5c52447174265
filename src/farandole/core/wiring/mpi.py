"""MPI as the fabric of a job: its ranks' places in MPI_COMM_WORLD, and a communicator of them."""

from collections.abc import Sequence

from farandole._native import MpiComm
from farandole.bootstrap.mpi import MpiProcess, call_in_time
from farandole.bootstrap.mpi_library import find_library
from farandole.config import Config
from farandole.errors import ConfigError, FabricError, InvalidRequest, RendezvousError, spell_ranks
from farandole.handshake import Deadline
from farandole.other_launchers import find_other_launch

__all__ = ["NO_MPI", "join_mpi", "make_communicator"]

NO_MPI = -1  # the place in MPI_COMM_WORLD of a rank whose fabric is another


def join_mpi(size: int, config: Config, deadline: Deadline) -> MpiProcess | None:
    """Return this process's place in MPI, which is started unless it runs; None if the fabric is another.

    A job of `size` 1 moves no tensors, so it needs no MPI. Blocks up to `deadline`. Raises `ConfigError` when there is
    no MPI library."""
    if config.fabric != "mpi" or size == 1:
        return None
    return MpiProcess(find_library(find_other_launch(), config.mpi_library), "fabric", deadline)


def make_communicator(process: MpiProcess | None, places: Sequence[int], deadline: Deadline) -> MpiComm | None:
    """Return a communicator of the ranks, rank r being number `places[r]` of MPI_COMM_WORLD; None without MPI.

    Blocks until all ranks have called, or `deadline` raises. Raises `ConfigError` when ranks chose different fabrics or
    are no processes of one MPI, `RendezvousError` when MPI fails."""
    without = [rank for rank, place in enumerate(places) if place == NO_MPI]
    if len(without) == len(places):
        return None
    if without or process is None:
        raise ConfigError("fabric", f"is mpi, but not on {spell_ranks(without)}; set it alike on all ranks")
    if len(set(places)) < len(places):
        raise ConfigError(
            "fabric",
            f"is mpi, but {process.path} ({process.abi}) sees {process.size} of the {len(places)} ranks. Start them "
            f"with: mpirun -n {len(places)} python train.py, and FARANDOLE_FABRIC=mpi in the environment of all ranks",
        )
    try:
        return call_in_time(lambda: MpiComm(process.library, list(places)), deadline)
    except InvalidRequest as error:
        raise ConfigError(error.name, error.problem) from error
    except FabricError as error:
        raise RendezvousError(f"MPI cannot connect the ranks: {error.problem}") from error
    except TimeoutError as error:
        raise RendezvousError("MPI did not connect the ranks in time; did all of them call init?") from error
