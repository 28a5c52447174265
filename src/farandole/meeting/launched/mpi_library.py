"""File of the MPI library for this process: one that is loaded already, the launcher's, or the linker's.

This module chooses the file, and `launched/mpi.py` loads it by ctypes, starts MPI and lets ranks meet, whatever fabric
carries their tensors. With the fabric "mpi" the engine uses the same library: `native/transport/mpi_library.cc` looks
up the functions and constants of its collectives, which the engine calls without the interpreter."""

import contextlib
import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path

from farandole.errors import ConfigError
from farandole.other_launchers import LAUNCHERS, OtherLaunch

ANCESTORS = 8  # most processes from this one up to the launcher's; some are shells

_LIBRARY = re.compile(r"lib(mpi|mpich|mpi_abi)\.so\b.*")


def find_library(found: OtherLaunch | None, library: str | None) -> str:
    """Return the MPI library to load: `library`, one that is loaded, the launcher's, or the linker's.

    `found` is the launch that this process is part of, if it is known. Raises `ConfigError` if there is no library."""
    known = library or loaded_library()
    if known is not None:
        return known
    every = dict.fromkeys(name for row in LAUNCHERS for name in row.mpi)
    names = found.launcher.mpi if found is not None and found.by_mpi else tuple(every)
    for folder in _folders_of_launcher():
        for name in names:
            if (folder / name).is_file():
                return str(folder / name)
    for name in names:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return name
    listed = f"no MPI library ({', '.join(names)}) is beside it or known to the linker"
    if found is None:
        raise ConfigError("fabric", f"is mpi, but {listed.replace(' beside it or', '')}; set FARANDOLE_MPI_LIBRARY")
    raise ConfigError(
        found.variable,
        f"is {found.value}: {found}, but {listed}. Set FARANDOLE_MPI_LIBRARY to its file, or start the ranks with: "
        f"farandole run -np {found.size or 'N'} python train.py",
    )


def loaded_library() -> str | None:
    """Return the MPI library that this process has loaded; None without one."""
    return next((str(path) for path in _mapped("self") if _LIBRARY.fullmatch(path.name)), None)


def _folders_of_launcher() -> Iterator[Path]:
    """Yield the folders in which the libraries of the process that has started this one may be."""
    process = os.getppid()
    for _ in range(ANCESTORS):
        try:
            binary = Path(f"/proc/{process}/exe").readlink()
            status = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            return  # it is another user's
        if re.match(r"(orted|orterun|prted|prterun|mpirun|mpiexec|hydra)", binary.name):
            used = {path.parent for path in _mapped(str(process)) if re.match(r"lib(open-|prrte|pmix|mpi)", path.name)}
            yield from used
            for folder in ("lib", "lib64", "lib/release"):
                yield binary.parent.parent / folder
        process = int(status.rpartition(")")[2].split()[1])
        if process <= 1:
            return


def _mapped(process: str) -> list[Path]:
    """Return the files that the process has mapped into its memory."""
    try:
        text = Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []  # it has ended, or is another user's
    words = (line.split(maxsplit=5) for line in text.splitlines())
    return list(dict.fromkeys(Path(each[5]) for each in words if len(each) == 6 and each[5].startswith("/")))
