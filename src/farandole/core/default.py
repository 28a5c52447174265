"""Default context of functions without a context argument, per process or per thread.

This is the only module with mutable state. `init()` sets the context of the process. `use()` overrides it for one
thread, so that one process can hold several ranks.
"""

import atexit
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol
from weakref import WeakKeyDictionary

from farandole.config import Config, warn_of_other_settings
from farandole.core.context import Context
from farandole.core.process_sets.agreement import Sets
from farandole.core.process_sets.membership import Counters, Membership
from farandole.core.process_sets.registry import Ranks
from farandole.errors import ConfigError, HorovodInternalError, NotInitializedError, RendezvousError
from farandole.meeting.launched import find_rendezvous
from farandole.meeting.launched.communicators import Communicator, is_communicator, spans
from farandole.meeting.launched.elastic import ElasticRendezvous, MemberEnvironment
from farandole.meeting.rendezvous import Rendezvous
from farandole.topology import Topology

__all__ = [
    "context",
    "cross_rank",
    "cross_size",
    "host_changes",
    "init",
    "is_elastic",
    "is_homogeneous",
    "is_initialized",
    "is_newcomer",
    "local_rank",
    "local_size",
    "membership",
    "metrics",
    "process_local_rank",
    "rank",
    "rejoin",
    "shared",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "use",
]

log = logging.getLogger(__name__)


class RankSet(Protocol):
    """Interface of `ProcessSet` that this module needs."""

    @property
    def ranks(self) -> list[int] | None: ...

    def add_to(self, sets: Sets) -> None: ...


class _ContextMembership(Membership):
    """The membership among all ranks of a context."""

    __slots__ = ("context",)

    def __init__(self, context: Context, counters: Counters) -> None:
        super().__init__(context.engine, context.rank, context.size, counters)
        self.context = context


class _Thread(threading.local):
    membership: _ContextMembership | None = None


_lock = threading.Lock()
_thread = _Thread()
_process: _ContextMembership | None = None
# The settings and the expected place of a newcomer to an elastic job, which prepares its training while others train.
_newcomer: tuple[Config, Topology] | None = None
_threads = 0  # `use` blocks that are open, in all threads
# The result of `membership` in every thread; None before `init()`, and while a `use` block is open. Reading it takes
# less time than calling `membership`.
shared: Membership | None = None
# One `Counters` per context, for all `use` blocks; deleted with the context.
_counters: WeakKeyDictionary[Context, Counters] = WeakKeyDictionary()
_atexit_registered = False


def membership() -> Membership:
    """Return the caller's membership among all ranks; raises `NotInitializedError` before `init()`.

    In a newcomer to an elastic job it blocks until the others have taken this rank in."""
    found = _thread.membership or _process or _take_place()
    if found is None:
        raise NotInitializedError(ranks_are_threads=_threads > 0)
    return found


def context() -> Context:
    """Return the caller's context; blocks and raises as `membership` does."""
    found = _thread.membership or _process or _take_place()
    if found is None:
        raise NotInitializedError(ranks_are_threads=_threads > 0)
    return found.context


def _take_place() -> _ContextMembership | None:
    """Take a newcomer's place among the ranks that train; return None before `init()`."""
    global _process, _newcomer
    if _newcomer is not None:
        with _lock:
            if _newcomer is not None:
                _process, _newcomer = _ContextMembership(_join(None, _newcomer[0], None), Counters()), None
                _share()
    return _process


def _place() -> Context | Topology:
    """Return the caller's place; that which it expects if it is a newcomer."""
    newcomer = _newcomer
    return newcomer[1] if newcomer is not None and _thread.membership is None else context()


@contextmanager
def use(context: Context) -> Iterator[Context]:
    """Make `context` the default of this thread until the block ends."""
    global _threads
    before = _thread.membership
    with _lock:
        _threads += 1
        _share()
        _thread.membership = _ContextMembership(context, _counters.setdefault(context, Counters()))
    try:
        yield context
    finally:
        with _lock:
            _thread.membership = before
            _threads -= 1
            _share()


def _share() -> None:
    """Update `shared`; the caller holds the lock."""
    global shared
    shared = _process if _threads == 0 else None


