"""Process sets of one context: agreement of all ranks on each set, and the set's engine.

A set starts like a job: its members exchange cards (over the job's engine), connect, and start an engine. Sets share
nothing, so no set can make another one wait.
"""

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from farandole._native import Engine, RankEngines
from farandole.config import Config
from farandole.core.monitoring.monitors import Monitors
from farandole.core.operations import kinds
from farandole.core.operations.request import Request
from farandole.core.process_sets.forming import Forming
from farandole.core.process_sets.membership import Counters, Membership
from farandole.core.process_sets.registry import GLOBAL, Ranks, Registry
from farandole.core.wiring.connect import connect
from farandole.core.wiring.start import start_engine
from farandole.errors import CollectiveError, EngineClosed, MismatchError, RendezvousError, spell_ranks
from farandole.limits import naming_process_limit
from farandole.meeting.frames import frame, split_frames
from farandole.meeting.launched.elastic import ElasticRendezvous
from farandole.meeting.rendezvous import PartRendezvous, Rendezvous
from farandole.topology import Topology

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Set:
    number: int
    ranks: Ranks  # none: the job has lost all of them
    membership: Membership | None  # None: this rank is not a member
    asked: Ranks  # the ranks that it was made with, and gets again if an elastic job has them again
    address: int | None  # by which traced programs find it in this process; None while it has no ranks


