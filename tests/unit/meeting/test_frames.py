"""Frames have limits and deadlines; a message arrives as it was sent, or is refused."""

import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.errors import RendezvousError
from farandole.meeting.frames import (
    HEAD,
    LENGTH,
    Deadline,
    Kinds,
    decode,
    encode,
    frame,
    recv_frame,
    send,
    send_frame,
    split_frames,
)

SOON = timedelta(seconds=0.3)
LATER = timedelta(seconds=60)


@contextmanager
def socket_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, two = socket.socketpair()
    with one, two:
        yield one, two


def _sent(pool: ThreadPoolExecutor, sock: socket.socket, payload: bytes) -> "Future[None]":
    return pool.submit(send_frame, sock, payload, deadline=Deadline(LATER))


@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
def test_a_frame_arrives_whole(size: int) -> None:
    payload = bytes(i % 251 for i in range(size))
    with socket_pair() as (one, two), ThreadPoolExecutor(1) as pool:
        sent = _sent(pool, one, payload)
        assert recv_frame(two, size, deadline=Deadline(LATER)) == payload
        sent.result(5)


@pytest.mark.parametrize("length", [11, 1 << 40, (1 << 64) - 1])
def test_a_frame_over_the_limit_is_refused_before_it_is_read(length: int) -> None:
    with socket_pair() as (one, two):
        one.sendall(LENGTH.pack(length))
        with pytest.raises(RendezvousError, match=f"a frame of {length} bytes is over the limit of 10"):
            recv_frame(two, 10, deadline=Deadline(LATER))


@given(st.integers(0, 17))
def test_a_frame_that_is_cut_short(sent: int) -> None:
    with socket_pair() as (one, two):
        one.sendall((LENGTH.pack(10) + b"0123456789")[:sent])
        one.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError, match=r"the connection ended after \d+ of"):
            recv_frame(two, 10, deadline=Deadline(LATER))


def test_a_frame_that_does_not_come() -> None:
    with socket_pair() as (one, two):
        one.sendall(LENGTH.pack(10) + b"01234")
        with pytest.raises(TimeoutError):
            recv_frame(two, 10, deadline=Deadline(SOON))


def test_a_deadline_that_is_over() -> None:
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        Deadline(timedelta(0)).remaining()


@dataclass(frozen=True)
class Inner:
    name: str
    ratio: float


@dataclass(frozen=True)
class Message:
    number: int
    flag: bool
    inner: Inner
    missing: int | None
    names: list[str]
    env: Mapping[str, object]
    payload: bytes
    parts: list[bytes]


@dataclass(frozen=True)
class Other:
    number: int


MESSAGES = st.builds(
    Message,
    st.integers(),
    st.booleans(),
    st.builds(Inner, st.text(), st.floats(allow_nan=False)),
    st.none() | st.integers(),
    st.lists(st.text()),
    st.dictionaries(st.text(), st.none() | st.text() | st.integers()),
    st.binary(),
    st.lists(st.binary()),
)
BOTH = Kinds[Message | Other](Message, Other)


@given(MESSAGES | st.builds(Other, st.integers()))
def test_a_message_arrives_as_it_was_sent(message: Message | Other) -> None:
    assert BOTH.decode(encode(message)) == message


@given(st.binary() | MESSAGES.map(encode), st.data())
def test_any_bytes_are_a_message_or_refused(payload: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(payload)))
    damaged = payload[:at] + data.draw(st.binary(max_size=3)) + payload[at + data.draw(st.integers(0, 3)) :]
    try:
        assert isinstance(BOTH.decode(damaged), Message | Other)
    except ValueError as error:
        assert "it is no message Message or Other" in str(error)


@pytest.mark.parametrize(
    "head",
    [
        '["Inner", {"name": "a", "ratio": 1.0}, {}]',  # of another class
        '["Other", {"number": "1"}, {}]',
        '["Other", {"number": true}, {}]',
        '["Other", {"number": null}, {}]',
        '["Other", {"number": 1.5}, {}]',
        '["Other", {"number": 1, "more": 2}, {}]',
        '["Other", {}, {}]',
        '["Other", {}, {"number": 1}]',  # bytes for a number
        '["Other", {"number": 1}, {"number": -1}]',
        '["Other", {"number": 1}, {"number": [1, 2]}]',
        '["Other", [], {}]',
        "[[], {}, {}]",
        "[" * 100_000,
        "1" * 10_000,
        "",
    ],
)
def test_what_is_no_message(head: str) -> None:
    with pytest.raises(ValueError, match="it is no message Other"):
        decode(frame(head.encode()) + b"x", Other)


def test_messages_over_a_connection() -> None:
    with socket_pair() as (one, two):
        send(one, Other(1), deadline=Deadline(LATER))
        send(one, Inner("a", 0.5), deadline=Deadline(LATER))
        send_frame(one, bytes(HEAD + 1))
        assert BOTH.receive(two, deadline=Deadline(LATER)) == Other(1)
        with pytest.raises(ValueError, match="no message Message or Other"):
            BOTH.receive(two, deadline=Deadline(LATER))
        with pytest.raises(RendezvousError, match=f"a frame of {HEAD + 1} bytes is over the limit of {HEAD}"):
            BOTH.receive(two, deadline=Deadline(LATER))


def test_what_json_does_not_know_is_refused_when_it_is_sent() -> None:
    with pytest.raises(TypeError, match="a message cannot have a set"):
        encode(Other({1}))  # type: ignore[arg-type]


@given(st.lists(st.binary()))
def test_frames_are_joined_and_split(parts: list[bytes]) -> None:
    assert list(map(bytes, split_frames(memoryview(b"".join(map(frame, parts)))))) == parts
