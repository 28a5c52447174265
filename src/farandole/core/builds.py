"""Answers to Horovod's questions about the build (`mpi_built` and its kind). Nothing here is chosen at build time."""

from farandole.core import default
from farandole.errors import ConfigError

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
    "sycl_built",
]


def mpi_threads_supported() -> bool:
    """Return True if tensors go over MPI, which then allows calls of several threads; otherwise raise `ConfigError`."""
    if default.context().is_over_mpi:
        return True
    raise ConfigError("mpi_threads_supported", "MPI is not enabled; farandole connects the ranks itself")


def mpi_enabled() -> bool:
    """Return whether tensors go over MPI: `fabric` is "mpi", or "auto" has chosen so."""
    return default.is_initialized() and default.context().is_over_mpi


def mpi_built() -> bool:
    """Return False: nothing is built against MPI."""
    return False


def gloo_enabled() -> bool:
    """Return True: programs ask it to learn that ranks can talk without MPI, and they can."""
    return True


def gloo_built() -> bool:
    """Return True: programs ask it to learn that ranks can talk without MPI, and they can."""
    return True


def nccl_built() -> int:
    """Return 0, the version of NCCL of the build: NCCL is opened at run time.

    Programs ask it to scale the learning rate of Adasum, which Horovod's build with NCCL averages within a host first.
    Adasum is the same without that here."""
    return 0


def ddl_built() -> bool:
    """Return False."""
    return False


def ccl_built() -> bool:
    """Return False."""
    return False


def cuda_built() -> bool:
    """Return True: programs ask it to learn that tensors may lie on GPUs, and they may. The driver is opened then."""
    return True


def rocm_built() -> bool:
    """Return False: tensors on GPUs of AMD are refused."""
    return False


def sycl_built() -> bool:
    """Return False: tensors on GPUs of Intel are refused. Horovod's development after 0.28.1 has this name."""
    return False
