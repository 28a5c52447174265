"""The launcher's connections to the members of an elastic job."""

import contextlib
import queue
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farandole.errors import RendezvousError
from farandole.meeting.acceptor import AcceptingThread, Acceptor, Admitted, listen
from farandole.meeting.addresses import join_address, split_address
from farandole.meeting.frames import send
from farandole.meeting.launched.elastic_messages import FROM_MEMBER, Back, Bye, Ping, Pong, Ready

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SEND = 5.0  # seconds for a member's kernel to take a message of some bytes; it has room for thousands of them


@dataclass(frozen=True, slots=True)
class Came:
    """Event: a member asks for a place, with the state of so many commits."""

    number: int
    commits: int


@dataclass(frozen=True, slots=True)
class Returned:
    """Event: a member of an earlier launcher has called this one."""

    number: int
    place: Back


@dataclass(frozen=True, slots=True)
class Left:
    """Event: a member's connection has ended, after its word that it has ended well, or without."""

    number: int
    well: bool


@dataclass(slots=True)
class Signs:
    """What a member lets its launcher know of its life."""

    unanswered: int = 0  # questions since its last message
    was_cut: bool = False  # its connection has ended without a word; its agent tells why, unless that is lost, too
    operations: int = 0  # that it has finished in its generation
    still: int = 0  # answers since that number changed

    def note(self, message: Ready | Pong) -> None:
        """Take note of a message."""
        done = message.operations if isinstance(message, Pong) else -1
        self.still = self.still + 1 if done == self.operations else 0
        self.unanswered, self.operations = 0, done


class Members:
    """Connections of members that have proved `secret`, each read by a thread of its own; their requests are `events`.

    A member has one connection; a new one takes the place of an older one."""

    def __init__(self, secret: bytes, events: "queue.SimpleQueue[object]") -> None:
        self._secret, self._events = secret, events
        self._changing = threading.Lock()
        self._socks: dict[int, socket.socket] = {}
        self._signs: dict[int, Signs] = {}
        self._addresses: dict[int, list[str]] = {}
        self._listeners: dict[str, tuple[str, AcceptingThread]] = {}
        self._threads: list[threading.Thread] = []

    @property
    def ports(self) -> dict[str, int]:
        """The port of each address at which this machine listens."""
        return {host: split_address(address)[1] for host, (address, _) in self._listeners.items()}

    def listen(self, host: str, port: int = 0) -> str:
        """Listen on the address `host` of this machine, if not yet, and return the "host:port" for members.

        Raises `OSError` if another process has taken the `port`; 0 is a free one."""
        if host not in self._listeners:
            listener = listen(host, port)
            address = join_address(host, listener.getsockname()[1])
            acceptor = Acceptor([listener], self._secret, me=b"launcher", service=f"the launcher at {address}")
            self._listeners[host] = address, AcceptingThread(acceptor, self._admit, name="farandole-members")
        return self._listeners[host][0]

    def send(self, number: int, message: "DataclassInstance") -> bool:
        """Send a message; False if the member has no connection."""
        with self._changing:
            sock = self._socks.get(number)
        if sock is None:
            return False
        try:
            send(sock, message)
        except OSError:
            return False  # its end is noticed by its agent, or by its silence
        return True

    def ask(self, number: int) -> Signs:
        """Ask the member whether it is alive; return what it has said so far."""
        with self._changing:
            signs = self._signs.setdefault(number, Signs())
            signs.unanswered += 1
        if not self.send(number, Ping()) and not signs.was_cut:
            signs.unanswered = 0  # it is not connected yet
        return signs

    def addresses(self, number: int) -> list[str]:
        """Return the addresses at which the other members find this one if they survive the launcher."""
        with self._changing:
            return self._addresses.get(number, [])

    def close(self) -> None:
        """Close all listeners and connections; idempotent."""
        for _, thread in self._listeners.values():
            thread.close()
        with self._changing:
            socks, threads = list(self._socks.values()), list(self._threads)
        for sock in socks:
            with contextlib.suppress(OSError):  # the member has ended it already
                sock.shutdown(socket.SHUT_RDWR)
        for reader in threads:
            reader.join()

    def _admit(self, admitted: Admitted) -> None:
        word, _, number = admitted.who.decode(errors="replace").partition(" ")
        if word != "member" or not number.isdigit():
            raise RendezvousError("a caller that is no member came to the launcher", where=admitted.where)
        # A stopped process takes no message: the launcher must not wait for it.
        admitted.sock.settimeout(SEND)
        reader = threading.Thread(
            target=self._read, args=(int(number), admitted.sock), name=f"farandole-member-{number}", daemon=True
        )
        with self._changing:
            self._signs[int(number)] = Signs()
            self._socks[int(number)] = admitted.sock
            self._threads = [each for each in self._threads if each.is_alive()] + [reader]
        reader.start()

    def _read(self, number: int, sock: socket.socket) -> None:
        well = False
        with sock, contextlib.suppress(OSError, EOFError, RendezvousError, ValueError):
            while True:
                try:
                    message = FROM_MEMBER.receive(sock)
                except TimeoutError:
                    continue  # a member that trains says nothing
                if isinstance(message, Back):
                    self._events.put(Returned(number, message))
                    continue
                if isinstance(message, Bye):
                    well = message.well
                    continue
                with self._changing:
                    self._signs.setdefault(number, Signs()).note(message)
                    if isinstance(message, Ready):
                        self._addresses[number] = message.addresses
                if isinstance(message, Ready):
                    self._events.put(Came(number, message.commits))
        with self._changing:
            if self._socks.get(number) is not sock:
                return  # it has called again
            del self._socks[number]
            self._signs.setdefault(number, Signs()).was_cut = not well
        self._events.put(Left(number, well))
