"""Whatever bytes come, the handshake and the rendezvous refuse them in bounded time, and members still meet."""

import contextlib
import random
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from farandole.errors import AuthenticationError, RendezvousError
from farandole.meeting import acceptor
from farandole.meeting.addresses import join_address, split_address
from farandole.meeting.frames import LENGTH, Steps, encode, frame
from farandole.meeting.handshake import HEAD_BYTES, MAGIC, NONCE_BYTES, PROOF_BYTES, handshake_steps, new_secret
from farandole.meeting.rendezvous import RendezvousServer, TcpRendezvous
from farandole.meeting.rounds import Caller, decode_result
from farandole.meeting.server import Request
from helpers.authentication import authenticate

SECRET = new_secret()
LATER = timedelta(seconds=60)
PATIENCE = 0.5  # seconds that the server gives to who says nothing more
ROUNDS = 200
SEEDS = range(4)

Recipe = Callable[[random.Random], bytes]


def noise(dice: random.Random) -> bytes:
    return dice.randbytes(dice.choice([0, 1, 10, HEAD_BYTES, 100, 5000]))


def other_protocol(dice: random.Random) -> bytes:
    return dice.choice(
        [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"SSH-2.0-x\r\n"]
    )


def hello(dice: random.Random, identity: bytes) -> bytes:
    return MAGIC + dice.randbytes(NONCE_BYTES) + bytes([len(identity)]) + identity


def false_proof(dice: random.Random) -> bytes:
    """All that a member says, but for the secret."""
    caller = Caller(rank=dice.randrange(3), size=2, generation=0, round=0)
    return hello(dice, encode(caller)) + dice.randbytes(PROOF_BYTES) + frame(encode(Request(5.0, False, b"abc")))


def long_identity(dice: random.Random) -> bytes:
    return hello(dice, dice.randbytes(255)) + noise(dice)


def damaged(dice: random.Random) -> bytes:
    """A member's bytes with a few of them changed, left out or doubled."""
    said = bytearray(false_proof(dice))
    for _ in range(dice.randrange(1, 5)):
        at = dice.randrange(len(said))
        said[at : at + dice.randrange(3)] = dice.randbytes(dice.randrange(3))
    return bytes(said[: dice.randrange(len(said) + 1)])


RECIPES: list[Recipe] = [noise, other_protocol, false_proof, long_identity, damaged]


def feed(steps: Steps[bytes], said: bytes) -> bytes | None:
    """Let a conversation hear `said`; None when it would wait for more."""
    wish = next(steps)
    try:
        while True:
            if isinstance(wish, bytes):
                wish = next(steps)
            elif len(said) >= wish:
                heard, said = said[:wish], said[wish:]
                wish = steps.send(heard)
            else:
                return None
    except StopIteration as done:
        result: bytes = done.value
        return result


@pytest.mark.parametrize("accept", [True, False], ids=["accepting", "connecting"])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_bytes_are_believed(seed: int, accept: bool) -> None:
    dice = random.Random(seed)
    for _ in range(20 * ROUNDS):
        steps = handshake_steps(SECRET, me=b"rank 0", accept=accept, where="a stranger")
        try:
            assert feed(steps, dice.choice(RECIPES)(dice)) is None
        except AuthenticationError as error:
            assert error.where == "a stranger"
            assert SECRET.hex() not in str(error)


@pytest.mark.parametrize("accept", [True, False], ids=["accepting", "connecting"])
def test_a_socket_full_of_noise_is_refused(accept: bool) -> None:
    dice = random.Random(1)
    for _ in range(ROUNDS):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(dice.choice(RECIPES)(dice))
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(AuthenticationError):
                authenticate(ours, SECRET, me=b"", accept=accept, timeout=LATER)


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    with RendezvousServer(2, SECRET) as server:
        yield server
        # It has refused everybody, and still does its work.
        assert meet(server) == [b"rank 0", b"rank 1"]


