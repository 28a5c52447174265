"""Exchange of bytes between the processes of mpirun, by the MPI library that belongs to it."""

import atexit
import contextlib
import ctypes
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from farandole.errors import ConfigError, RendezvousError
from farandole.handshake import Deadline
from farandole.other_launchers import OtherLaunch

__all__ = ["MpiExchange", "find_library"]

BUFFER = 1 << 16  # bytes of the broadcast
LEAVE = 10.0  # seconds for MPI_Finalize, which waits for the other ranks
ANCESTORS = 8  # processes between this one and the launcher's, shells among them

OPEN_MPI_NAMES = ("libmpi.so.40",)
MPICH_NAMES = ("libmpi.so.12", "libmpich.so.12", "libmpi_abi.so.1", "libmpi_abi.so.0")
_LIBRARY = re.compile(r"lib(mpi|mpich|mpi_abi)\.so\b.*")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Abi:
    """Values by which an MPI library's functions are called; handles are pointers or numbers."""

    name: str
    world: int
    byte: int
    multiple: int  # MPI_THREAD_MULTIPLE

    @classmethod
    def of(cls, library: ctypes.CDLL) -> "_Abi":
        """Return the values of `library`. Open MPI comes first: it exports names of the others, too."""
        with contextlib.suppress(ValueError):
            world, byte = (ctypes.c_char.in_dll(library, f"ompi_mpi_{name}") for name in ("comm_world", "byte"))
            return cls("Open MPI", ctypes.addressof(world), ctypes.addressof(byte), 3)
        major, minor = ctypes.c_int(-1), ctypes.c_int(-1)
        if hasattr(library, "MPI_Abi_get_version"):
            library.MPI_Abi_get_version(ctypes.byref(major), ctypes.byref(minor))
        if major.value >= 1:  # MPICH 5 without the standard ABI says -1
            return cls("the standard ABI", 0x101, 0x247, 4096)
        return cls("MPICH's ABI", 0x44000000, 0x4C00010D, 3)


class MpiExchange:
    """Exchange by a broadcast of MPI, which this starts unless the program has done so.

    MPI calls are made by a thread of their own, since none of them has a time limit. It ends MPI at the interpreter's
    exit; after an uncaught exception it does not, and mpirun ends the other ranks."""

    def __init__(self, found: OtherLaunch, library: str | None, deadline: Deadline) -> None:
        path = find_library(found, library)
        try:
            self._mpi = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)  # Open MPI's plugins look for its names
        except OSError as error:
            raise ConfigError("mpi_library", f"{path} cannot be loaded: {error}") from error
        self._abi = _Abi.of(self._mpi)
        if self._ask("MPI_Finalized"):
            raise ConfigError(found.variable, f"is {found.value}, but MPI has ended in this process; call init before")
        self._thread = None if self._ask("MPI_Initialized") else _Thread()
        if self._thread is not None:
            self._on_thread(self._start, deadline)
            atexit.register(self._end, self._thread)
        self.rank, self.size = self._on_thread(self._place, deadline)
        if self.size < found.value:
            raise ConfigError(
                found.variable,
                f"is {found.value}: {found}, but {path} ({self._abi.name}) sees only {self.size}, so it belongs to "
                "another MPI. Set FARANDOLE_MPI_LIBRARY to the library of the launcher",
            )

    def share(self, payload: bytes, deadline: Deadline) -> bytes:
        """Return rank 0's `payload` on every rank; blocks up to `deadline`, then raises `RendezvousError`."""
        assert len(payload) <= BUFFER - 4, len(payload)
        buffer = ctypes.create_string_buffer(len(payload).to_bytes(4) + payload, BUFFER)
        self._on_thread(lambda: self._call("MPI_Bcast", buffer, BUFFER, self._byte, 0, self._world), deadline)
        return buffer.raw[4 : 4 + int.from_bytes(buffer.raw[:4])]

    def close(self) -> None:
        """Do nothing: a broadcast leaves nothing."""

    @property
    def _world(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._abi.world)

    @property
    def _byte(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._abi.byte)

    def _start(self) -> None:
        granted = ctypes.c_int()
        self._call("MPI_Init_thread", None, None, self._abi.multiple, ctypes.byref(granted))

    def _place(self) -> tuple[int, int]:
        rank, size = ctypes.c_int(), ctypes.c_int()
        self._call("MPI_Comm_rank", self._world, ctypes.byref(rank))
        self._call("MPI_Comm_size", self._world, ctypes.byref(size))
        return rank.value, size.value

    def _end(self, thread: "_Thread") -> None:
        failed = getattr(sys, "last_type", None) is not None  # an uncaught exception has been printed
        if not failed and not self._ask("MPI_Finalized"):
            with contextlib.suppress(TimeoutError):  # the others do not end; the launcher ends them
                thread.run(lambda: self._call("MPI_Finalize"), LEAVE)

    def _ask(self, name: str) -> bool:
        flag = ctypes.c_int()
        self._call(name, ctypes.byref(flag))
        return bool(flag.value)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._mpi, name)(*arguments)
        if code != 0:
            raise RendezvousError(f"{name} failed with code {code}")

    def _on_thread(self, action: Callable[[], T], deadline: Deadline) -> T:
        """Do `action` by the thread that has started MPI. MPI that the program has started is called here."""
        if self._thread is None:
            return action()
        try:
            return self._thread.run(action, deadline.remaining())
        except TimeoutError as error:
            raise RendezvousError("MPI did not connect the processes in time; did all of them call init?") from error


class _Thread:
    """A thread that runs one action after another until the interpreter's exit."""

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="farandole-mpi", daemon=True).start()

    def run(self, action: Callable[[], T], seconds: float) -> T:
        """Return the result of `action`, or raise its error; raises `TimeoutError` after `seconds`."""
        results: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()

        def do() -> None:
            try:
                results.put((action(), None))
            except BaseException as error:
                results.put((None, error))

        self._actions.put(do)
        try:
            value, error = results.get(timeout=seconds)
        except queue.Empty as empty:
            raise TimeoutError from empty
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # None only if T is

    def _work(self) -> None:
        while True:
            self._actions.get()()


def find_library(found: OtherLaunch, library: str | None) -> str:
    """Return the MPI library to load: `library`, one that is loaded, the launcher's, or the linker's.

    Raises `ConfigError` when there is none."""
    loaded = next((path for path in _mapped("self") if _LIBRARY.fullmatch(path.name)), None)
    if library is not None or loaded is not None:
        return library or str(loaded)
    names = OPEN_MPI_NAMES if found.variable.startswith("OMPI_") else MPICH_NAMES
    for folder in _folders_of_launcher():
        for name in names:
            if (folder / name).is_file():
                return str(folder / name)
    for name in names:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return name
    raise ConfigError(
        found.variable,
        f"is {found.value}: {found}, but no MPI library ({', '.join(names)}) is beside it or known to the linker. Set "
        f"FARANDOLE_MPI_LIBRARY to its file, or start the ranks with: farandole run -np {found.size or 'N'} python "
        "train.py",
    )


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
