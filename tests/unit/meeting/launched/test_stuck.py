"""Members of an elastic job that answer no call, without a launcher."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from farandole.meeting.addresses import join_address
from farandole.meeting.handshake import new_secret
from farandole.meeting.launched.elastic import MemberEnvironment
from farandole.meeting.launched.election import Election
from farandole.meeting.launched.stuck import StuckMembers


@pytest.fixture
def secret() -> bytes:
    return new_secret()


@pytest.fixture
def process(secret: bytes) -> Iterator["subprocess.Popen[bytes]"]:
    """The process of member 7."""
    env = MemberEnvironment(number=7, launcher="", secret=secret).write()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=env) as process:
        yield process
        process.kill()


def test_a_member_that_does_not_answer_is_ended_by_one_that_waits(
    secret: bytes, process: "subprocess.Popen[bytes]"
) -> None:
    stuck = StuckMembers(1, secret)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts for it
        others = {7: join_address(*silent.getsockname()[:2])}
        process.send_signal(signal.SIGSTOP)
        stuck.end(others, operations=5)
        stuck.end(others, operations=6)
        assert process.poll() is None, "this member has finished an operation meanwhile"
        stuck.end(others, operations=6)
        assert process.wait(30) == -9


def test_a_silent_member_that_is_not_stopped_has_more_time(
    secret: bytes, process: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may pickle a checkpoint, which holds Python's lock."""
    stuck = StuckMembers(1, secret)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        others = {7: join_address(*silent.getsockname()[:2])}
        for _ in range(3):
            stuck.end(others, operations=5)
        assert process.poll() is None
        monkeypatch.setattr("farandole.meeting.launched.stuck.BUSY", 3.0)
        stuck.end(others, operations=5)
        assert process.wait(30) == -9


def test_a_member_that_answers_or_has_ended_is_left_alone(secret: bytes, process: "subprocess.Popen[bytes]") -> None:
    stuck, other = StuckMembers(1, secret), Election(7, secret)
    try:
        other.answer()
        for _ in range(2):
            stuck.end({7: other.addresses[0]}, operations=5)
    finally:
        other.close()
    stuck.end({7: other.addresses[0]}, operations=5)
    assert process.poll() is None
