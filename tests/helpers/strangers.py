"""Crowds of strangers at sockets of this machine: connections that never authenticate.

    strangers.py STRANGERS SECONDS USER ADDRESS...      "host:port" of this machine, or an abstract name as hexadecimal

A third of the strangers is idle, a third sends a correct first message and nothing more, and a third disconnects at
once and connects again. A connection that the listener closes is replaced. The crowd prints "ready" when all have
connected, and ends when its standard input ends. Its limits are STRANGERS at each address, SECONDS, and
MOST_CONNECTIONS in all.
"""

import contextlib
import ipaddress
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from farandole.meeting.addresses import split_address
from farandole.meeting.handshake import MAGIC, NONCE_BYTES

MOST_STRANGERS, MOST_SECONDS, MOST_CONNECTIONS = 2000, 60.0, 200_000
TURN = 0.005  # seconds of a turn of the crowd
FLOODED_AT_ONCE = 8  # connections of a turn that are closed at once
NOBODY = 65534  # id of a user without files
KINDS = ("idle", "half", "flood")


@dataclass
class Crowd:
    """A crowd at some addresses, on its parent's side."""

    connections: int = 0  # connections that it made, known after its end
    pid: int = 0
    refused: int = 0  # connections that it could not make
    addresses: list[str] = field(default_factory=list)


@contextlib.contextmanager
def crowd(addresses: Sequence[str], strangers: int, *, seconds: float = 30.0, user: int = 0) -> Iterator[Crowd]:
    """Have `strangers` connected to each of `addresses` during the block, as `user`, for `seconds` at most."""
    command = [sys.executable, str(Path(__file__)), str(strangers), str(seconds), str(user), *addresses]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        found = Crowd(pid=process.pid, addresses=list(addresses))
        try:
            assert process.stdout.readline() == "ready\n", "the crowd did not come"
            yield found
        finally:
            process.stdin.close()
            counts = process.stdout.read()
            if counts:
                found.connections, found.refused = json.loads(counts)


class _Strangers:
    """The crowd: connections of one thread that never blocks."""

    def __init__(self, addresses: Sequence[str], strangers: int) -> None:
        self.selector = selectors.DefaultSelector()
        self.targets = [_target(address) for address in addresses]
        self.strangers = strangers
        self.made = self.refused = 0
        self.wanted = [(target, kind) for target in self.targets for kind in KINDS[:2]] * (strangers // 3)

    def turn(self) -> None:
        """Replace closed connections, and make some that are closed at once."""
        # At most as many as the listener's queue holds.
        wanted, self.wanted = self.wanted[:200], self.wanted[200:]
        for target, kind in wanted:
            self.come(target, kind)
        for target in self.targets:
            for _ in range(min(FLOODED_AT_ONCE, self.strangers // 3)):
                self.come(target, "flood")
        for key, events in self.selector.select(TURN):
            self.look_after(key.fileobj, key.data, events)  # type: ignore[arg-type]

    def come(self, target: tuple[int, object], kind: str) -> None:
        if self.made >= MOST_CONNECTIONS:
            return
        self.made += 1
        family, address = target
        sock = socket.socket(family)
        sock.setblocking(False)
        try:
            sock.connect(address)  # type: ignore[arg-type]
        except BlockingIOError:
            if family == socket.AF_UNIX:  # the listener's queue is full
                self.refused += 1
                sock.close()
                if kind != "flood":
                    self.wanted.append((target, kind))
                return
        except OSError:
            self.refused += 1
            sock.close()
            return
        if kind == "flood":
            sock.close()
            return
        self.selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, (target, kind))

    def look_after(self, sock: socket.socket, who: tuple[tuple[int, object], str], events: int) -> None:
        """Send what this kind of stranger sends, and replace a connection that the listener has closed."""
        try:
            if events & selectors.EVENT_WRITE:
                if who[1] == "half":
                    sock.send(MAGIC + os.urandom(NONCE_BYTES) + b"\0")
                self.selector.modify(sock, selectors.EVENT_READ, who)
            elif sock.recv(4096):
                return  # the listener's message of the handshake
            else:
                raise ConnectionResetError
        except OSError:
            self.selector.unregister(sock)
            sock.close()
            self.wanted.append(who)


def _target(address: str) -> tuple[int, object]:
    if ":" not in address:
        return socket.AF_UNIX, bytes.fromhex(address)
    host, port = split_address(address)
    _require_own(host)
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, port)


def _require_own(host: str) -> None:
    """Raise `OSError` unless `host` is an address of this machine; other machines must not be attacked."""
    with socket.socket(socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET) as probe:
        probe.bind((host, 0))


def main(arguments: Sequence[str]) -> None:
    """Run a crowd; see the module."""
    strangers, seconds, user = min(int(arguments[0]), MOST_STRANGERS), float(arguments[1]), int(arguments[2])
    present = _Strangers(arguments[3:], strangers)
    if user:
        os.setuid(user)
    end = time.monotonic() + min(seconds, MOST_SECONDS)
    with selectors.DefaultSelector() as commands:
        commands.register(sys.stdin, selectors.EVENT_READ)
        is_ready, first = False, len(present.wanted)
        while time.monotonic() < end and not commands.select(0):
            present.turn()
            if not is_ready and present.made >= first:
                is_ready = True
                print("ready", flush=True)
        commands.select(MOST_SECONDS)
    print(json.dumps([present.made, present.refused]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