def init(
    comm: Sequence[int] | Communicator | None = None,
    process_sets: Sequence[RankSet] | str | None = None,
    *,
    config: Config | None = None,
    rendezvous: Rendezvous | None = None,
) -> None:
    """Connect to the other ranks and start the engine. If the job is running already, this only warns of a `config`
    with other settings, which have no effect then.

    Blocks until every rank has called or `Config.start_timeout` has passed. `farandole run`, `mpirun`, `srun` or
    `torchrun` may have started the ranks. Without a launcher this process is the only rank. With a communicator of
    mpi4py, below mpirun, its processes are the job's ranks, in its order. `shutdown` is called at interpreter exit.
    `process_sets` are added in this order, as `add_process_set` does; "dynamic" adds none. Sets can
    be added later in any case. Without sets this returns at once in a process that comes to an elastic job while others
    train: it has the place that it expects, and takes it when the training function begins or something needs the other
    ranks. Raises `RendezvousError` with the missing ranks, `ConfigError` for a list of some ranks or for a launcher
    whose processes cannot exchange bytes, and `ValueError` for a duplicate set.
    """
    global _process, _newcomer, _atexit_registered
    sets = _checked_sets(process_sets)
    with _lock:
        if _thread.membership is None and _process is None:
            if not _atexit_registered:
                atexit.register(shutdown)
                _atexit_registered = True
            member = MemberEnvironment.read() if rendezvous is None and comm is None and not sets else None
            if member is not None and member.expected is not None:
                _newcomer = _newcomer or (config or Config.from_environment(), member.expected)
                return
            _newcomer = None
            made = _join(comm, config or Config.from_environment(), rendezvous)
            _process = _ContextMembership(made, Counters())
            _share()
            _add_sets(made, sets)
            return
    _require_all_ranks(comm, size())
    if config is not None and not is_newcomer():
        warn_of_other_settings(config, context().config)
    unknown = [process_set for process_set in sets if context().sets.number_of(process_set) is None]
    if unknown:
        raise ConfigError("process_sets", f"the job is running already; use add_process_set to add {unknown}")


def _join(comm: Sequence[int] | Communicator | None, config: Config, rendezvous: Rendezvous | None) -> Context:
    communicator = comm if is_communicator(comm) else None
    met = find_rendezvous(config, communicator=communicator) if rendezvous is None else rendezvous
    try:
        _require_all_ranks(comm, met.size)
        return _enter(met, config, -1, {}) if isinstance(met, ElasticRendezvous) else Context(met, config)
    except BaseException:
        if rendezvous is None:
            met.close()
        raise


def _enter(
    rendezvous: ElasticRendezvous, config: Config, commits: int, sets: Mapping[object, tuple[int, Ranks]]
) -> Context:
    """Connect to the ranks of a generation, or of the next one if one of them is lost meanwhile, and so on."""
    while True:
        rendezvous.keep_launcher()
        try:
            with ExitStack() as failing:
                made = Context(rendezvous, config)
                failing.callback(made.shutdown)
                made.sets.carry(sets)
                failing.pop_all()
        except (RendezvousError, HorovodInternalError) as error:
            log.info("a rank was lost while the ranks of generation %d met: %s", rendezvous.generation, error)
            rendezvous = rendezvous.next(commits)
        else:
            rendezvous.keep_launcher(False)
            rendezvous.follow(made.engine.stats)
            return made


def rejoin(commits: int) -> None:
    """Leave the generation of an elastic job, and go on as a rank of the next one; see `farandole.elastic`.

    `commits` counts the commits of the state that this process holds; the ranks with most of them come first, -1 is for
    no state. Blocks until the launcher forms the next generation. Raises `ConfigError` if the job is not elastic,
    `SystemExit` if the training has ended or has no slot for this process, and `RendezvousError` if the launcher is
    lost."""
    global _process
    if is_newcomer():
        _take_place()
        return
    left = context()
    if not isinstance(left.rendezvous, ElasticRendezvous):
        raise ConfigError("elastic", "no elastic launcher started this job; start it by: farandole run --min-np 1 ...")
    left.rendezvous.keep_launcher()
    sets = left.sets.made
    shutdown()
    made = _enter(left.rendezvous.next(commits), left.config, commits, sets)
    with _lock:
        _process = _ContextMembership(made, Counters())
        _share()


def is_newcomer() -> bool:
    """Return whether this process has no place yet among the ranks of an elastic job, which train meanwhile."""
    return _thread.membership is None and _newcomer is not None