def meet(server: RendezvousServer) -> list[bytes]:
    """Both members come; what they all get."""
    with ThreadPoolExecutor(2) as pool:
        coming = [
            pool.submit(
                TcpRendezvous(server.address, rank, 2, SECRET, generation=1).allgather, b"rank %d" % rank, timeout=LATER
            )
            for rank in range(2)
        ]
        first, second = (each.result(90) for each in coming)
        assert first == second
        return first


def heard_after(sock: socket.socket, said: bytes, *, hang_up: bool) -> bytes:
    """All that the server says to `said`; fails when it does not end the connection."""
    sock.settimeout(60)
    with contextlib.suppress(OSError):  # it may have ended the connection before it was told all
        sock.sendall(said)
        if hang_up:
            sock.shutdown(socket.SHUT_WR)
    heard = b""
    try:
        while more := sock.recv(65536):
            heard += more
    except ConnectionResetError:
        pass  # the server had not read all that was sent
    return heard


@pytest.mark.parametrize("seed", SEEDS)
def test_strangers_learn_nothing_and_the_server_goes_on(
    server: RendezvousServer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:  # not for the members, who come in the end and may be slow
        patch.setattr(acceptor, "HANDSHAKE_TIMEOUT", timedelta(seconds=PATIENCE))
        strangers_come(server, random.Random(seed))


def strangers_come(server: RendezvousServer, dice: random.Random) -> None:
    for recipe in [*RECIPES, *dice.choices(RECIPES, k=ROUNDS // 10)]:
        with socket.create_connection(split_address(server.address), 60) as sock:
            # Who does not hang up waits until the server loses patience.
            heard = heard_after(sock, recipe(dice), hang_up=dice.random() < 0.9)
            # Its side of the handshake at most, never an answer.
            assert len(heard) <= HEAD_BYTES + len(b"rendezvous") + PROOF_BYTES


def test_a_crowd_that_hangs_up_at_once(server: RendezvousServer) -> None:
    dice = random.Random(0)
    for _ in range(ROUNDS):
        with socket.create_connection(split_address(server.address), 60) as sock:
            sock.sendall(dice.choice(RECIPES)(dice))


@pytest.mark.parametrize("seed", SEEDS)
def test_members_that_talk_nonsense_are_refused(server: RendezvousServer, seed: int) -> None:
    """They know the secret, but their identity, their request or their payload is wrong."""
    dice = random.Random(seed)
    for _ in range(ROUNDS // 10):
        who = dice.choice([b"", dice.randbytes(23), dice.randbytes(255), encode(caller(dice))])
        with socket.create_connection(split_address(server.address), 60) as sock:
            authenticate(sock, SECRET, me=who, accept=False, timeout=LATER)
            asked = dice.choice([dice.randbytes(40), request(dice), noise(dice)])
            answer = heard_after(sock, asked, hang_up=True)
        if answer:
            assert isinstance(decode_result(answer[8:], "here", 1 << 20), RendezvousError)


def caller(dice: random.Random) -> Caller:
    """A rank that cannot be, of the generation before the one that will meet."""
    return Caller(rank=dice.choice([2, 1 << 31]), size=dice.choice([2, 3]), generation=0, round=dice.randrange(3))


def request(dice: random.Random) -> bytes:
    seconds = dice.choice([0.0, -1.0, float("nan"), float("inf"), 1e300, 5.0])
    asked = encode(Request(seconds, dice.random() < 0.5, dice.randbytes(5)))
    return LENGTH.pack(dice.choice([0, 1, len(asked), 1 << 20, (1 << 63) - 1])) + asked


@pytest.mark.parametrize("seed", SEEDS)
def test_a_false_server_is_refused(seed: int) -> None:
    dice = random.Random(seed)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        rank = TcpRendezvous(join_address(*listener.getsockname()), 0, 2, SECRET)
        asking = pool.submit(rank.allgather, b"", timeout=timedelta(seconds=5))
        listener.settimeout(1)
        while not asking.done():
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                continue
            with sock, contextlib.suppress(OSError):  # it may not wait to be told all
                sock.sendall(dice.choice(RECIPES)(dice))
        with pytest.raises(RendezvousError):
            asking.result(60)
