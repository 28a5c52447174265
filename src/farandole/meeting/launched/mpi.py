"""Exchange of bytes between the processes of mpirun, through its MPI library."""

import atexit
import contextlib
import ctypes
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import TypeVar

from farandole.config import Config
from farandole.errors import ConfigError, RendezvousError
from farandole.meeting.frames import Deadline
from farandole.meeting.launched.communicators import Communicator, handle_of
from farandole.meeting.launched.hosted import HostedRendezvous, meet
from farandole.meeting.launched.mpi_library import find_library, loaded_library
from farandole.meeting.launched.operator import require_hosts
from farandole.other_launchers import OtherLaunch

BUFFER = 1 << 16  # bytes of the broadcast
CHECK = 0.2  # seconds between two checks of a deadline
LEAVE = 10.0  # seconds for MPI_Finalize, which waits for the other ranks

T = TypeVar("T")


def meet_by_mpi(found: OtherLaunch, config: Config, env: Mapping[str, str]) -> HostedRendezvous:
    """Let the processes of mpirun meet through a broadcast of MPI; blocks and raises like `meet`.

    Raises `ConfigError`, too, if MPI connects fewer processes than mpirun has started, or all are in one pod."""
    deadline = Deadline(config.start_timeout)
    rendezvous = meet(MpiExchange(found, config.mpi_library, deadline), config, deadline, found)
    try:
        require_hosts(env, rendezvous.size, rendezvous.hosts)
    except BaseException:
        rendezvous.close()
        raise
    return rendezvous


@dataclass(frozen=True, slots=True)
class _Abi:
    """Constants of an MPI library's binary interface; handles are pointers or numbers."""

    name: str
    world: int
    byte: int
    errors_return: int
    multiple: int  # MPI_THREAD_MULTIPLE

    @classmethod
    def of(cls, library: ctypes.CDLL) -> "_Abi":
        """Return the constants of `library`. Open MPI is tested first, because it exports names of the others, too."""
        with contextlib.suppress(ValueError):
            names = ("comm_world", "byte", "errors_return")
            world, byte, returned = (
                ctypes.addressof(ctypes.c_char.in_dll(library, f"ompi_mpi_{name}")) for name in names
            )
            return cls("Open MPI", world, byte, returned, 3)
        major, minor = ctypes.c_int(-1), ctypes.c_int(-1)
        if hasattr(library, "MPI_Abi_get_version"):
            library.MPI_Abi_get_version(ctypes.byref(major), ctypes.byref(minor))
        if major.value >= 1:  # MPICH 5 without the standard ABI says -1
            return cls("the standard ABI", 0x101, 0x247, 0x143, 4096)
        return cls("MPICH's ABI", 0x44000000, 0x4C00010D, 0x54000001, 3)


class _Library:
    """MPI's library, whose functions raise `RendezvousError` where they fail."""

    def __init__(self, path: str) -> None:
        try:
            self._mpi = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)  # Open MPI's plugins look for its names
        except OSError as error:
            raise ConfigError("mpi_library", f"{path} cannot be loaded: {error}") from error
        self.path = path
        self._abi = _Abi.of(self._mpi)

    def runs(self) -> bool:
        """Return whether MPI has started in this process, and not ended."""
        return self._ask("MPI_Initialized") and not self._ask("MPI_Finalized")

    def allows_threads(self) -> bool:
        """Return whether all threads may call MPI at any time."""
        granted = ctypes.c_int()
        self._call("MPI_Query_thread", ctypes.byref(granted))
        return granted.value == self._abi.multiple

    def _ask(self, name: str) -> bool:
        flag = ctypes.c_int()
        self._call(name, ctypes.byref(flag))
        return bool(flag.value)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._mpi, name)(*arguments)
        if code != 0:
            raise RendezvousError(f"{name} failed with code {code}")


def mpi_allows_threads() -> bool | None:
    """Return whether all threads of this process may call MPI; None if MPI does not run in it."""
    path = loaded_library()
    library = None if path is None else _Library(path)
    return library.allows_threads() if library is not None and library.runs() else None


