"""Horovod's queries about the build, such as `mpi_built`. In farandole nothing of this is chosen at build time."""

from farandole.core import default
from farandole.errors import ConfigError
from farandole.meeting.launched.mpi import mpi_allows_threads
from farandole.other_launchers import find_other_launch
from farandole.topology import JobEnvironment


def mpi_threads_supported() -> bool:
    """Return whether all threads may call MPI, below mpirun and `horovodrun --mpi`; raises `ConfigError` elsewhere."""
    default.context()  # raises before `init`, which starts MPI
    supported = mpi_allows_threads() if mpi_built() else None
    if supported is not None:
        return supported
    raise ConfigError("mpi_threads_supported", "MPI is not enabled; farandole connects the ranks itself")


def mpi_enabled() -> bool:
    """Return whether tensors go over MPI: `fabric` is "mpi", or is "auto" and has chosen MPI."""
    return default.is_initialized() and default.context().fabric == "mpi"


def mpi_built() -> bool:
    """Return whether MPI has started the ranks, as mpirun and `horovodrun --mpi` do.

    farandole is built without MPI and opens the library there."""
    found = find_other_launch()
    return found is not None and found.by_mpi and JobEnvironment.read() is None


def gloo_enabled() -> bool:
    """Return True: programs use it to find out whether ranks can communicate without MPI."""
    return True


def gloo_built() -> bool:
    """Return True: programs use it to find out whether ranks can communicate without MPI."""
    return True


def nccl_built() -> int:
    """Return 0: farandole is not built with NCCL, but opens it at run time.

    Programs use the version to scale the learning rate of Adasum, because Horovod with NCCL averages within each host
    first. farandole does not."""
    return 0


def ddl_built() -> bool:
    """Return False."""
    return False


def ccl_built() -> bool:
    """Return False."""
    return False


def cuda_built() -> bool:
    """Return True: programs use it to find out whether tensors may be on GPUs. CUDA's driver is opened when needed."""
    return True


def rocm_built() -> bool:
    """Return False: tensors on AMD GPUs are refused."""
    return False


def sycl_built() -> bool:
    """Return False: tensors on Intel GPUs are refused. Horovod has this function after 0.28.1."""
    return False