def is_elastic() -> bool:
    """Return whether an elastic launcher has started this process, whose job goes on when ranks are lost."""
    found = _thread.membership or _process
    if found is None:
        return MemberEnvironment.read() is not None
    return isinstance(found.context.rendezvous, ElasticRendezvous)


def host_changes() -> tuple[bool, bool]:
    """Return whether hosts of an elastic job were added, and removed, since this rank got its place."""
    rendezvous = context().rendezvous
    if not isinstance(rendezvous, ElasticRendezvous):
        return False, False
    return rendezvous.changes.added, rendezvous.changes.removed


def _checked_sets(process_sets: Sequence[RankSet] | str | None) -> Sequence[RankSet]:
    if process_sets is None or process_sets == "dynamic":
        return ()
    if isinstance(process_sets, str) or not _are_sets(process_sets):
        raise ConfigError("process_sets", f'should be a list of ProcessSet, or "dynamic", got {process_sets!r}')
    return process_sets


def _are_sets(given: object) -> bool:
    return isinstance(given, Sequence) and all(hasattr(process_set, "ranks") for process_set in given)


def _add_sets(context: Context, sets: Sequence[RankSet]) -> None:
    global _process
    try:
        for process_set in sets:
            process_set.add_to(context.sets)
    except BaseException:
        _process = None
        _share()
        context.shutdown()
        raise


def _require_all_ranks(comm: Sequence[int] | Communicator | None, size: int) -> None:
    if comm is None:
        return
    if is_communicator(comm):
        if not spans(comm, size):
            raise ConfigError("comm", f"has {comm.Get_size()} processes, but the job has {size} ranks")
        return
    if not isinstance(comm, Sequence):
        raise ConfigError("comm", f"must be a communicator of mpi4py or all ranks, got {type(comm).__name__}")
    if list(comm) not in ([], list(range(size))):
        raise ConfigError("comm", f"only all ranks in order are supported, 0 to {size - 1}, got {list(comm)}")


def shutdown() -> None:
    """Leave the job and stop the engine; `init()` may be called again.

    Operations still in flight fail, here and on the other ranks. Does nothing before `init()`.
    """
    global _process, _newcomer
    with _lock:
        leaving = _thread.membership or _process
        if leaving is None:
            _newcomer = None
            return
        if _thread.membership is not None:
            _thread.membership = None
        else:
            _process = None
            _share()
    leaving.context.shutdown()


def is_initialized() -> bool:
    """Return whether the caller has a default context."""
    return (_thread.membership or _process or _newcomer) is not None


def rank() -> int:
    """Return this rank's number, 0 to `size() - 1`."""
    return _place().rank


def size() -> int:
    """Return how many ranks the job has."""
    return _place().size


def local_rank() -> int:
    """Return this rank's number among the ranks of its host."""
    return _place().local_rank


def process_local_rank() -> int | None:
    """Return the local rank of the process; None before `init()`, and where each thread is a rank."""
    if _newcomer is not None:
        return _newcomer[1].local_rank
    found = _process
    return None if found is None else found.context.local_rank


def local_size() -> int:
    """Return how many ranks are on this host."""
    return _place().local_size


def cross_rank() -> int:
    """Return the number of this host among the hosts that have a rank with this local rank."""
    return _place().cross_rank


def cross_size() -> int:
    """Return how many hosts have a rank with this local rank."""
    return _place().cross_size


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks."""
    return _place().is_homogeneous


def metrics() -> dict[str, float]:
    """Return the counters of this rank since `init()`; `Metrics.read` describes each one.

    Raises `NotInitializedError` before `init()`."""
    return context().metrics()


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start to write this rank's timeline: rank 0 to `file_path`, rank r beside it to `<stem>.rank<r><suffix>`.

    In generation g > 0 of an elastic job `<stem>.generation<g>` takes the place of `<stem>`. Only ranks that call it
    write a file; it waits for no other rank. The file holds events from this call on. It can be read at any time, and
    is complete after `stop_timeline`, `shutdown` or the next `start_timeline`. `mark_cycles` marks each plan, because
    farandole has no cycles. Raises `NotInitializedError` before `init()`. Raises `ConfigError` if the file cannot be
    opened; a timeline that is being written then goes on. A failed write later is logged and ends the timeline."""
    context().timeline.start(file_path, mark_plans=mark_cycles)


def stop_timeline() -> None:
    """Complete the file of the timeline; logs a warning if none is being written.

    Raises `NotInitializedError` before `init()`."""
    context().timeline.stop()
