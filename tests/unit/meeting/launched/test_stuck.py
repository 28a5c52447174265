"""Members of an elastic job that answer no call, without a launcher."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.meeting.addresses import join_address
from farandole.meeting.handshake import new_secret
from farandole.meeting.launched.elastic import MemberEnvironment
from farandole.meeting.launched.election import Election
from farandole.meeting.launched.stuck import CGROUPS, StuckMembers, is_stopped_here


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


def test_a_member_of_a_frozen_group_is_stopped(secret: bytes, process: "subprocess.Popen[bytes]") -> None:
    """As by `systemctl freeze`, or by the pause of a container: the kernel shows it as one that sleeps."""
    roots = [Path(each) for each in CGROUPS if os.access(f"{each}/cgroup.procs", os.W_OK)]
    if not roots:
        pytest.skip("no control groups of the second version that this user may change")
    group = Path(tempfile.mkdtemp(dir=roots[0]))
    try:
        (group / "cgroup.procs").write_text(str(process.pid))
        assert not is_stopped_here(7, secret)
        (group / "cgroup.freeze").write_text("1")
        deadline = time.monotonic() + 30
        while not is_stopped_here(7, secret):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
        group.rmdir()


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
