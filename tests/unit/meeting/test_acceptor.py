"""Listeners among strangers: members get in, strangers cost little, and the log stays short."""

import contextlib
import logging
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest

from farandole.errors import AuthenticationError
from farandole.meeting import acceptor as acceptor_module
from farandole.meeting.acceptor import AcceptingThread, Acceptor, Admitted, Refusals
from farandole.meeting.addresses import join_address, split_address
from farandole.meeting.dialer import dial
from farandole.meeting.frames import Deadline
from farandole.meeting.handshake import HEAD_BYTES, MAGIC, new_secret
from helpers.authentication import authenticate
from helpers.strangers import NOBODY, crowd

SECRET = b"s" * 32
LATER = timedelta(seconds=60)
HELLO = MAGIC + b"n" * 32 + b"\x00"


class Members:
    """Takes in who is admitted."""

    def __init__(self) -> None:
        self.who: list[bytes] = []
        self.sockets: list[socket.socket] = []

    def __call__(self, peer: Admitted) -> None:
        if peer.who == b"wrong":
            raise ValueError("its identity is wrong")
        self.who.append(peer.who)
        self.sockets.append(peer.sock)


@contextmanager
def accepting(*, most: int | None = None, unix: bool = False) -> Iterator[tuple[str | bytes, Acceptor, Members]]:
    """Accept on a thread, at an address."""
    members = Members()
    if unix:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("")
        listener.listen(4)
        address: str | bytes = listener.getsockname()
    else:
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        address = join_address(*listener.getsockname())
    acceptor = Acceptor([listener], SECRET, me=b"host", service="the service", most=most)
    thread = AcceptingThread(acceptor, members, name="accepting")
    try:
        yield address, acceptor, members
    finally:
        thread.close()
        for sock in members.sockets:
            sock.close()


def come(address: str | bytes, me: bytes = b"me", timeout: timedelta = LATER) -> bytes:
    sock, who = dial(address, SECRET, me=me, deadline=Deadline(timeout))
    sock.close()
    return who


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ends(sock: socket.socket) -> bool:
    sock.settimeout(60)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("unix", [False, True], ids=["TCP", "Unix"])
def test_members_are_admitted(unix: bool) -> None:
    with accepting(unix=unix) as (address, _, members):
        assert [come(address, b"%d" % number) for number in range(20)] == [b"host"] * 20
        until(lambda: len(members.who) == 20)
        assert members.who == [b"%d" % number for number in range(20)]


def test_a_dialer_is_welcome_only_once_it_is_admitted() -> None:
    with accepting(most=1) as (address, _, members):
        sock, _ = dial(address, SECRET, me=b"me", deadline=Deadline(LATER))
        with sock:
            until(lambda: members.who == [b"me"])


@pytest.mark.parametrize("unix", [False, True], ids=["TCP", "Unix"])
def test_five_hundred_strangers_delay_nobody(unix: bool) -> None:
    with accepting(unix=unix) as (address, _, _members):
        name = address if isinstance(address, str) else address.hex()
        with crowd([name], 500):
            took = []
            for _ in range(20):
                began = time.monotonic()
                come(address)
                took.append(time.monotonic() - began)
    assert sorted(took)[10] < 1.0  # on a busy machine; 10 s for each before


def test_a_silent_stranger_makes_way_for_newer_ones_and_a_speaking_one_last() -> None:
    with accepting(most=4) as (address, acceptor, _), contextlib.ExitStack() as stack:
        target = split_address(str(address))

        def another(said: bytes) -> socket.socket:
            sock = stack.enter_context(socket.create_connection(target, 60))
            sock.sendall(said)
            return sock

        speaking = another(HELLO)
        assert len(speaking.recv(HEAD_BYTES)) == HEAD_BYTES
        silent = [another(b"") for _ in range(5)]
        assert ends(silent[0]) and ends(silent[1])
        assert come(address) == b"host"
        speaking.setblocking(False)
        with pytest.raises(BlockingIOError):
            while speaking.recv(1000):
                pass
        assert acceptor.refusals.total >= 2


