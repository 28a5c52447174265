"""MPI as the fabric of a job: this process' place in MPI_COMM_WORLD, and the ranks' communicator."""

from collections.abc import Sequence

from farandole._native import MpiComm
from farandole.config import Config
from farandole.errors import ConfigError, FabricError, InvalidRequest, RendezvousError
from farandole.meeting.handshake import Deadline
from farandole.meeting.launched.mpi import MpiProcess, call_in_time
from farandole.meeting.launched.mpi_library import find_library
from farandole.other_launchers import find_other_launch

__all__ = ["join_mpi", "make_communicator"]


def join_mpi(config: Config, deadline: Deadline) -> MpiProcess:
    """Start MPI unless it runs, and return this process' place in it.

    Blocks up to `deadline`. Raises `ConfigError` if there is no MPI library."""
    return MpiProcess(find_library(find_other_launch(), config.mpi_library), "fabric", deadline)


def make_communicator(process: MpiProcess, places: Sequence[int], deadline: Deadline) -> MpiComm:
    """Return a communicator of the ranks, rank r being number `places[r]` of MPI_COMM_WORLD.

    Blocks until all ranks have called, up to `deadline`. Raises `ConfigError` if the ranks are not processes of one MPI
    job, and `RendezvousError` if MPI fails or does not answer in time."""
    if len(set(places)) < len(places):
        raise ConfigError(
            "fabric",
            f"is mpi, but {process.path} ({process.abi}) sees {process.size} of the {len(places)} ranks. Start them "
            f"with: mpirun -n {len(places)} python train.py, and FARANDOLE_FABRIC=mpi in the environment of all ranks",
        )
    without = "FARANDOLE_FABRIC=tcp does without MPI"
    try:
        return call_in_time(lambda: MpiComm(process.library, list(places)), deadline)
    except InvalidRequest as error:
        raise ConfigError(error.name, error.problem) from error
    except FabricError as error:
        raise RendezvousError(f"MPI cannot connect the ranks: {error.problem}; {without}") from error
    except TimeoutError as error:
        raise RendezvousError(f"MPI did not connect the ranks in time; did all call init? {without}") from error
