"""The process sets of one context: how all ranks agree on them, and the engine that each has of its own.

A set is made by the same steps as a job: its members meet (by way of all ranks, who are connected already), connect,
and start an engine. So sets share nothing that could make one of them wait for another.
"""

import json
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from farandole._native import Engine, RankEngines
from farandole.config import Config
from farandole.core.monitoring.monitors import Monitors
from farandole.core.operations import kinds
from farandole.core.operations.frames import split_frames, write_frame
from farandole.core.operations.request import Request
from farandole.core.process_sets.forming import Forming
from farandole.core.process_sets.membership import Counters, Membership
from farandole.core.process_sets.registry import Ranks, Registry
from farandole.core.wiring.connect import connect
from farandole.core.wiring.start import start_engine
from farandole.errors import CollectiveError, EngineClosed, MismatchError, spell_ranks
from farandole.rendezvous import PartRendezvous, Rendezvous
from farandole.topology import Topology

__all__ = ["Sets"]


@dataclass(frozen=True)
class _Set:
    number: int
    ranks: Ranks
    membership: Membership | None  # None: this rank is no member


class Sets:
    """The process sets that the ranks of one context have added, each under the object that a user holds of it.

    Adding and removing is for all ranks together, in the same order, members or not."""

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
        self._registry = Registry(topology.size)
        self._sets: dict[object, _Set] = {}
        self._generation = 0  # of the latest set
        self._changing = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False

    @property
    def ranks_by_number(self) -> dict[int, Ranks]:
        """The ranks of each set that the job has, by number; 0 is the set of all ranks."""
        return self._registry.sets

    def number_of(self, key: object) -> int | None:
        """Return the number of the set added under `key`, if it is there."""
        known = self._sets.get(key)
        return None if known is None else known.number

    def membership_of(self, key: object) -> Membership | None:
        """Return this rank's membership in the set added under `key`; None without a membership, or such a set."""
        known = self._sets.get(key)
        return None if known is None else known.membership

    def add(self, key: object, ranks: Sequence[int]) -> None:
        """Make a set of `ranks` and keep it under `key`.

        Blocks until all ranks have called; then it is there on all of them, or all raise: `MismatchError` when they
        asked for different things, `ValueError` when there cannot be such a set, `RendezvousError` when a member failed
        to connect, with its words."""
        with self._changing:
            number = self._registry.next
            self._generation = 1 + self._agree("add_process_set", list(ranks), number)
            members = self._registry.check(ranks)
            membership = self._form(members, f"process set {number} ({spell_ranks(members)})")
            with self._closing:
                if not self._closed:
                    self._registry.add(members)
                    self._sets[key] = _Set(number, members, membership)
                    self._engines.add(number, None if membership is None else membership.engine)
                    return
            self._end(membership)
            raise EngineClosed("it was shut down while a process set was added")

    def remove(self, key: object) -> bool:
        """End the set added under `key`; returns False, at once, when there is none.

        Blocks until all ranks have called. What all members had asked for by then is done; what they had not fails."""
        with self._changing:
            known = self._sets.get(key)
            if known is None:
                return False
            self._agree("remove_process_set", list(known.ranks), known.number)
            if known.membership is not None:
                _finish(known.membership.engine)
                self._end(known.membership)
            with self._closing:
                if self._sets.pop(key, None) is not None:
                    self._registry.remove(known.number)
                    self._engines.remove(known.number)
            return True

    def shutdown(self) -> None:
        """Leave all sets; operations in flight in them fail. Idempotent."""
        with self._closing:
            self._closed = True
            left = list(self._sets.values())
            self._sets.clear()
        for each in left:
            self._end(each.membership)

    def _agree(self, verb: str, ranks: list[int], number: int) -> int:
        """Learn that all ranks want the same; returns the latest generation that any of them knows of."""
        wish = json.dumps([verb, sorted(ranks), number, self._generation]).encode()
        wishes = [json.loads(each) for each in self._gather(wish)]
        if any(each[:3] != wishes[0][:3] for each in wishes):
            asked = {rank: f"{verb}({ranks}), number {number}" for rank, (verb, ranks, number, _) in enumerate(wishes)}
            raise MismatchError("process_sets", asked, "call")
        return max(int(each[3]) for each in wishes)

    def _form(self, members: Ranks, name: str) -> Membership | None:
        """Connect the members, in the presence of all ranks; nothing is left of it when one of them fails."""
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

    def _begin(self, part: PartRendezvous, members: Ranks, name: str) -> Membership:
        # A member that is lost to the job never connects.
        host, require_alive = self._topology.hosts[self._topology.rank], self._engine.require_alive
        wiring = connect(part, self._config, host=host, require_alive=require_alive)
        engine = start_engine(wiring, self._config, members=members, process_set=name)
        self._monitors.follow(engine, part.rank, name)
        return Membership(engine, part.rank, part.size, Counters(), members)

    def _end(self, membership: Membership | None) -> None:
        if membership is None:
            return
        membership.engine.shutdown()
        self._monitors.leave(membership.engine)

    def _gather(self, payload: bytes) -> list[bytes]:
        done = self._engine.run(Request(kinds.ALLGATHER), "process_sets", write_frame(payload), None)
        assert done is not None
        joined = done.result()
        assert joined is not None
        return [bytes(frame) for frame in split_frames(memoryview(joined))]


def _finish(engine: Engine) -> None:
    """Wait for what all members have asked for."""
    # A set that has lost a rank has nothing more to wait for, and its operations have failed with the reason.
    with suppress(CollectiveError, EngineClosed):
        # The first may complete in the middle of a plan; the second is in a plan after that.
        for turn in ("first", "second"):
            engine.run(Request(kinds.BARRIER), f"remove_process_set.{turn}", None, None)
