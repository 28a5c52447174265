"""MPI as the fabric of a job: this process in MPI_COMM_WORLD, and the ranks' communicator."""

from collections.abc import Sequence
from typing import Self

from farandole import _native
from farandole.config import Config
from farandole.core.wiring.fabric import Fabric
from farandole.errors import ConfigError, FabricError, InvalidRequest, RendezvousError
from farandole.meeting.frames import Deadline
from farandole.meeting.launched.interconnects import find_interconnects
from farandole.meeting.launched.mpi import MpiProcess, call_in_time
from farandole.meeting.launched.mpi_library import find_library
from farandole.meeting.rendezvous import Rendezvous
from farandole.other_launchers import find_other_launch


class MpiFabric(Fabric):
    """The library of mpirun; a rank's address is its number in MPI_COMM_WORLD."""

    name = "mpi"

    def __init__(self, process: MpiProcess, reason: str = "") -> None:
        self._process, self.address, self.reason = process, str(process.rank), reason

    def __str__(self) -> str:
        return f"MPI, {self._process.path} ({self._process.abi})"

    @classmethod
    def requested(cls, config: Config, deadline: Deadline) -> Self:
        """Start MPI unless it runs. Blocks up to `deadline`. Raises `ConfigError` if there is no MPI library."""
        return cls(MpiProcess(find_library(find_other_launch(), config.mpi_library), "fabric", deadline))

    @classmethod
    def found(cls, rendezvous: Rendezvous, config: Config, deadline: Deadline) -> Self | str:
        """Return MPI if the ranks have met over it, so that it runs, and this host has an interconnect."""
        launch = rendezvous.whole.launch
        if launch is None or not launch.by_mpi:
            return ""
        ports = find_interconnects()
        usable = [each.name for each in ports if not each.obstacle]
        if not usable:
            return "; ".join(map(str, ports))
        fabric = cls.requested(config, deadline)
        if not fabric._process.allows_threads():
            return "the program has started MPI without MPI_THREAD_MULTIPLE"
        fabric.reason = usable[0]
        return fabric

    def connect(self, addresses: Sequence[str], deadline: Deadline) -> _native.Fabric:
        """Make the ranks' communicator; raises `ConfigError` if the ranks are not processes of one MPI job."""
        numbers = list(map(int, addresses))
        if len(set(numbers)) < len(numbers):
            raise ConfigError(
                "fabric",
                f"is mpi, but {self._process.path} ({self._process.abi}) sees {self._process.size} of the "
                f"{len(numbers)} ranks. Start them with: mpirun -n {len(numbers)} python train.py, and "
                "FARANDOLE_FABRIC=mpi in the environment of all ranks",
            )
        without = "FARANDOLE_FABRIC=tcp does without MPI"
        try:
            return call_in_time(lambda: _native.MpiFabric(self._process.library, numbers), deadline)
        except InvalidRequest as error:
            raise ConfigError(error.name, error.problem) from error
        except FabricError as error:
            raise RendezvousError(f"MPI cannot connect the ranks: {error.problem}; {without}") from error
        except TimeoutError as error:
            raise RendezvousError(f"MPI did not connect the ranks in time; did all call init? {without}") from error
