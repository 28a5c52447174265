"""JAX's own collectives between processes on CPUs (`psum` and others in `jax.shard_map`), over farandole.

XLA calls MPI for them, through MPItrampoline, which jaxlib contains. MPItrampoline opens the library that
MPITRAMPOLINE_LIB names when jaxlib is imported. Ours uses the engine of a context that `start` makes. `farandole run
--as-gloo` sets the variables; for ranks of other launchers:

    eval "$(python -m farandole.jax.collectives)"
"""

import ctypes
import functools
import logging
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TypeAlias

import jax
from jax._src.distributed import global_state  # JAX has no public access to its key-value store

from farandole.config import Config
from farandole.core.context import Context
from farandole.core.operations import kinds
from farandole.core.operations.request import Request
from farandole.core.plugins import core_table, plugin_path
from farandole.errors import CollectiveError, EngineClosed, InvalidRequest, RendezvousError
from farandole.meeting.frames import Deadline
from farandole.meeting.launched.hosted import meet

if TYPE_CHECKING:
    _Numbers: TypeAlias = ctypes._Pointer[ctypes.c_int32]

log = logging.getLogger(__name__)

_KEY = "farandole/rendezvous"
_PLACE = struct.Struct("=ii")  # color and key
_SPLIT = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int32)
)
_END = ctypes.CFUNCTYPE(None)


class _Hooks(ctypes.Structure):
    _fields_ = (("split", _SPLIT), ("end", _END))


class _Client(Protocol):
    """The part of a client of JAX's coordinator that we use."""

    def key_value_set_bytes(self, key: str, value: bytes, /) -> None: ...
    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int, /) -> bytes: ...
    def key_value_delete(self, key: str, /) -> None: ...


class _KeyValueExchange:
    """Exchange of bytes between the processes of `jax.distributed`, by its key-value store.

    Everybody who can reach JAX's coordinator can read its contents."""

    def __init__(self) -> None:
        self.rank, self.size = global_state.process_id, global_state.num_processes
        assert global_state.client is not None  # JAX makes collectives only then
        self._client: _Client = global_state.client

    def share(self, payload: bytes, deadline: Deadline) -> bytes:
        """Return rank 0's `payload` on every rank; blocks up to `deadline`, then raises `RendezvousError`."""
        try:
            if self.rank == 0:
                self._client.key_value_set_bytes(_KEY, payload)
            return self._client.blocking_key_value_get_bytes(_KEY, int(1000 * deadline.remaining()))
        except jax.errors.JaxRuntimeError as error:
            raise RendezvousError(f"process 0 did not come to JAX's key-value store ({error})", missing=(0,)) from error

    def close(self) -> None:
        """Remove the payload."""
        self._client.key_value_delete(_KEY)


class Communicators:
    """The communicators of JAX's processes, which are the ranks of `context`. All ranks call `split` in one order."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def split(self, color: int, key: int) -> tuple[int, Sequence[int]]:
        """Return the address of the process set of the ranks that give the same `color`, and these ranks by their keys.

        Blocks until all ranks of the job have called; raises the errors of collectives, and `InvalidRequest` if the
        keys of a color are not 0, 1, 2 and so on."""
        done = self._context.engine.run(Request(kinds.ALLGATHER), "jax.communicator", _PLACE.pack(color, key), None)
        assert done is not None
        given = done.result()
        assert given is not None
        parts: dict[int, dict[int, int]] = {}
        for rank, (other, place) in enumerate(_PLACE.iter_unpack(bytes(memoryview(given)))):
            if place in parts.setdefault(other, {}):
                raise _not_one_mesh(other)
            parts[other][place] = rank
        for each, ranks in sorted(parts.items()):
            if sorted(ranks) != list(range(len(ranks))):
                raise _not_one_mesh(each)
        addresses = {each: self._set_of(sorted(ranks.values())) for each, ranks in sorted(parts.items())}
        return addresses[color], [rank for _, rank in sorted(parts[color].items())]

    def _set_of(self, ranks: list[int]) -> int:
        sets, key = self._context.sets, tuple(ranks)
        if len(ranks) == self._context.size:
            return 0
        if sets.address_of(key) is None:
            sets.add(key, ranks)
        address = sets.address_of(key)
        assert address is not None
        return address


def _not_one_mesh(color: int) -> InvalidRequest:
    return InvalidRequest(
        "jax.communicator",
        f"JAX's processes make different communicators at the same time (that of device {color} is not whole); run the "
        "same programs in one order on all processes, with one device each",
    )


class _Library:
    """The library that XLA calls, and this process's part in the job."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(plugin_path("mpi")))
        self._library.farandole_mpi_serve.restype = ctypes.c_char_p
        self._hooks = _Hooks(_SPLIT(self._split), _END(self._end))  # the library calls them until the process ends

    def serve(self) -> None:
        """Join the other processes; blocks until all have called. An error is logged, and told to XLA."""
        try:
            config = Config.from_environment()
            rendezvous = meet(_KeyValueExchange(), config, Deadline(config.start_timeout))
            self._context = Context(rendezvous, config, transfers=True)
            self._communicators = Communicators(self._context)
            table, place = ctypes.c_void_p(core_table()), (self._context.rank_id, self._context.size)
            problem = self._library.farandole_mpi_serve(table, *place, self._hooks)
            if problem is not None:
                raise ImportError(f"{plugin_path('mpi')} cannot be used: {problem.decode()}")
        except Exception as error:
            return self._explain("JAX's collectives cannot use farandole", error)
        if self._context.rank == 0:
            log.warning("JAX's collectives on CPUs are farandole's, because MPITRAMPOLINE_LIB names its library")

    def _explain(self, what: str, error: Exception) -> None:
        text = f"{what}: {error}"
        log.error("%s", text)
        self._library.farandole_mpi_fail(text.encode())

    def _split(self, color: int, key: int, ranks: "_Numbers", count: "_Numbers") -> int:
        try:
            number, members = self._communicators.split(color, key)
        except Exception as error:
            what = "JAX cannot make a communicator, which all of its processes have to do at the same time"
            self._explain(what, error)
            return -1
        count[0] = len(members)
        for index, rank in enumerate(members):
            ranks[index] = rank
        return number

    def _end(self) -> None:
        # XLA may still run programs, whose results only other processes read. One that ends by an exception leaves at
        # once, so that the others get an error.
        if not hasattr(sys, "last_value"):
            with suppress(CollectiveError, EngineClosed):
                self._context.engine.run(Request(kinds.BARRIER), "jax.end", None, None)
        self._context.shutdown()


@functools.cache
def start() -> None:
    """Join the other processes of `jax.distributed`, and serve XLA's calls; blocks until all have called.

    XLA calls it by the library, and gets an error at its first collective."""
    _library().serve()


@functools.cache
def _library() -> _Library:
    return _Library()


if __name__ == "__main__":
    sys.stdout.write(f"export JAX_CPU_COLLECTIVES_IMPLEMENTATION=mpi MPITRAMPOLINE_LIB={plugin_path('mpi')}\n")
