"""The ssh backend, with a stand-in for ssh that runs the agent on this machine: what can go wrong on either side."""

import json
import logging
import os
import platform
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import pytest

from farandole.errors import ConfigError, HostsError
from farandole.launch.backend import Agent, Assignment, Call, Command, Host
from farandole.launch.backends.ssh import Ssh, SshBackend
from farandole.launch.failures import Failure
from farandole.launch.messages import FROM_AGENT, MARKER, SILENCE, Answer, FromAgent, Messages
from farandole.launch.survivors import note_end
from farandole.meeting.acceptor import BACKLOG
from farandole.meeting.frames import LENGTH, frame
from farandole.meeting.launched.elastic import MemberEnvironment
from farandole.topology import loopback_address

WAIT = timedelta(seconds=60)
HOST = Host("there.invalid", 2)  # nobody's (RFC 6761), so no test takes it for this machine
PRINT = [sys.executable, "-c", "import time; print('line', flush=True); time.sleep(100)"]
# Its last argument is the remote command. ssh exports both ends of its connection there.
SSH = '#!/bin/sh\n{before}for last; do :; done\nSSH_CONNECTION="127.0.0.1 1 127.0.0.1 22" exec sh -c "$last"\n'


# Refuses when as many are running as there are hosts, else waits.
ALL_AT_ONCE = """#!/bin/sh
: > {folder}/$$.up
until [ $(ls {folder} | grep -c up) = {count} ]; do sleep 0.05; done
echo no entry for you >&2
exit 255
"""


class Ends:
    """The lines and the end of one rank."""

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.ended = threading.Event()

    def end(self, rank: int, failure: Failure | None) -> None:
        self.failure = failure
        self.ended.set()


@pytest.fixture
def ssh(tmp_path: Path) -> Ssh:
    return stand_in(tmp_path)


def stand_in(folder: Path, before: str = "") -> Ssh:
    script = folder / "ssh"
    script.write_text(SSH.replace("{before}", before))
    script.chmod(0o755)
    return Ssh(command=str(script))


@pytest.fixture
def agent(ssh: Ssh) -> Iterator[Agent]:
    with SshBackend([HOST], ssh).open_agents([HOST]) as agents:
        yield agents[HOST]


def assigned(rank: int = 0) -> Assignment:
    return Assignment(rank=rank, host=HOST, env=dict(os.environ))


def no_line(rank: int, stream: str, line: str) -> None:
    return None