class Sets:
    """The process sets of a context, by the user's `ProcessSet` object.

    All ranks of the job must call `add` and `remove`, in the same order, members or not."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        config: Config,
        topology: Topology,
        engine: Engine,
        monitors: Monitors,
        engines: RankEngines,
    ) -> None:
        self._rendezvous, self._config, self._topology = rendezvous, config, topology
        self._engine, self._monitors, self._engines = engine, monitors, engines
        most = rendezvous.most if isinstance(rendezvous, ElasticRendezvous) else None
        self._registry = Registry(topology.size, most)
        self._sets: dict[object, _Set] = {}
        self._carried: dict[Ranks, _Set] = {}  # by the ranks that they were made with
        self._generation = 0  # generation of the latest set
        self._changing = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False

    @property
    def ranks_by_number(self) -> dict[int, Ranks]:
        """The ranks of each set of the job, by number; 0 is the set of all ranks."""
        return self._registry.sets

    @property
    def made(self) -> dict[object, tuple[int, Ranks]]:
        """By key, the number of each set and the ranks that it was made with; for `carry`."""
        return {key: (known.number, known.asked) for key, known in self._sets.items()}

    def number_of(self, key: object) -> int | None:
        """Return the number of the set added under `key`; None without one, or if the job has lost all its ranks."""
        known = self._sets.get(key)
        return None if known is None or not known.ranks else known.number

    def ranks_of(self, key: object) -> Ranks | None:
        """Return the ranks of the set added under `key`; None without one, or if the job has lost all of them."""
        known = self._sets.get(key)
        return None if known is None or not known.ranks else known.ranks

    def address_of(self, key: object) -> int | None:
        """Return the address by which traced programs find the set added under `key`; None as for `number_of`."""
        known = self._sets.get(key)
        return None if known is None else known.address

    def address_of_number(self, number: int) -> int | None:
        """Return the address of the set `number`; None without one."""
        if number == GLOBAL:
            return GLOBAL
        return next((known.address for known in self._sets.values() if known.number == number), None)

    def carry(self, made: Mapping[object, tuple[int, Ranks]]) -> None:
        """Make the sets of an elastic job's last generation again, as rank 0 had `made` them.

        A set has those of its ranks that the job has now. Blocks until all ranks have called, also new ones, which have
        made none; `add` then finds the set without communication. Raises like `add`."""
        told = json.loads(self._gather(json.dumps(sorted(set(made.values()))).encode())[0])
        for number, asked in told:
            # Other than new sets, several may have the same ranks, such as all that are left.
            membership, address = None, None
            members = self._registry.restore(number, tuple(asked))
            if members:
                self._generation += 1
                membership = self._form(members, f"process set {number} ({spell_ranks(members)})")
                address = self._engines.add(asked, None if membership is None else membership.engine)
            else:
                self._log_lacking(logging.INFO, number, asked, members)
            known = _Set(number, members, membership, tuple(asked), address)
            self._carried[known.asked] = known
            keys = [key for key, wanted in made.items() if wanted == (number, known.asked)]
            self._sets |= dict.fromkeys(keys or [known.asked], known)

    def membership_of(self, key: object) -> Membership | None:
        """Return this rank's membership in the set added under `key`; None without a set or a membership."""
        known = self._sets.get(key)
        return None if known is None else known.membership

    def add(self, key: object, ranks: Sequence[int]) -> None:
        """Make a set of `ranks` and store it under `key`.

        Blocks until all ranks have called. Then all ranks have the set, or all raise: `MismatchError` if they made
        different calls, `ValueError` for an invalid set, `RendezvousError` with a member's error if it failed to
        connect."""
        with self._changing:
            if found := self._carried.get(tuple(sorted(ranks))):
                self._sets[key] = found
                return
            number = self._registry.next
            self._generation = 1 + self._agree("add_process_set", list(ranks), number)
            asked = self._registry.check(ranks)
            members = self._registry.held(asked)
            if members != asked and self._topology.rank == 0:
                self._log_lacking(logging.WARNING, number, asked, members)
            membership = self._form(members, f"process set {number} ({spell_ranks(members)})") if members else None
            with self._closing:
                if not self._closed:
                    self._registry.add(asked)
                    engine = None if membership is None else membership.engine
                    address = self._engines.add(asked, engine) if members else None
                    self._sets[key] = _Set(number, members, membership, asked, address)
                    return
            self._end(membership)
            raise EngineClosed("it was shut down while a process set was added")

    def add_parts(self, key: object, place: int, members: Sequence[int]) -> list[int]:
        """Make a set of each communicator that a rank gives; return the ranks of this rank's, which is under `key`.

        `place` is this rank's number in MPI, and `members` are those of its communicator; none for MPI_COMM_NULL, whose
        ranks take the first set. Blocks and raises like `add`."""
        given: list[tuple[int, list[int]]] = [
            tuple(json.loads(each)) for each in self._gather(json.dumps([place, list(members)]).encode())
        ]
        rank_at = {number: rank for rank, (number, _) in enumerate(given)}
        if len(rank_at) < len(given) or any(each not in rank_at for _, among in given for each in among):
            raise ValueError(
                f"the ranks are the processes {[number for number, _ in given]} of MPI, so no process set can be made "
                "of a communicator; start the ranks with mpirun or horovodrun --mpi"
            )
        parts = [sorted(rank_at[each] for each in among) for _, among in given]
        distinct = [list(each) for each in dict.fromkeys(tuple(part) for part in parts if part)]
        if not distinct:
            raise ValueError("a process set needs at least one rank, but all ranks have given MPI_COMM_NULL")
        mine = parts[self._topology.rank] or distinct[0]
        for part in distinct:
            self.add(key if part == mine else tuple(part), part)
        return mine

    def remove(self, key: object) -> bool:
        """Remove the set added under `key`; returns False, without blocking, if there is none.

        Blocks until all ranks have called. Operations that all members had requested by then complete; others fail."""
        with self._changing:
            known = self._sets.get(key)
            if known is None or not known.ranks:
                return False
            self._agree("remove_process_set", list(known.ranks), known.number)
            if known.membership is not None:
                _finish(known.membership.engine)
                self._end(known.membership)
            with self._closing:
                if self._sets.pop(key, None) is not None:
                    self._sets = {other: each for other, each in self._sets.items() if each is not known}
                    self._carried.pop(known.asked, None)
                    self._registry.remove(known.number)
                    assert known.address is not None
                    self._engines.remove(known.address)
            return True

    def shutdown(self) -> None:
        """Leave all sets; their operations in flight fail. Idempotent."""
        with self._closing:
            self._closed = True
            known = list(self._sets.values())
            self._sets.clear()
        for process_set in known:
            self._end(process_set.membership)

    def _agree(self, verb: str, ranks: list[int], number: int) -> int:
        """Compare this call with those of all ranks; return the latest generation that one of them knows.

        Raises `MismatchError` if the calls differ."""
        mine = json.dumps([verb, sorted(ranks), number, self._generation]).encode()
        calls = [json.loads(call) for call in self._gather(mine)]
        if any(call[:3] != calls[0][:3] for call in calls):
            asked = {rank: f"{verb}({ranks}), number {number}" for rank, (verb, ranks, number, _) in enumerate(calls)}
            raise MismatchError("process_sets", asked, "call")
        return max(int(call[3]) for call in calls)

    def _form(self, members: Ranks, name: str) -> Membership | None:
        """Connect the members; all ranks take part. If a member fails, close everything and raise on all ranks."""
        forming = Forming(self._gather, members, name)
        if self._topology.rank not in members:
            forming.finish(None)
            return None
        membership = failure = None
        part = PartRendezvous(self._rendezvous, members, self._generation, forming.gather)
        with closing(part):
            try:
                membership = self._begin(part, members, name)
            except Exception as error:
                failure = error
            try:
                forming.finish(failure)
            except BaseException:
                self._end(membership)
                raise
        return membership

    def _log_lacking(self, level: int, number: int, asked: Sequence[int], members: Ranks) -> None:
        there, wanted = spell_ranks(members), spell_ranks(asked)
        log.log(level, "process set %d of %s has %s: the job has %d", number, wanted, there, self._topology.size)

    def _begin(self, part: PartRendezvous, members: Ranks, name: str) -> Membership:
        # A member that the job has lost never connects.
        host, require_alive = self._topology.hosts[self._topology.rank], self._engine.require_alive
        with naming_process_limit(RendezvousError):
            connections = connect(part, self._config, host=host, require_alive=require_alive)
            engine = start_engine(connections, self._config, members=members, process_set=name)
            membership = Membership(engine, part.rank, part.size, Counters(), members)
            try:
                self._monitors.follow(engine, part.rank, name)
            except BaseException:
                self._end(membership)
                raise
        return membership

    def _end(self, membership: Membership | None) -> None:
        if membership is None:
            return
        membership.engine.shutdown()
        self._monitors.leave(membership.engine)

    def _gather(self, payload: bytes) -> list[bytes]:
        done = self._engine.run(Request(kinds.ALLGATHER), "process_sets", frame(payload), None)
        assert done is not None
        joined = done.result()
        assert joined is not None
        return [bytes(frame) for frame in split_frames(memoryview(joined))]


def _finish(engine: Engine) -> None:
    """Block until all operations that all members have requested are complete."""
    # If the set has lost a rank, its operations have failed with the reason, and there is nothing to wait for.
    with suppress(CollectiveError, EngineClosed):
        # The first barrier may complete in the middle of a plan; the second one is in a later plan.
        for turn in ("first", "second"):
            engine.run(Request(kinds.BARRIER), f"remove_process_set.{turn}", None, None)
