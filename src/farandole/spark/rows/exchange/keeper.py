"""Keeper of a host: a process that holds the rows dealt there, from the tasks' end until all ranks have theirs.

    python -m farandole.spark.rows.exchange.keeper      settings as JSON on the standard input

A task that reads rows ends before the ranks begin, and Spark may end its process at any time. So the first such task on
a host starts the keeper. The keeper's files have no names. Tasks of the same host and user connect to a Unix socket,
whose name derives from the job's secret, and receive descriptors of the files. Tasks of other hosts request bytes over
TCP, at one address: that of the configured interface, or the one that leads to the driver. The keeper ends, and its
files are freed, when the driver dismisses it or when its connection to the driver ends.
After the handshake a peer sends requests: the messages of `access.py`.
"""

import contextlib
import json
import os
import socket
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import BinaryIO

from farandole.errors import CacheError, FarandoleError
from farandole.meeting.acceptor import BACKLOG, AcceptingThread, Acceptor, Admitted, listen
from farandole.meeting.addresses import join_address, split_address
from farandole.meeting.dialer import dial
from farandole.meeting.frames import Deadline, Kinds, send
from farandole.spark.driver.relay import Over
from farandole.spark.jobs.addresses import address_toward, keep_alive
from farandole.spark.rows.disks import local_directory, nameless_file
from farandole.spark.rows.exchange.access import (
    A_FILE,
    HANDSHAKE_TIMEOUT,
    KEEPER,
    STALLED,
    Borrow,
    Commit,
    Done,
    Keeping,
    Lent,
    Open,
    Read,
    Refused,
    keeper_identity,
    local_name,
)
from farandole.topology import interface_address

SEND_PIECE = 1 << 20  # bytes

_REQUESTS = Kinds[Borrow | Commit | Open | Read](Borrow, Commit, Open, Read)


@dataclass(slots=True)
class _File:
    file: BinaryIO
    directory: str
    end: int = 0  # of the committed bytes
    lent: bool = False


class Keeper:
    """Server for tasks of this host and of others, with a thread for each connection."""

    def __init__(self, secret: bytes, local: socket.socket, remote: socket.socket, address: str) -> None:
        self._address = address
        self._files: list[_File] = []
        self._lock = threading.Lock()
        acceptor = Acceptor([local, remote], secret, me=KEEPER, service=f"the keeper of rows at {address}")
        self._accepting = AcceptingThread(acceptor, self._admit, name="farandole-keeper")

    def let_go(self) -> None:
        """Close the files."""
        with self._lock:
            for held in self._files:
                held.file.close()

    def _admit(self, peer: Admitted) -> None:
        threading.Thread(target=self._serve, args=(peer.sock,), name="farandole-kept", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        borrowed: _File | None = None
        local = connection.family == socket.AF_UNIX
        try:
            with connection:
                if not local:
                    keep_alive(connection, STALLED)
                send(connection, Keeping(self._address))
                while True:
                    # No limit between two requests: meanwhile the task reads from Spark or from other keepers.
                    connection.settimeout(None)
                    asked = _REQUESTS.receive(connection)
                    connection.settimeout(STALLED.total_seconds())
                    if isinstance(asked, Borrow) and local:
                        try:
                            borrowed, number = self._lend()
                        except CacheError as error:
                            send(connection, Refused(error.folder, error.problem))
                            continue
                        send(connection, Lent(number, borrowed.end, borrowed.directory))
                        socket.send_fds(connection, [A_FILE], [borrowed.file.fileno()])
                    elif isinstance(asked, Commit) and borrowed is not None:
                        borrowed.end = asked.end
                        send(connection, Done())
                    elif isinstance(asked, Open) and local:
                        opened = self._files[asked.number].file
                        send(connection, Done())
                        socket.send_fds(connection, [A_FILE], [opened.fileno()])
                    elif isinstance(asked, Read):
                        self._send(connection, asked)
                    else:
                        raise ValueError(f"{asked} is not for this connection")
        except (OSError, EOFError, FarandoleError, ValueError, KeyError, IndexError):
            pass  # the peer has finished or is gone, or its request was wrong, which the end of the connection answers
        finally:
            if borrowed is not None:
                self._take_back(borrowed)

    def _lend(self) -> tuple[_File, int]:
        """Return a file that no task has, a new one only if all are lent, and its number; raises `CacheError`."""
        with self._lock:
            number = next((place for place, held in enumerate(self._files) if not held.lent), len(self._files))
            if number == len(self._files):
                directory = local_directory(os.environ, number)
                self._files.append(_File(nameless_file(directory), directory))
            self._files[number].lent = True
            return self._files[number], number

    def _take_back(self, held: _File) -> None:
        """Cut a lent file to its committed bytes, and make it available again."""
        with self._lock:
            held.file.truncate(held.end)
            held.lent = False

    def _send(self, connection: socket.socket, asked: Read) -> None:
        """Send committed bytes of a file; raises `ValueError` for others."""
        held, at, length = self._files[asked.number], asked.at, asked.length
        if at < 0 or length < 0 or at + length > held.end:
            raise ValueError(f"bytes {at} to {at + length} of file {asked.number} are not there")
        while length:
            sent = os.sendfile(connection.fileno(), held.file.fileno(), at, min(length, SEND_PIECE))
            at, length = at + sent, length - sent


def main() -> None:
    """Serve until the driver dismisses the keeper or is gone; returns at once if this host has a keeper already.

    The started process forks the keeper and ends as soon as it listens, so that the task that has started it need not
    wait longer, nor reap the keeper."""
    settings: dict[str, str] = json.load(sys.stdin)
    secret, driver = bytes.fromhex(settings["secret"]), split_address(settings["driver"])
    local = socket.socket(socket.AF_UNIX)
    try:
        local.bind(local_name(secret))
    except OSError:
        return  # another task of this host was faster
    me = keeper_identity(socket.gethostname())
    lifeline, _ = dial(settings["driver"], secret, me=me, deadline=Deadline(HANDSHAKE_TIMEOUT))
    keep_alive(lifeline, timedelta(minutes=1))
    interface = settings["interface"]
    host = interface_address(interface) if interface else address_toward(*driver)
    remote = listen(host)
    local.listen(BACKLOG)
    if os.fork():
        os._exit(0)
    os.setsid()
    with open(os.devnull, "r+b") as nothing:
        for stream in range(3):
            os.dup2(nothing.fileno(), stream)
    keeper = Keeper(secret, local, remote, join_address(host, remote.getsockname()[1]))
    with contextlib.suppress(OSError, EOFError, FarandoleError):  # the driver is gone, which ends the job as well
        Kinds(Over).receive(lifeline)
    # Before the lifeline closes, from whose end the driver concludes that no file is left.
    keeper.let_go()
    os._exit(0)


if __name__ == "__main__":
    main()