def agent_process() -> int:
    """Return the process of this test's agent."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"farandole.launch.agent" in (entry / "cmdline").read_bytes():
                return int(entry.name)
        except OSError:
            continue  # it has just ended
    raise AssertionError("no agent runs")


@pytest.mark.parametrize("error", [ValueError("no such encoding"), BrokenPipeError("closed")])
def test_output_that_nobody_takes_ends_the_rank(agent: Agent, error: Exception) -> None:
    def refuse(rank: int, stream: str, line: str) -> None:
        raise error

    ends = Ends()
    rank = agent.start(assigned(), Command(PRINT), refuse, ends.end)
    assert ends.ended.wait(30), "the rank runs on, and nobody hears of it"
    assert ends.failure is not None
    assert ends.failure.reason == f"was ended because its output could not be written: {error}"
    assert rank.wait_gone(WAIT)
    assert agent.reserve_port() > 0


def test_a_host_tells_how_a_rank_has_ended_that_outlived_its_launcher(agent: Agent, tmp_path: Path) -> None:
    log = str(tmp_path / "7")
    assert agent.noted_end(log) is None
    note_end(log, 3)
    deadline = time.monotonic() + 30
    while agent.noted_end(log) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert agent.noted_end(log) == 3


def test_a_host_tells_that_a_member_is_stopped_and_ends_it(agent: Agent) -> None:
    secret, ends, found = bytes(16), Ends(), threading.Event()
    member = MemberEnvironment(number=3, launcher="", secret=secret).write()
    words = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(100)"]
    lines: list[str] = []

    def note(rank: int, stream: str, line: str) -> None:
        lines.append(line)
        found.set()

    def wait_until(stopped: bool) -> None:
        deadline = time.monotonic() + 30
        while agent.is_stopped(3, secret) != stopped:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    rank = agent.start(replace(assigned(), env={**os.environ, **member}), Command(words), note, ends.end)
    assert found.wait(30)
    assert not agent.is_stopped(3, secret)
    os.kill(int(lines[0]), signal.SIGSTOP)
    wait_until(True)
    assert not agent.is_stopped(4, secret)
    os.kill(int(lines[0]), signal.SIGCONT)
    wait_until(False)
    deadline = time.monotonic() + 30
    while agent.silence > 0:  # it owes the last answer
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(int(lines[0]), signal.SIGSTOP)
    agent.end_member(4, secret)
    agent.end_member(3, bytes(15))
    assert not rank.wait_gone(timedelta(seconds=1))
    agent.end_member(3, secret)
    assert rank.wait_gone(WAIT)


def test_a_lost_host_is_warned_of_once(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    all_ends = [Ends(), Ends()]
    ranks = [agent.start(assigned(rank), Command(PRINT), no_line, ends.end) for rank, ends in enumerate(all_ends)]
    os.kill(agent_process(), signal.SIGKILL)
    for ends in all_ends:
        assert ends.ended.wait(30)
        assert ends.failure is not None and "was lost" in ends.failure.reason
    assert all(rank.wait_gone(WAIT) for rank in ranks)
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert warnings == [
        f"{HOST.name} was lost: its ranks (0, 1) cannot be seen to end; they end by themselves within {SILENCE:.0f} s"
    ]
    with pytest.raises(HostsError, match=f"{HOST.name}: ") as refused:
        agent.reserve_port()
    assert list(refused.value.reasons) == [HOST.name]


def test_a_silent_host_is_lost_while_a_call_is_sent_to_it(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe is full, because nobody reads it, and the launcher blocks in its write."""
    monkeypatch.setattr("farandole.launch.messages.SILENCE", 0.5)
    agent.reserve_port()  # its answer lets the listener begin a wait of that time
    os.kill(agent_process(), signal.SIGSTOP)
    ends = Ends()
    call = Call(bytes(1 << 22), sys.executable, WAIT)
    starter = threading.Thread(target=agent.start, args=(assigned(), call, no_line, ends.end), daemon=True)
    starter.start()
    starter.join(30)
    assert not starter.is_alive(), "the launcher waits for a host that it knows to be lost"
    assert ends.ended.wait(30) and ends.failure is not None
    assert ends.failure.reason == f"its host {HOST.name} was lost: nothing came for 0.5 s"


