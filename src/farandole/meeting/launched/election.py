"""Generations of an elastic job whose launcher is lost: a member leads, and gives out the places.

The members of the last generation know each other's addresses. The one with the lowest number that can be reached
leads. It waits until each other member has come or has ended. A process has ended when its host refuses a connection
to its port; a member that does not answer may still train elsewhere. So a generation needs more members than there are
such ones, and at least as many ranks as the user wants."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from farandole.errors import AuthenticationError, FarandoleError, RendezvousError
from farandole.meeting.acceptor import HANDSHAKE_TIMEOUT, AcceptingThread, Acceptor, Admitted, listen
from farandole.meeting.addresses import join_address, split_address
from farandole.meeting.dialer import dial
from farandole.meeting.frames import Deadline, Kinds, send
from farandole.meeting.handshake import new_secret
from farandole.meeting.launched.elastic_messages import LARGEST, Leave, Place, Standing
from farandole.meeting.server import RendezvousServer
from farandole.topology import own_addresses

log = logging.getLogger(__name__)

PROBE = 2.0  # seconds for an answer to an attempt to connect
FIRST_PROBE, LAST_PROBE = 0.02, 1.0  # seconds between two probes of the members that have not come


def has_ended(address: str) -> bool:
    """Return whether the host at `address` refuses connections to that port: the process that listened has ended.

    False if it accepts, or if the host does not answer within 2 s."""
    try:
        socket.create_connection(split_address(address), timeout=PROBE).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _order_of_ranks(commits: Mapping[int, int], hosts: Mapping[int, str]) -> list[int]:
    """Return the members in the order of their new ranks: the newest state first, each host's together.

    `commits` by member is in the order of the old ranks, which members with equally many keep."""
    newest = sorted(commits, key=lambda member: -commits[member])
    places = list(dict.fromkeys(hosts[member] for member in newest))
    return sorted(newest, key=lambda member: places.index(hosts[member]))


class LauncherIsBack(FarandoleError):
    """A launcher has taken the job over: it gives out the places."""


@dataclass(frozen=True, slots=True)
class _Came:
    """A member that has asked this one for a place, by a connection that ends with it."""

    sock: socket.socket
    standing: Standing


class Election:
    """One member's part in the elections of its job. It listens from the beginning, and answers without a launcher."""

    def __init__(self, number: int, secret: bytes) -> None:
        self._me, self._secret = number, secret
        self._listeners: list[socket.socket] = []
        for address in own_addresses():
            with contextlib.suppress(OSError):  # of an interface that has just gone
                self._listeners.append(listen(address))
        self.addresses = [join_address(*each.getsockname()[:2]) for each in self._listeners]
        self._place: Place | None = None
        self._reach: dict[int, str] = {}
        self._accepting: AcceptingThread | None = None
        self._changed = threading.Condition()
        self._came: dict[int, _Came] = {}
        self._formed: dict[socket.socket, int] = {}  # ranks of the generation that this member has formed
        self._server: RendezvousServer | None = None
        self._leader: socket.socket | None = None

    @property
    def is_possible(self) -> bool:
        """Whether this member has been in a generation whose members' addresses it knows."""
        return self._place is not None and bool(self._place.members)

    @property
    def place(self) -> tuple[int, int]:
        """The generation and the rank in it of this member's latest place."""
        assert self._place is not None
        return self._place.generation, self._place.rank

    @property
    def others(self) -> dict[int, str]:
        """The addresses of the other members of this one's latest generation."""
        members = () if self._place is None else self._place.members
        return {number: self._reach[number] for number in members if number != self._me}

    def answer(self) -> None:
        """Answer calls of other members from now on; idempotent."""
        with self._changed:
            if self._accepting is None:
                acceptor = Acceptor(self._listeners, self._secret, me=b"leader", service=f"member {self._me}")
                self._accepting = AcceptingThread(acceptor, self._admit, name="farandole-election")

    def take(self, place: Place) -> None:
        """Take note of this member's place, by which it finds the others."""
        self._place = place
        self._reach.update(zip(place.members, place.reach, strict=False))

    def elect(self, commits: int, patience: timedelta, is_back: Callable[[], bool]) -> Place:
        """Return this member's place in the next generation, for a state of `commits` commits.

        Blocks until each member of the last one has come or has ended, up to `patience` for each that does not answer.
        Raises `RendezvousError` if too few are left, and `LauncherIsBack` once `is_back()` says so."""
        assert self._place is not None
        place, unknown = self._place, 0
        mine = Standing(commits, place.generation, place.local_rank)
        self._leave()
        for number in sorted(place.members):
            if number == self._me:
                return self._lead(place, mine, unknown, patience, is_back)
            try:
                found = self._follow(number, mine, patience)
            except (ConnectionRefusedError, AuthenticationError):  # another process has got its port
                log.info("member %d has ended", number)
                continue
            except OSError as error:
                log.warning("member %d is left behind, it cannot be reached: %s", number, error)
                unknown += 1
                continue
            return replace(found, local_rank=place.local_rank)
        raise RendezvousError(f"member {self._me} is none of the last generation's")

    def close(self) -> None:
        """End this member's part; idempotent."""
        self._leave()
        if self._server is not None:
            self._server.close()
        if self._accepting is not None:
            self._accepting.close()
        for listener in self._listeners:
            listener.close()
        with self._changed:
            socks = [*self._formed, *(came.sock for came in self._came.values())]
        for sock in socks:
            with contextlib.suppress(OSError):  # the member has ended it
                sock.shutdown(socket.SHUT_RDWR)

    def _leave(self) -> None:
        """End the connection to the member that led before."""
        if self._leader is not None:
            self._leader.close()
            self._leader = None

    # --- another member leads

    def _follow(self, leader: int, mine: Standing, patience: timedelta) -> Place:
        """Ask `leader` for a place; raises `ConnectionRefusedError` if it has ended, before or meanwhile."""
        me = f"member {self._me}".encode()
        sock, _ = dial(self._reach[leader], self._secret, me=me, deadline=Deadline(patience))
        try:
            send(sock, mine, deadline=Deadline(patience))
            # The leader waits for the others as long as this member did for it.
            place = Kinds[Place | Leave](Place, Leave).receive(sock, limit=LARGEST, deadline=Deadline(2 * patience))
        except (EOFError, ConnectionError) as error:
            sock.close()
            raise ConnectionRefusedError(f"it broke off ({error})") from error
        except BaseException:
            sock.close()
            raise
        if isinstance(place, Leave):
            sock.close()
            raise RendezvousError(place.why)
        self._leader = sock  # its end tells the leader that this member has ended
        return place

    # --- this member leads

    def _lead(
        self, place: Place, mine: Standing, unknown: int, patience: timedelta, is_back: Callable[[], bool]
    ) -> Place:
        self.answer()
        unknown += self._gather({number for number in place.members if number > self._me}, patience, is_back)
        with self._changed:
            came, self._came = self._came, {}
            present = {number for number in place.members if number in came} | {self._me}
            held = max([mine.commits, *(came[number].standing.commits for number in present - {self._me})])
            if len(present) >= place.least and len(present) > unknown and held >= 0:
                return self._form(place, mine, {number: came[number] for number in present - {self._me}})
        missing = f", and {unknown} that do not answer" if unknown else ""
        missing += ", none of which has the state of the training" if held < 0 else ""
        why = f"the launcher is lost, {len(present)} ranks are left{missing}; {place.least} are needed (--min-np)"
        for each in came.values():
            with contextlib.suppress(OSError), each.sock:
                send(each.sock, Leave(why))
        raise RendezvousError(why)

    def _gather(self, others: set[int], patience: timedelta, is_back: Callable[[], bool]) -> int:
        """Wait until each of `others` has come or ended; return how many have done neither within `patience`."""
        end, pause, ended = time.monotonic() + patience.total_seconds(), FIRST_PROBE, set[int]()

        def awaited() -> set[int]:
            return others - ended - self._came.keys()

        while True:
            with self._changed:
                self._changed.wait_for(lambda: not awaited(), pause)
                missing = awaited()
            if is_back():
                self._send_off()
                raise LauncherIsBack
            if not missing or time.monotonic() >= end:
                return len(missing)
            ended |= {number for number in missing if has_ended(self._reach[number])}
            pause = min(2 * pause, LAST_PROBE)

    def _send_off(self) -> None:
        """Break off the connections of the members that have come, which then find the launcher by themselves."""
        with self._changed:
            came, self._came = self._came, {}
        for each in came.values():
            with contextlib.suppress(OSError):  # the member has ended it
                each.sock.shutdown(socket.SHUT_RDWR)

    def _form(self, place: Place, mine: Standing, came: Mapping[int, _Came]) -> Place:
        """Give all members their places; the caller holds the lock, so that each one's end is noticed."""
        standings = {number: came[number].standing for number in place.members if number in came}
        standings[self._me] = mine
        commits = {number: standings[number].commits for number in place.members if number in standings}
        hosts = dict(zip(place.members, place.hosts, strict=True))
        order = _order_of_ranks(commits, hosts)
        at = {number: each.sock.getsockname()[0] for number, each in came.items()}
        listening = list(dict.fromkeys(at.values())) or [split_address(self.addresses[0])[0]]
        if self._server is not None:
            self._server.close()
        secret, generation = new_secret(), max(each.generation for each in standings.values()) + 1
        self._server = RendezvousServer(
            len(order), secret, host=listening[0], others=listening[1:], generation=generation
        )
        addresses = dict(zip(listening, self._server.addresses, strict=True))
        places = {
            number: Place(
                rank=rank,
                local_rank=standings[number].slot,
                generation=generation,
                most=place.most,
                hosts=[hosts[each] for each in order],
                address=addresses[at.get(number, listening[0])],
                secret=secret,
                members=order,
                least=place.least,
            )
            for rank, number in enumerate(order)
        }
        log.warning("the launcher is lost: members %s go on by themselves", ", ".join(map(str, order)))
        self._formed = {each.sock: places[number].rank for number, each in came.items()}
        for number, each in came.items():
            with contextlib.suppress(OSError):  # it has ended, which `_read` notices
                send(each.sock, places[number])
        return places[self._me]

    def _admit(self, admitted: Admitted) -> None:
        word, _, number = admitted.who.decode(errors="replace").partition(" ")
        if word != "member" or not number.isdigit():
            raise RendezvousError("a caller that is no member came", where=admitted.where)
        threading.Thread(
            target=self._read, args=(int(number), admitted.sock), name=f"farandole-member-{number}", daemon=True
        ).start()

    def _read(self, number: int, sock: socket.socket) -> None:
        """Read a member's request, and then notice its end."""
        with sock, contextlib.suppress(OSError, EOFError, RendezvousError, ValueError):
            standing = Kinds[Standing](Standing).receive(sock, deadline=Deadline(HANDSHAKE_TIMEOUT))
            sock.settimeout(None)
            with self._changed:
                self._came[number] = _Came(sock, standing)
                self._changed.notify_all()
            sock.recv(1)  # a member says nothing more
        with self._changed:
            if number in self._came and self._came[number].sock is sock:
                del self._came[number]
            rank = self._formed.pop(sock, None)
            if rank is not None and self._server is not None:
                self._server.depart(rank, f"member {number} is lost")
