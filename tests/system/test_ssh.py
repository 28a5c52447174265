"""Ranks on two hosts that a real sshd serves: started, followed, ended, and every unusable host named."""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from namespaces import bridge, inside, namespaces, problem

import farandole
from farandole.errors import RankFailed
from helpers.marked import wait_until_gone

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")

pytestmark = [
    pytest.mark.native,
    pytest.mark.slow,
    pytest.mark.skipif(bool(problem()), reason=problem() or "namespaces"),
    pytest.mark.skipif(SSHD is None or shutil.which("ssh") is None, reason="no sshd (package openssh-server)"),
]

PORT = 2222
REDUCE = """
import numpy, sys, farandole.numpy as hvd
hvd.init()
total = hvd.allreduce(numpy.arange(3.0) + hvd.rank(), op=hvd.Sum)
print("sum", total.tolist(), "place", hvd.rank(), hvd.local_rank(), hvd.cross_rank(), hvd.cross_size(), flush=True)
"""
WAIT = "import time, farandole.numpy as hvd; hvd.init(); print('up', flush=True); time.sleep(100)"


@dataclass(frozen=True)
class Hosts:
    """Two hosts, and the words with which this machine reaches them."""

    names: tuple[str, str]
    config: Path

    @property
    def options(self) -> list[str]:
        return ["-p", str(PORT), "--ssh-command", f"ssh -F {self.config}"]

    def slots(self, count: int) -> str:
        return ",".join(f"{name}:{count}" for name in self.names)


def key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True, timeout=30)
    return path


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("ssh")
    Path("/run/sshd").mkdir(exist_ok=True)
    mine, stranger, server = key(folder / "mine"), key(folder / "stranger"), key(folder / "server")
    public = server.with_suffix(".pub").read_text()
    servers = []
    with namespaces(2) as names, bridge(names) as address:
        addresses = [f"{address.rpartition('.')[0]}.{place + 1}" for place in range(2)]
        sshd_config = folder / "sshd_config"
        sshd_config.write_text(
            f"Port {PORT}\nHostKey {server}\nAuthorizedKeysFile {mine}.pub\nPidFile none\nStrictModes no\nUsePAM no\n"
        )
        known = folder / "known_hosts"
        known.write_text("".join(f"[{each}]:{PORT} {public}" for each in addresses))
        config = folder / "config"
        config.write_text(
            f"Host wrong-key\n  HostName {addresses[0]}\n  HostKeyAlias [{addresses[0]}]:{PORT}\n"
            f"  IdentityFile {stranger}\n  IdentitiesOnly yes\n"
            f"Host * !wrong-key\n  IdentityFile {mine}\n  IdentitiesOnly yes\n"
            f"Host *\n  User root\n  UserKnownHostsFile {known}\n  StrictHostKeyChecking yes\n"
        )
        assert SSHD is not None
        try:
            for name in names:
                command = [*inside(name), SSHD, "-D", "-e", "-f", str(sshd_config)]
                servers.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            for each in addresses:
                wait_for_server(config, each)
            yield Hosts((addresses[0], addresses[1]), config)
        finally:
            for each in servers:
                each.kill()
                each.wait()


def wait_for_server(config: Path, address: str) -> None:
    for _ in range(100):
        words = ["ssh", "-F", str(config), "-p", str(PORT), address, "true"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 0:
            return
        time.sleep(0.1)
    raise AssertionError(done.stderr)


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
    slots = f"{hosts.names[0]}:1,wrong-key:1,there.invalid:1,stranger@{hosts.names[1]}:1"
    done = subprocess.run(
        command(hosts, slots, "true"), cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2
    assert f"\n  {hosts.names[0]}:" not in done.stderr
    for host, reason in (("wrong-key", "Permission denied"), ("there.invalid", "Could not resolve hostname")):
        assert any(line.startswith(f"  {host}: ") and reason in line for line in done.stderr.splitlines()), done.stderr
    assert f"  stranger@{hosts.names[1]}: " in done.stderr


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


def command_lines() -> Iterator[bytes]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            yield (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it has just ended


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