class MpiProcess(_Library):
    """This process within MPI, which the constructor starts unless it has been started before.

    If the constructor starts MPI, a thread of its own makes the calls that may block, because MPI has no time limits,
    and ends MPI at the interpreter's exit. After an uncaught exception it does not end MPI, and mpirun ends the other
    ranks. If MPI has been started before without `MPI_THREAD_MULTIPLE`, the caller's thread makes the calls, without a
    time limit."""

    def __init__(self, path: str, variable: str, deadline: Deadline) -> None:
        super().__init__(path)
        if self._ask("MPI_Finalized"):
            raise ConfigError(variable, "needs MPI, but MPI has ended in this process; call init before")
        self._thread = None if self._ask("MPI_Initialized") else _Thread()
        if self._thread is not None:
            self._on_thread(self._start, deadline)
            atexit.register(self._end, self._thread)
        self.rank, self.size = self._on_thread(self._rank_and_size, deadline)

    @property
    def abi(self) -> str:
        return self._abi.name

    @property
    def library(self) -> int:
        """The library as the dynamic linker knows it."""
        return self._mpi._handle

    def narrow(self, communicator: int, deadline: Deadline) -> None:
        """Count and broadcast among the processes of a communicator, given by its handle, from now on."""
        self._abi = replace(self._abi, world=communicator)
        self.rank, self.size = self._on_thread(self._rank_and_size, deadline)

    def broadcast(self, buffer: "ctypes.Array[ctypes.c_char]", deadline: Deadline) -> None:
        """Give rank 0's `buffer` to all processes; raises `RendezvousError` at `deadline`.

        Blocks without a limit if MPI was started before without `MPI_THREAD_MULTIPLE`."""
        byte, world = ctypes.c_void_p(self._abi.byte), ctypes.c_void_p(self._abi.world)
        self._on_thread(lambda: self._call("MPI_Bcast", buffer, len(buffer), byte, 0, world), deadline)

    def _start(self) -> None:
        granted = ctypes.c_int()
        self._call("MPI_Init_thread", None, None, self._abi.multiple, ctypes.byref(granted))
        world, returned = ctypes.c_void_p(self._abi.world), ctypes.c_void_p(self._abi.errors_return)
        self._call("MPI_Comm_set_errhandler", world, returned)

    def _rank_and_size(self) -> tuple[int, int]:
        rank, size, world = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p(self._abi.world)
        self._call("MPI_Comm_rank", world, ctypes.byref(rank))
        self._call("MPI_Comm_size", world, ctypes.byref(size))
        return rank.value, size.value

    def _end(self, thread: "_Thread") -> None:
        failed = getattr(sys, "last_type", None) is not None  # an uncaught exception has been printed
        native = sys.modules.get("farandole._native")
        # MPI_Finalize waits for calls that a lost rank never completes.
        if failed or (native is not None and native.MpiFabric.has_abandoned()) or self._ask("MPI_Finalized"):
            return
        with contextlib.suppress(TimeoutError):  # other ranks do not end MPI; the launcher ends them
            thread.run(lambda: self._call("MPI_Finalize"), LEAVE)

    def _on_thread(self, action: Callable[[], T], deadline: Deadline) -> T:
        """Run `action` on the thread that has started MPI; if MPI ran before, on a new thread if MPI allows that.

        If not, run it here and without a time limit."""
        if self._thread is None and not self.allows_threads():
            return action()
        try:
            if self._thread is None:
                return call_in_time(action, deadline)
            return self._thread.run(action, deadline.remaining())
        except TimeoutError as error:
            raise RendezvousError("MPI did not connect the processes in time; did all of them call init?") from error


class MpiExchange:
    """Exchange through a broadcast of MPI, among all processes or those of a communicator of mpi4py."""

    def __init__(
        self,
        found: OtherLaunch | None,
        library: str | None,
        deadline: Deadline,
        communicator: Communicator | None = None,
    ) -> None:
        self._process = MpiProcess(find_library(found, library), "comm" if found is None else found.variable, deadline)
        # Without a size, `value` is this process's number.
        least = 0 if found is None else found.value + (found.size is None)
        if found is not None and self._process.size < least:
            raise ConfigError(
                found.variable,
                f"is {found.value}: {found}, but {self._process.path} ({self._process.abi}) sees only "
                f"{self._process.size}, so it belongs to another MPI. Set FARANDOLE_MPI_LIBRARY to the library of the "
                "launcher",
            )
        if communicator is not None:
            self._process.narrow(handle_of(communicator), deadline)
        self.rank, self.size = self._process.rank, self._process.size

    def share(self, payload: bytes, deadline: Deadline) -> bytes:
        """Return rank 0's `payload` on every rank; blocks and raises like `MpiProcess.broadcast`."""
        assert len(payload) <= BUFFER - 4, len(payload)
        buffer = ctypes.create_string_buffer(len(payload).to_bytes(4) + payload, BUFFER)
        self._process.broadcast(buffer, deadline)
        return buffer.raw[4 : 4 + int.from_bytes(buffer.raw[:4])]

    def close(self) -> None:
        """Do nothing: a broadcast leaves nothing behind."""


class _Thread:
    """A thread that runs one action after another until the interpreter's exit."""

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="farandole-mpi", daemon=True).start()

    def run(self, action: Callable[[], T], seconds: float) -> T:
        """Return the result of `action`, or raise its error; raises `TimeoutError` after `seconds`."""
        future: Future[T] = Future()
        self._actions.put(lambda: _fulfil(future, action))
        return future.result(seconds)

    def _work(self) -> None:
        while True:
            self._actions.get()()


def call_in_time(action: Callable[[], T], deadline: Deadline) -> T:
    """Run `action` on a thread of its own; return its result or raise its error.

    Raises what `deadline.remaining()` raises; the thread then stays blocked in MPI."""
    future: Future[T] = Future()
    threading.Thread(target=_fulfil, args=(future, action), name="farandole-mpi-group", daemon=True).start()
    while not future.done():
        wait([future], min(CHECK, deadline.remaining()))
    return future.result()


def _fulfil(future: Future[T], action: Callable[[], T]) -> None:
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)
