"""Connections of a rank to its peers until its engine runs: who has died meanwhile, and who waits for whom."""

import socket
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

from farandole._native import Fabric, Segment
from farandole.errors import RendezvousError
from farandole.meeting.frames import Deadline, Kinds, send
from farandole.meeting.rendezvous import Lifeline
from farandole.topology import Topology

GRACE = timedelta(seconds=5)  # how long ranks wait, after the deadline, for the first rank's report of missing ranks


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Message between the ranks of one host after they have connected: a missing rank, or None for success."""

    missing: int | None


@dataclass
class Connections:
    """The parts of which the native engine is built; the engine takes ownership of the descriptors in `remotes`.

    `companions` are the connections between the first rank of this host and its other ranks, by rank. They are closed
    by `settle` or `abandon`."""

    topology: Topology
    segment: Segment
    deadline: Deadline
    chunk: int  # bytes of a slot of the segment that operations use at first
    cores: int  # that the ranks of this host may keep busy
    companions: dict[int, socket.socket] = field(default_factory=dict)
    # (peer, control, data and transfers descriptor, or -1)
    remotes: list[tuple[int, int, int, int]] = field(default_factory=list)
    fabric_name: str = ""  # of the fabric that the ranks have chosen; "" for their own transport
    fabric: Fabric | None = None  # transfers the data instead of sockets and the segment
    lifeline: Lifeline | None = None  # reports this rank's death to ranks of other hosts, until `settle`

    def settle(self) -> None:
        """Report that this rank's engine runs, and block until the engines of all ranks of this host run.

        From then on the shared segment shows which ranks die. Ranks that have died before are marked dead in it, so
        that no rank waits for them. Raises `RendezvousError` with a rank that did not start in time, or that another
        rank of this host misses."""
        leads = self.topology.rank == self.topology.local_ranks[0]
        if not leads:
            self._send(None)
        for peer, sock in self.companions.items():
            outcome = self._receive(peer, sock, timedelta(0) if leads else GRACE)
            if outcome is None:
                self.segment.mark_dead(peer)
            elif outcome.missing is not None:
                raise RendezvousError(f"rank {peer} could not connect to all ranks", missing=(outcome.missing,))
        if leads:
            self._send(None)
        self._close()

    def abandon(self, error: BaseException) -> None:
        """Close all connections; before that, report the missing rank of `error`, if any, to the ranks of this host."""
        if isinstance(error, RendezvousError) and error.missing:
            self._send(error.missing[0])
        self._close(failed=not isinstance(error, RendezvousError))

    def _send(self, missing: int | None) -> None:
        for sock in self.companions.values():
            with suppress(ConnectionError):  # the peer has died; ranks that wait for it find out by themselves
                send(sock, _Outcome(missing))

    def _receive(self, peer: int, sock: socket.socket, grace: timedelta) -> _Outcome | None:
        """Return the outcome of `peer`, None if it has died. Blocks until the deadline and `grace` have passed."""
        try:
            deadline = Deadline(timedelta(seconds=self.deadline.remaining()) + grace)
            return Kinds(_Outcome).receive(sock, deadline=deadline)
        except TimeoutError as error:
            raise RendezvousError("a rank of this host did not start its engine in time", missing=(peer,)) from error
        except (ConnectionError, EOFError):
            return None

    def _close(self, *, failed: bool = False) -> None:
        if self.lifeline is not None:
            self.lifeline.close(failed=failed)
        for sock in self.companions.values():
            sock.close()
