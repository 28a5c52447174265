"""Ranks on hosts that a real sshd serves: started, followed, ended, and every unusable host named."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import DEVICE, inside, ip

import farandole
from farandole.errors import RankFailed
from helpers.hosts import SECOND_DEVICE
from helpers.marked import wait_until_gone
from helpers.ssh_hosts import PORT, Hosts, command_lines, net_of, problem, serving_hosts

pytestmark = [
    pytest.mark.native,
    pytest.mark.slow,
    pytest.mark.skipif(bool(problem()), reason=problem() or "hosts"),
]

REDUCE = """
import numpy, sys, farandole.numpy as hvd
hvd.init()
total = hvd.allreduce(numpy.arange(3.0) + hvd.rank(), op=hvd.Sum)
print("sum", total.tolist(), "place", hvd.rank(), hvd.local_rank(), hvd.cross_rank(), hvd.cross_size(), flush=True)
"""
WHERE = "import os; print('at', os.environ['FARANDOLE_RENDEZVOUS'], flush=True)\n"
WAIT = "import time, farandole.numpy as hvd; hvd.init(); print('up', flush=True); time.sleep(100)"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with serving_hosts(tmp_path_factory.mktemp("ssh")) as hosts:
        yield hosts


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


def command(hosts: Hosts, slots: str, *words: str, count: int = 4) -> list[str]:
    run = [sys.executable, "-m", "farandole.launch.cli", "run", "-np", str(count), "-H", slots]
    return [*run, *hosts.options, *words]


def test_ranks_of_two_hosts_train_together(hosts: Hosts, mark: str, tmp_path: Path) -> None:
    done = subprocess.run(
        command(hosts, hosts.slots(2), sys.executable, "-c", REDUCE),
        cwd=tmp_path,
        env={**os.environ, "MARK": mark},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line.partition("sum ")[2] for line in done.stdout.splitlines())
    places = ["0 0 0 2", "1 1 0 2", "2 0 1 2", "3 1 1 2"]
    assert lines == [f"[6.0, 10.0, 14.0] place {place}" for place in places]
    assert wait_until_gone(mark, 10.0) == []


def test_values_and_exceptions_come_back(hosts: Hosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {hosts.config} "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logging.py").write_text("raise RuntimeError('a file of the user is not Python's module')")

    def where(fails: bool) -> tuple[int, bytes]:
        import farandole.numpy as hvd

        hvd.init()
        if fails and hvd.rank() == 1:
            raise LookupError("no such thing")
        hvd.barrier()
        return hvd.rank(), b"x" * 300_000

    large = b"x" * 300_000
    assert farandole.run(where, (False,), num_proc=2, hosts=hosts.slots(1), ssh_port=PORT) == [(0, large), (1, large)]
    with pytest.raises(RankFailed, match="rank 1 failed: LookupError") as failed:
        farandole.run(where, (True,), num_proc=2, hosts=hosts.slots(1), ssh_port=PORT)
    assert isinstance(failed.value.__cause__, LookupError)


def test_every_unusable_host_is_named_with_its_reason(hosts: Hosts, tmp_path: Path) -> None:
    reasons = {
        "wrong-key": "Permission denied",
        f"stranger@{hosts.names[1]}": "",
        "there.invalid": "Could not resolve hostname",
        "no-python": f"{sys.executable}",
        "no-farandole": "farandole",
        "other-version": f"it has farandole 0.0.9 in {sys.executable}, this machine {farandole.__version__}",
    }
    slots = f"{hosts.names[0]}:1,{':1,'.join(reasons)}:1"
    done = subprocess.run(
        command(hosts, slots, "true", count=7), cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2
    assert f"\n  {hosts.names[0]}:" not in done.stderr
    for host, reason in reasons.items():
        assert any(line.startswith(f"  {host}: ") and reason in line for line in done.stderr.splitlines()), done.stderr


def test_a_host_without_the_directory_is_named(hosts: Hosts, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os, sys; os.rmdir({str(gone)!r}); sys.argv[0] = 'x'; from farandole.launch.cli import main; main()"
    words = command(hosts, hosts.slots(1), "true", count=2)[3:]
    program = f"import os; os.getcwd = lambda: {str(gone)!r}\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stderr.count("No such file or directory") == 2, done.stderr


@pytest.mark.parametrize("victim", ["agent", "launcher", "connection"])
def test_a_death_leaves_nothing_behind(hosts: Hosts, mark: str, tmp_path: Path, victim: str) -> None:
    words = command(hosts, hosts.slots(1), sys.executable, "-c", WAIT, count=2)
    process = subprocess.Popen(
        words, cwd=tmp_path, env={**os.environ, "MARK": mark}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert {process.stdout.readline() for _ in range(2)} == {"[0] up\n", "[1] up\n"}
            secret = environment_of(mark)["FARANDOLE_SECRET"].encode()
            assert not any(secret in line for line in command_lines())
            if victim == "launcher":
                process.kill()
            else:
                wanted = "farandole.launch.agent" if victim == "agent" else f"ssh -F {hosts.config}"
                os.kill(pid_of(wanted, hosts.names[1]), signal.SIGKILL)
                process.wait(40)
                said = process.stderr.read()
                assert process.returncode == 255, said
                assert f"rank 1 failed: its host {hosts.names[1]} was lost" in said
        finally:
            process.kill()
    assert wait_until_gone(mark, 20.0) == []


def test_a_pulled_cable_ends_both_sides(hosts: Hosts, mark: str, tmp_path: Path) -> None:
    """Ssh and its server notice within three seconds here, by what the user and the administrator have set."""
    words = command(hosts, hosts.slots(1), sys.executable, "-c", WAIT, count=2)
    words[words.index("--ssh-command") + 1] += " -o ServerAliveInterval=1"
    process = subprocess.Popen(
        words, cwd=tmp_path, env={**os.environ, "MARK": mark}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert {process.stdout.readline() for _ in range(2)} == {"[0] up\n", "[1] up\n"}
            ip("-n", hosts.spaces[1], "link", "set", DEVICE, "down")
            process.wait(40)
            said = process.stderr.read()
            assert process.returncode == 255, said
            assert f"rank 1 failed: its host {hosts.names[1]} was lost" in said
            assert f"{hosts.names[1]} was lost: its ranks (1) cannot be seen to end" in said
            assert wait_until_gone(mark, 30.0) == []
        finally:
            process.kill()
            ip("-n", hosts.spaces[1], "link", "set", DEVICE, "up")
            ip("-n", hosts.spaces[1], "address", "replace", "fd77::2/64", "dev", DEVICE, "nodad")


@pytest.mark.parametrize("way", ["IPv6", "interface", "interfaces", "alias"])
def test_ways_to_name_hosts_and_networks(hosts: Hosts, tmp_path: Path, way: str) -> None:
    """The launcher is on a host that has the interface, too: a program of the third namespace."""
    places = ["0 0 0 2", "1 0 1 2"]
    if way == "IPv6":
        ip("-n", hosts.spaces[2], "address", "replace", "fd77::3/64", "dev", DEVICE, "nodad")
        slots, options, net = "[fd77::1]:1,[fd77::2]:1", [], "[fd77::"
    elif way == "interface":
        slots, options, net = hosts.slots(1), ["--network-interface", SECOND_DEVICE], hosts.second
    elif way == "interfaces":  # one that no host has, one that leads nowhere, one that connects
        for place, space in enumerate(hosts.spaces):
            ip("-n", space, "link", "add", "nowhere", "type", "veth", "peer", "name", "nowhere-end")
            ip("-n", space, "address", "add", f"192.0.2.{place + 1}/32", "dev", "nowhere")
            ip("-n", space, "link", "set", "nowhere", "up")
        listed = f"ib7,nowhere,{SECOND_DEVICE}"
        slots, options, net = hosts.slots(1), ["--network-interfaces", listed], hosts.second
    else:  # two names of one host
        slots, options, net = f"alias:1,{hosts.names[0]}:1", [], net_of(hosts.names[0])
        places = ["0 0 0 1", "1 1 0 1"]
    words = command(hosts, slots, *options, sys.executable, "-c", REDUCE + WHERE, count=2)
    done = subprocess.run(
        [*inside(hosts.spaces[2]), *words], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line.partition("sum ")[2] for line in done.stdout.splitlines() if "sum" in line)
    assert lines == [f"[1.0, 3.0, 5.0] place {place}" for place in places]
    assert done.stdout.count(f"at {net}") == 2, done.stdout


@pytest.mark.skipif("FARANDOLE_TEST_STARTS" not in os.environ, reason="long: FARANDOLE_TEST_STARTS=20 asks for it")
def test_many_starts_leave_nothing(hosts: Hosts, mark: str, tmp_path: Path) -> None:
    """Every other start fails at once."""
    for number in range(int(os.environ["FARANDOLE_TEST_STARTS"])):
        fails = "; raise SystemExit(3)" if number % 2 else ""
        done = subprocess.run(
            command(hosts, hosts.slots(2), sys.executable, "-c", f"import farandole.numpy as hvd; hvd.init(){fails}"),
            cwd=tmp_path,
            env={**os.environ, "MARK": mark},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == (3 if number % 2 else 0), done.stderr
        assert wait_until_gone(mark, 10.0) == []
        assert [line for line in command_lines() if b"farandole.launch.agent" in line] == []


def test_the_doctor_examines_hosts_and_their_network(hosts: Hosts, tmp_path: Path) -> None:
    names = [*hosts.names, "alias", "wrong-key"]
    words = ["doctor", "--fast", "--json", "-H", ",".join(names), *hosts.options]
    done = subprocess.run(
        [sys.executable, "-m", "farandole.launch.cli", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert list(found["hosts"]) == names[:3]
    assert list(found["unusable"]) == ["wrong-key"] and "Permission denied" in found["unusable"]["wrong-key"]
    assert [(link["there"], link["here"]) for link in found["links"]] == [
        (names[0], names[1]),
        (names[0], "alias"),
        (names[1], "alias"),
    ]
    for link in found["links"]:
        assert link["problem"] == ""
        assert 0 < link["latency"] < 1 and abs(link["clock"]) < 0.5  # one machine has one clock
        assert link["out"] > 1e6 and link["back"] > 1e6
    assert len(found["problems"]) == 1


def environment_of(mark: str) -> dict[str, str]:
    """Return the environment of a rank of this test."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has just ended
        if f"MARK={mark}" in words and any(word.startswith("FARANDOLE_SECRET=") for word in words):
            return dict(word.split("=", 1) for word in words if "=" in word)
    raise AssertionError("no rank runs")


def pid_of(words: str, host: str) -> int:
    """Find the process with `words` in its command line that belongs to `host`."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environ = (entry / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        at_host = line.startswith("ssh ") and host in line if words.startswith("ssh ") else f" {host} " in environ
        if words in line and at_host:
            return int(entry.name)
    raise AssertionError(f"no process {words!r} of {host}")
