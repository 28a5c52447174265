"""Who does not know the secret gets nowhere, says so quickly, and costs nothing."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.errors import AuthenticationError, ConfigError
from farandole.meeting.addresses import join_address, peer_name, split_address
from farandole.meeting.handshake import HEAD_BYTES, MAGIC, PROOF_BYTES, handshake_steps, new_secret
from helpers.authentication import authenticate

SECRET = b"s" * 32
SOON = timedelta(seconds=0.3)
LATER = timedelta(seconds=60)


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection: the one that connected, the one that accepted."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), 5) as connected,
    ):
        accepted, _ = listener.accept()
        with accepted:
            yield connected, accepted


class Conversation:
    """Both ends of a handshake without sockets; `tamper` may change what one says before the other hears it."""

    def __init__(
        self,
        *,
        connecting: bytes = SECRET,
        accepting: bytes = SECRET,
        tamper: Callable[[str, bytes], bytes] = lambda speaker, said: said,
    ) -> None:
        self.ends = {
            "C": handshake_steps(connecting, me=b"rank 1", accept=False, where="server"),
            "A": handshake_steps(accepting, me=b"rank 0", accept=True, where="client"),
        }
        self.tamper = tamper
        self.said: dict[str, bytes] = {"C": b"", "A": b""}
        self.heard: dict[str, bytearray] = {"C": bytearray(), "A": bytearray()}
        self.wishes: dict[str, int | bytes] = {name: next(steps) for name, steps in self.ends.items()}
        self.results: dict[str, bytes] = {}

    def run(self) -> dict[str, bytes]:
        """Let both speak until neither can go on; return who each believes the other to be."""
        while any(self._move(name) for name in ("C", "A") if name not in self.results):
            pass
        return self.results

    def _move(self, name: str) -> bool:
        wish, other = self.wishes[name], "A" if name == "C" else "C"
        if isinstance(wish, bytes):
            self.said[name] += wish
            self.heard[other] += self.tamper(name, wish)
            heard = b""
        elif len(self.heard[name]) >= wish:
            heard = bytes(self.heard[name][:wish])
            del self.heard[name][:wish]
        else:
            return False
        try:
            self.wishes[name] = self.ends[name].send(heard) if heard else next(self.ends[name])
        except StopIteration as done:
            self.results[name] = done.value
        return True


def test_both_learn_who_the_other_is() -> None:
    assert Conversation().run() == {"C": b"rank 0", "A": b"rank 1"}


def test_over_a_socket() -> None:
    with connection() as (connected, accepted), ThreadPoolExecutor(1) as pool:
        accepted.settimeout(7)
        other = pool.submit(authenticate, accepted, SECRET, me=b"server", accept=True, timeout=LATER)
        assert authenticate(connected, SECRET, me=b"", accept=False, timeout=LATER) == b"server"
        assert other.result(5) == b""
        assert accepted.gettimeout() == 7  # as it was before


def test_the_secret_does_not_travel() -> None:
    conversation = Conversation()
    conversation.run()
    assert SECRET not in conversation.said["C"] + conversation.said["A"]


@pytest.mark.parametrize(("connecting", "accepting"), [(SECRET, new_secret()), (new_secret(), SECRET)], ids="CA")
def test_a_wrong_secret(connecting: bytes, accepting: bytes) -> None:
    with pytest.raises(AuthenticationError, match="server is not a member of this job: it does not know"):
        Conversation(connecting=connecting, accepting=accepting).run()


def test_a_client_without_the_secret_is_found_out_by_the_server() -> None:
    # It does not check the server's proof, and goes on with one of its own.
    steps = handshake_steps(SECRET, me=b"", accept=True, where="10.0.0.9:7")
    hello = MAGIC + b"n" * 32 + b"\x00"
    assert next(steps) == HEAD_BYTES
    steps.send(hello)
    assert next(steps) == PROOF_BYTES
    with pytest.raises(AuthenticationError, match=r"10\.0\.0\.9:7"):
        steps.send(b"p" * PROOF_BYTES)


@given(speaker=st.sampled_from("CA"), at=st.integers(0, 200), bit=st.integers(0, 7))
def test_no_bit_can_be_changed_on_the_way(speaker: str, at: int, bit: int) -> None:
    seen = 0

    def flip(who: str, said: bytes) -> bytes:
        nonlocal seen
        if who != speaker:
            return said
        start, seen = seen, seen + len(said)
        if not start <= at < seen:
            return said
        changed = bytearray(said)
        changed[at - start] ^= 1 << bit
        return bytes(changed)

    conversation = Conversation(tamper=flip)
    try:
        results = conversation.run()
    except AuthenticationError:
        return
    # Either nothing was changed (the byte is past the end), or a changed length left somebody waiting for ever.
    assert len(results) < 2 or at >= len(conversation.said[speaker])


def test_a_proof_cannot_be_used_again() -> None:
    recorded = Conversation()
    recorded.run()
    hello_size = HEAD_BYTES + len(b"rank 1")
    hello, proof = recorded.said["C"][:hello_size], recorded.said["C"][hello_size:]

    replayed = handshake_steps(SECRET, me=b"rank 0", accept=True, where="client")
    next(replayed)
    replayed.send(hello[:HEAD_BYTES])
    replayed.send(hello[HEAD_BYTES:])
    assert next(replayed) == PROOF_BYTES
    with pytest.raises(AuthenticationError):
        replayed.send(proof)


def test_a_proof_cannot_be_sent_back_to_who_made_it() -> None:
    # The stranger says what the server says: its hello, then its proof.
    steps = handshake_steps(SECRET, me=b"", accept=True, where="mirror")
    assert next(steps) == HEAD_BYTES
    stranger = MAGIC + b"n" * 32 + b"\x00"
    mine_and_proof = steps.send(stranger)
    assert isinstance(mine_and_proof, bytes)
    next(steps)
    with pytest.raises(AuthenticationError):
        steps.send(mine_and_proof[-PROOF_BYTES:])


def test_two_ends_that_both_accept_do_not_agree() -> None:
    with connection() as (one, two), ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(authenticate, end, SECRET, me=b"", accept=True, timeout=SOON) for end in (one, two)]
        for end in ends:
            with pytest.raises(AuthenticationError):
                end.result(60)


def test_a_silent_peer_costs_the_timeout_and_no_more() -> None:
    with connection() as (connected, accepted):
        began = time.monotonic()
        with pytest.raises(
            AuthenticationError, match=r"127\.0\.0\.1:\d+ .*no answer within 0\.3 s|timed out"
        ) as caught:
            authenticate(accepted, SECRET, me=b"", accept=True, timeout=SOON)
        assert time.monotonic() - began < 30
        assert caught.value.where == join_address(*connected.getsockname())


def test_a_peer_that_dribbles_gets_no_more_time_than_a_silent_one() -> None:
    with connection() as (connected, accepted):
        stop = threading.Event()

        def dribble() -> None:
            for each in MAGIC * 100:
                try:
                    connected.send(bytes([each]))
                except ConnectionError:
                    return
                if stop.wait(0.05):
                    return

        thread = threading.Thread(target=dribble)
        thread.start()
        try:
            with pytest.raises(AuthenticationError):
                authenticate(accepted, SECRET, me=b"", accept=True, timeout=SOON)
        finally:
            stop.set()
            thread.join(60)


@pytest.mark.parametrize("sent", [0, 1, HEAD_BYTES - 1, HEAD_BYTES + 2])
def test_a_peer_that_hangs_up(sent: int) -> None:
    hello = MAGIC + b"n" * 32 + b"\x05abcde"
    with connection() as (connected, accepted):
        connected.sendall(hello[:sent])
        connected.shutdown(socket.SHUT_WR)
        with pytest.raises(AuthenticationError, match="broke off the handshake"):
            authenticate(accepted, SECRET, me=b"", accept=True, timeout=LATER)


def test_a_peer_that_speaks_something_else() -> None:
    with connection() as (connected, accepted):
        connected.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n")
        with pytest.raises(AuthenticationError, match="does not speak farandole's protocol"):
            authenticate(accepted, SECRET, me=b"", accept=True, timeout=LATER)


def test_what_cannot_be_a_secret_or_an_identity() -> None:
    with pytest.raises(ConfigError, match="secret: must be at least 16 bytes long, got 3"):
        next(handshake_steps(b"abc", me=b"", accept=True, where=""))
    with pytest.raises(ConfigError, match="identity: must be at most 255 bytes long, got 256"):
        next(handshake_steps(SECRET, me=b"x" * 256, accept=True, where=""))


def test_secrets_differ() -> None:
    assert new_secret() != new_secret()
    assert len(new_secret()) == 32


@pytest.mark.parametrize(("host", "port"), [("10.0.0.1", 80), ("::1", 65535), ("node-3.cluster", 1)])
def test_addresses(host: str, port: int) -> None:
    assert split_address(join_address(host, port)) == (host, port)


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:0", "host:65536", "host:http"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="is not host:port"):
        split_address(address)


def test_a_peer_that_is_gone_has_a_name_too() -> None:
    with socket.socket() as sock:
        assert peer_name(sock) == "a peer that is gone"