def test_the_guards_of_a_stopped_agent_end_its_ranks(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody else can: the agent reads nothing, and its ranks see nothing of it."""
    words = ["sh", "-c", f"echo $$ > {tmp_path}/rank; exec sleep 100"]
    with monkeypatch.context() as patch:  # for the guard alone: the launcher keeps the connection
        patch.setattr("farandole.launch.messages.SILENCE", 0.2)
        rank = agent.start(assigned(), Command(words), no_line, (ends := Ends()).end)
    pid = tmp_path / "rank"
    deadline = time.monotonic() + 30
    while not pid.exists() or not pid.read_text().endswith("\n"):
        assert time.monotonic() < deadline, "the rank has not started"
        time.sleep(0.01)
    stopped, process = agent_process(), os.pidfd_open(int(pid.read_text()))
    os.kill(stopped, signal.SIGSTOP)
    try:
        assert select.select([process], [], [], 15)[0], "the rank lives on"
    finally:
        os.close(process)
        os.kill(stopped, signal.SIGCONT)
    assert ends.ended.wait(30) and rank.wait_gone(WAIT)
    assert ends.failure is not None and ends.failure.reason.startswith("was killed by SIGKILL")


def test_a_host_whose_ranks_have_ended_is_lost_silently(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    ends = Ends()
    rank = agent.start(assigned(), Command([sys.executable, "-c", ""]), no_line, ends.end)
    assert ends.ended.wait(30) and ends.failure is None
    assert rank.wait_gone(WAIT)
    os.kill(agent_process(), signal.SIGKILL)
    with pytest.raises(HostsError):
        agent.reserve_port()
    assert [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING] == []


def test_a_rank_that_its_host_cannot_start_has_failed(tmp_path: Path) -> None:
    """The limit on open files stands for the one on processes, which root does not have."""
    ssh = stand_in(tmp_path, "ulimit -n 40; ")
    with SshBackend([HOST], ssh).open_agents([HOST]) as agents, ExitStack() as stack:
        started = []
        for rank in range(12):
            ends = Ends()
            started.append((agents[HOST].start(assigned(rank), Command(PRINT), no_line, ends.end), ends))
            stack.callback(started[-1][0].terminate, timedelta(0))
        assert started[-1][1].ended.wait(30), "the rank is taken for running"
        failure = started[-1][1].failure
        assert failure is not None
        assert failure.reason.startswith("could not be started: ") and "Too many open files" in failure.reason
        assert failure.code == 126
        assert started[-1][0].wait_gone(WAIT)
        assert not started[0][1].ended.is_set()  # the host is not lost
        with pytest.raises(HostsError, match=rf"{HOST.name}: .*Too many open files"):
            for _ in range(40):
                agents[HOST].reserve_port()


def test_more_hosts_than_open_files_are_refused_before_any_is_reached(
    ssh: Ssh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    hosts = [Host(f"host{number}.invalid", 1) for number in range(250)]
    monkeypatch.setattr("farandole.launch.backends.ssh.is_local", lambda name: False)
    monkeypatch.setattr("farandole.launch.backends.ssh.RemoteAgent", None)
    told = r"hosts: 250 hosts need 1[0-9]+ open files in this process, which may have 1024; raise ulimit -n"
    with pytest.raises(ConfigError, match=told), SshBackend(hosts, ssh).open_agents(hosts):
        raise AssertionError


def test_hosts_that_are_all_this_machine_need_no_ssh() -> None:
    """The nodes of an allocation of which the ranks fill only this one, or the hosts of `farandole doctor`."""
    hosts = [Host("localhost", 1), Host("127.0.0.1", 1)]
    backend = SshBackend([*hosts, HOST], Ssh(command="false"))
    with backend.open_agents(hosts) as agents:
        assert backend.address == loopback_address()
        assert [agents[host].address for host in hosts] == [loopback_address()] * 2


def test_all_hosts_may_connect_at_once(ssh: Ssh, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    create = socket.create_server

    def record(*args: object, **options: object) -> socket.socket:
        asked.append(options.get("backlog"))
        return create(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "create_server", record)
    with SshBackend([HOST], ssh).open_agents([HOST]):
        assert asked == [BACKLOG]


def test_an_agent_that_does_not_answer_is_ended_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.launch.backends.remote.ANSWER", 0.5)
    (tmp_path / "ssh").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "ssh").chmod(0o755)
    before = time.monotonic()
    with (
        pytest.raises(HostsError, match="nothing came for"),
        SshBackend([HOST], Ssh(command=str(tmp_path / "ssh"))).open_agents([HOST]),
    ):
        pass
    assert time.monotonic() - before < 10.0


def test_hosts_are_tried_at_the_same_time(tmp_path: Path) -> None:
    hosts = [Host(f"h{number}.invalid", 1) for number in range(6)]
    (tmp_path / "ssh").write_text(ALL_AT_ONCE.format(folder=tmp_path, count=len(hosts)))
    (tmp_path / "ssh").chmod(0o755)
    backend = SshBackend(hosts, Ssh(command=str(tmp_path / "ssh")))
    with pytest.raises(HostsError) as refused, backend.open_agents(hosts):
        pass
    assert refused.value.reasons == {host.name: "no entry for you" for host in hosts}


def test_ctrl_c_does_not_wait_for_hosts_that_do_not_answer(tmp_path: Path) -> None:
    hosts = [Host(f"h{number}.invalid", 1) for number in range(40)]  # more than are tried at once
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n: > {tmp_path}/$$.up\nexec sleep 1000\n")
    (tmp_path / "ssh").chmod(0o755)
    backend = SshBackend(hosts, Ssh(command=str(tmp_path / "ssh")))

    def interrupt() -> None:
        while not list(tmp_path.glob("*.up")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt), backend.open_agents(hosts):
        pass
    assert time.monotonic() - before < 30.0
    thread.join()


def test_messages_of_a_launcher_with_many_open_files() -> None:
    """select(2) fails from the 1024th descriptor on."""
    with ExitStack() as stack:
        there, outgoing = os.pipe()
        incoming = dup_from(there, 2000)
        os.close(there)
        messages = Messages[FromAgent](incoming, os.dup(outgoing), FROM_AGENT)
        stack.callback(messages.close)
        stack.callback(os.close, outgoing)
        messages.send(Answer("", "7"))
        assert messages.receive() == Answer("", "7")


def dup_from(descriptor: int, least: int) -> int:
    """Duplicate to a number of at least `least`."""
    import fcntl
    import resource

    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= least:
        pytest.skip(f"this process may not have {least} open files (ulimit -n)")
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, least)


def test_messages_of_an_end_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.launch.messages.SILENCE", 0.1)
    incoming, theirs = os.pipe()
    messages = Messages[FromAgent](incoming, os.open(os.devnull, os.O_WRONLY), FROM_AGENT)
    with pytest.raises(TimeoutError, match=r"nothing came for 0\.1 s"):
        messages.receive()
    messages.close()
    os.close(theirs)


def test_messages_that_are_stopped() -> None:
    """The reader of a pipe that somebody else holds open ends, and closes its own descriptors."""
    incoming, theirs = os.pipe()
    messages = Messages[FromAgent](incoming, os.open(os.devnull, os.O_WRONLY), FROM_AGENT)
    raised: list[BaseException] = []

    def read() -> None:
        try:
            messages.receive()
        except EOFError as error:
            raised.append(error)
        messages.close()

    reader = threading.Thread(target=read)
    reader.start()
    messages.stop()
    reader.join(30)
    os.close(theirs)
    assert not reader.is_alive() and len(raised) == 1
    messages.stop()  # closed already


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"versions": {"farandole": "9.9.9", "python": "3.20.1"}, "rooms": 3}, "it has farandole 9.9.9 in"),
        ({"release": "9.9.9"}, "it has farandole of an unknown version in"),
    ],
)
def test_a_host_whose_farandole_greets_in_another_form_is_named(
    fields: dict[str, object], told: str, tmp_path: Path
) -> None:
    head = json.dumps(["Hello", fields, {}]).encode()
    greeting = MARKER + frame(LENGTH.pack(len(head)) + head)
    (tmp_path / "greeting").write_bytes(greeting)
    (tmp_path / "ssh").write_text(f"#!/bin/sh\ncat {tmp_path}/greeting; exec sleep 1000\n")
    (tmp_path / "ssh").chmod(0o755)
    both = f"{told} .*, this machine {re.escape(version('farandole'))}; install the same version"
    shell = Ssh(command=str(tmp_path / "ssh"))
    with pytest.raises(HostsError, match=both), SshBackend([HOST], shell).open_agents([HOST]):
        raise AssertionError("it was taken")


def test_a_host_with_another_python_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path is the same, as that of the system's Python on hosts of different age."""
    monkeypatch.delenv("PYTHONPATH", raising=False)  # it would be carried over, and replace that of the host
    (tmp_path / "sitecustomize.py").write_text("import platform\nplatform.python_version = lambda: '3.9.2'\n")
    shell = stand_in(tmp_path, f"export PYTHONPATH={tmp_path}\n")
    told = f"{sys.executable} is Python 3.9.2 there, and {platform.python_version()} on"
    with pytest.raises(HostsError, match=told), SshBackend([HOST], shell).open_agents([HOST]):
        raise AssertionError("it was taken")
