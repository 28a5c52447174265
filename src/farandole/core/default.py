"""The one context that functions without a context argument use, per process or per thread.

The only module with mutable state. `init()` sets the process' context; `use()` overrides it for one thread, so that
many ranks can live in one process.
"""

import atexit
import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from farandole._native import Engine
from farandole.config import Config
from farandole.core.context import Context
from farandole.errors import ConfigError, NotInitializedError
from farandole.rendezvous import Rendezvous, from_environment

__all__ = [
    "Seat",
    "context",
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "seat",
    "shutdown",
    "size",
    "use",
]


class Counters:
    """How many operations without a name were asked for, by kind."""

    def __init__(self) -> None:
        self._next: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

    def next(self, kind: str) -> int:
        # next() on itertools.count is one step under the GIL, so two threads never get one number.
        return next(self._next[kind])


class Seat:
    """A context, and what the functions of this package need of it at every call."""

    __slots__ = ("_counters", "context", "engine", "size")

    def __init__(self, context: Context, counters: Counters) -> None:
        self.context, self._counters = context, counters
        self.engine: Engine = context.engine
        self.size: int = context.size

    def wire_name(self, kind: str, name: str | None) -> str:
        """Return the name ranks agree on: `<kind>.<name>`, or `<kind>.noname.<n>` for the nth one without a name."""
        return f"{kind}.{name}" if name is not None else f"{kind}.noname.{self._counters.next(kind)}"


class _Thread(threading.local):
    seat: Seat | None = None


_lock = threading.Lock()
_thread = _Thread()
_process: Seat | None = None
# A context keeps its counters however often a thread enters `use`; they go when it goes.
_counters: WeakKeyDictionary[Context, Counters] = WeakKeyDictionary()
_atexit_registered = False


def seat() -> Seat:
    """Return the caller's seat; raises `NotInitializedError` before `init()`."""
    found = _thread.seat or _process
    if found is None:
        raise NotInitializedError()
    return found


def context() -> Context:
    """Return the caller's context; raises `NotInitializedError` before `init()`."""
    return seat().context


@contextmanager
def use(context: Context) -> Iterator[Context]:
    """Make `context` the one that this thread's calls use, until the block ends."""
    before = _thread.seat
    with _lock:
        _thread.seat = Seat(context, _counters.setdefault(context, Counters()))
    try:
        yield context
    finally:
        _thread.seat = before


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[object] | None = None,
    *,
    config: Config | None = None,
    rendezvous: Rendezvous | None = None,
) -> None:
    """Meet the other ranks and start the engine; does nothing while already running.

    Blocks until every rank has come or `Config.start_timeout` has passed. Without a launcher this process is the
    only rank. Ends by itself at interpreter exit. Raises `RendezvousError` naming the ranks that are missing, and
    `ConfigError` for a `comm` other than all ranks and for `process_sets`.
    """
    global _process, _atexit_registered
    if process_sets:
        raise ConfigError("process_sets", "this version has the global process set only; leave it out")
    with _lock:
        if _thread.seat is None and _process is None:
            met = from_environment() if rendezvous is None else rendezvous
            _require_all_ranks(comm, met.size)
            _process = Seat(Context(met, config), Counters())
            if not _atexit_registered:
                atexit.register(shutdown)
                _atexit_registered = True
            return
    _require_all_ranks(comm, size())


def _require_all_ranks(comm: Sequence[int] | None, size: int) -> None:
    if comm is None:
        return
    if not isinstance(comm, Sequence):
        raise ConfigError("comm", f"an MPI communicator is not supported ({type(comm).__name__}); leave it out")
    if list(comm) not in ([], list(range(size))):
        raise ConfigError("comm", f"only all ranks in order are supported, 0 to {size - 1}, got {list(comm)}")


def shutdown() -> None:
    """Leave the job and stop the engine; `init()` may be called again.

    Operations still in flight fail, here and on the other ranks. Does nothing before `init()`.
    """
    global _process
    with _lock:
        leaving = _thread.seat or _process
        if leaving is None:
            return
        if _thread.seat is not None:
            _thread.seat = None
        else:
            _process = None
    leaving.context.shutdown()


def is_initialized() -> bool:
    """Return whether the caller has a context."""
    return (_thread.seat or _process) is not None


def rank() -> int:
    """Return this rank's number, 0 to `size() - 1`."""
    return context().rank


def size() -> int:
    """Return how many ranks the job has."""
    return context().size


def local_rank() -> int:
    """Return this rank's place among those on its host."""
    return context().local_rank


def local_size() -> int:
    """Return how many ranks are on this host."""
    return context().local_size


def cross_rank() -> int:
    """Return the place of this host among those that have a rank with this local rank."""
    return context().cross_rank


def cross_size() -> int:
    """Return how many hosts have a rank with this local rank."""
    return context().cross_size


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks."""
    return context().topology.is_homogeneous