def test_crowds_at_two_listeners_do_not_evict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would come again at once, and the listener would do nothing else."""
    monkeypatch.setattr(acceptor_module, "MOST_UNPROVEN", 8)
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        acceptor = Acceptor(listeners, SECRET, me=b"host", service="the service")
        stack.callback(acceptor.close)
        for listener in listeners:
            for _ in range(8):
                stack.enter_context(socket.create_connection(listener.getsockname(), 60))
                assert acceptor.poll(1.0) == []
        assert acceptor.refusals.total == 0
        stack.enter_context(socket.create_connection(listeners[0].getsockname(), 60))
        acceptor.poll(1.0)
        assert acceptor.refusals.total == 1


def test_the_strangers_of_one_source_do_not_evict_those_of_another() -> None:
    with accepting(most=8) as (address, _, _members), contextlib.ExitStack() as stack:
        target = split_address(str(address))
        lonely = stack.enter_context(socket.create_connection(target, 60, source_address=("127.0.0.2", 0)))
        crowded = [stack.enter_context(socket.create_connection(target, 60)) for _ in range(30)]
        assert all(ends(each) for each in crowded[:20])
        lonely.settimeout(0.2)
        with pytest.raises(TimeoutError):
            lonely.recv(1)


def test_a_wrong_identity_is_refused_after_the_handshake() -> None:
    with accepting() as (address, acceptor, members):
        sock, _ = dial(address, SECRET, me=b"wrong", deadline=Deadline(LATER))
        with sock:
            assert ends(sock)
        assert members.who == [] and acceptor.refusals.total == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_refused_before_it_is_read(caplog: pytest.LogCaptureFixture) -> None:
    with accepting(unix=True) as (address, acceptor, members):
        assert isinstance(address, bytes)
        with crowd([address.hex()], 30, user=NOBODY) as strangers:
            until(lambda: acceptor.refusals.total >= 10)
            assert come(address) == b"host"
        assert strangers.connections > 0
        assert members.who == [b"me"]
    assert f"of user {NOBODY}" in caplog.text and "it belongs to another user" in caplog.text


def test_a_process_without_open_files_goes_on_accepting() -> None:
    with accepting() as (address, acceptor, members), contextlib.ExitStack() as stack:
        target = split_address(str(address))
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        strangers = [socket.socket() for _ in range(20)]
        for each in strangers:
            stack.enter_context(each)
        member = stack.enter_context(socket.socket())
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, before[1]))
            for each in strangers:
                each.connect(target)
            until(lambda: acceptor.refusals.total >= 5)
            member.connect(target)
            assert authenticate(member, SECRET, me=b"late", accept=False, timeout=LATER) == b"host"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        until(lambda: members.who == [b"late"])


def test_warnings_are_counted_and_at_most_one_a_second(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), accepting() as (address, acceptor, _):
        began = time.monotonic()
        for _ in range(300):
            with socket.create_connection(split_address(str(address)), 60) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n" + b" " * HEAD_BYTES)
        until(lambda: acceptor.refusals.total == 300)
    lines = [each.getMessage() for each in caplog.records]
    assert 1 <= len(lines) <= time.monotonic() - began + 2
    assert re.fullmatch(r"the service refused \d+ connections? from 127\.0\.0\.1: it .*", lines[0])
    assert sum(int(line.split()[3]) for line in lines) == 300


def test_words_of_warnings() -> None:
    refusals = Refusals("rank 3")
    assert refusals.due() is None and refusals.warning(0.0) is None
    refusals.note("10.0.0.9", "it hung up")
    assert refusals.warning(5.0) == "rank 3 refused 1 connection from 10.0.0.9: it hung up"
    for source in ("10.0.0.9", "10.0.0.8", "10.0.0.9"):
        refusals.note(source, "it is silent")
    assert refusals.warning(5.9) is None and refusals.due() == 6.0
    assert refusals.warning(6.0) == "rank 3 refused 3 connections from 10.0.0.9 and 1 other sources: it is silent"
    assert refusals.total == 4


class TestDialing:
    def test_a_full_backlog_is_tried_again(self) -> None:
        with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
            listener.bind("")
            listener.listen(0)
            address = listener.getsockname()
            with contextlib.suppress(BlockingIOError):
                for _ in range(10):
                    full = stack.enter_context(socket.socket(socket.AF_UNIX))
                    full.setblocking(False)
                    full.connect(address)
            coming = pool.submit(come, address)
            with pytest.raises(TimeoutError):
                coming.result(0.1)
            members = Members()
            thread = AcceptingThread(Acceptor([listener], SECRET, me=b"host", service="x"), members, name="accepting")
            assert coming.result(60) == b"host"
            thread.close()
            for sock in members.sockets:
                sock.close()

    def test_a_handshake_that_breaks_off_is_tried_again(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
            coming = pool.submit(come, join_address(*listener.getsockname()))
            for said in (0, HEAD_BYTES):
                sock, _ = listener.accept()
                sock.recv(said)
                sock.close()
            sock, _ = listener.accept()
            with sock:
                authenticate(sock, SECRET, me=b"host", accept=True, timeout=LATER)
            assert coming.result(60) == b"host"

    def test_nobody_listens(self) -> None:
        with pytest.raises(ConnectionRefusedError):
            come("127.0.0.1:1")

    def test_a_wrong_secret_is_not_tried_again(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
            coming = pool.submit(come, join_address(*listener.getsockname()))
            sock, _ = listener.accept()
            with sock, pytest.raises(AuthenticationError):
                authenticate(sock, new_secret(), me=b"host", accept=True, timeout=LATER)
            with pytest.raises(AuthenticationError, match="does not know this job's secret"):
                coming.result(60)

    def test_when_time_is_up_the_latest_problem_is_named(self) -> None:
        with pytest.raises(TimeoutError, match=r"no answer within 0\.3 s: .*Connection refused"):
            dial("127.0.0.1:1", SECRET, me=b"", deadline=Deadline(timedelta(seconds=0.3)), patient=True)

    def test_a_host_without_an_address(self) -> None:
        with pytest.raises(OSError, match=r"the host name nowhere\.invalid has no address here"):
            come("nowhere.invalid:80")


def test_members_are_admitted_without_assertions() -> None:
    """`python -O` leaves out assert statements, and what they call."""
    program = """if True:
        import socket
        from datetime import timedelta

        from farandole.meeting.acceptor import AcceptingThread, Acceptor
        from farandole.meeting.dialer import dial
        from farandole.meeting.addresses import join_address
        from farandole.meeting.frames import Deadline

        came = []
        listener = socket.create_server(("127.0.0.1", 0))
        address = join_address(*listener.getsockname())
        thread = AcceptingThread(Acceptor([listener], b"s" * 32, me=b"host", service="it"), came.append, name="accept")
        connection, host = dial(address, b"s" * 32, me=b"peer", deadline=Deadline(timedelta(seconds=20)))
        connection.close()
        thread.close()
        print(host, came[0].who)
        came[0].sock.close()
        """
    done = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "b'host' b'peer'\n", done.stderr


def test_a_listener_may_be_dropped_when_the_thread_has_ended() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    thread = AcceptingThread(Acceptor([listener], SECRET, me=b"host", service="x"), Members(), name="accepting")
    thread.close()
    thread.drop(listener)
