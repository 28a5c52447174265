"""Elastic jobs on hosts that a real sshd serves: hosts come, go, and are cut off while their ranks train."""

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import DEVICE, ip

from helpers.ssh_hosts import Hosts, command_lines, problem, serving_hosts
from system.elastic_training import Survivors, training
from system.launched import PATIENCE, command, parent_of

pytestmark = [
    pytest.mark.native,
    pytest.mark.slow,
    pytest.mark.skipif(bool(problem()), reason=problem() or "hosts"),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with serving_hosts(tmp_path_factory.mktemp("ssh")) as hosts:
        yield hosts


def test_hosts_come_go_and_are_cut_off(hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"

    def offer(*lines: str) -> None:
        (tmp_path / "new").write_text("".join(f"echo {line}\n" for line in lines))
        (tmp_path / "new").rename(script)

    first, second = hosts.names
    offer("localhost:1")
    sizes = ("-np", "1", "--min-np", "1", "--max-np", "5", "--host-discovery-script", str(script))
    with training(tmp_path, *sizes, *hosts.options, "--heartbeat", "2") as job:
        job.wait(lambda: 1 in job.sizes(), "one rank trains")
        offer("localhost:1", f"{first}:2", f"{second}:2")
        job.wait(lambda: 5 in job.sizes(), "ranks of three hosts train")
        offer("localhost:1", f"{second}:2")
        since = len(job.output)
        job.wait(lambda: 3 in job.sizes(since), "the ranks of one host have left")
        ip("-n", hosts.spaces[1], "link", "set", DEVICE, "down")
        since = len(job.output)
        job.wait(lambda: 1 in job.sizes(since), "the ranks of a host without a cable are lost")
        ip("-n", hosts.spaces[1], "link", "set", DEVICE, "up")
        since = len(job.output)
        job.wait(lambda: 3 in job.sizes(since), "the host is back")
        job.finish()
    assert "and its host answers nothing either" in job.report()


def test_a_rank_that_is_stopped_on_another_host_is_put_aside(hosts: Hosts, tmp_path: Path) -> None:
    """The launcher sees no processes but its own, as on a real machine; those of namespaces are in its /proc, too."""
    alone = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    sizes = ("-np", "3", "--min-np", "1", "--max-np", "3", "-H", f"localhost:1,{hosts.slots(1)}")
    with training(tmp_path, *sizes, *hosts.options, run=(*alone, *command("run"), "--verbose")) as job:
        job.wait(lambda: len(job.pids()) == 3, "ranks of three hosts train")
        since = len(job.output)
        os.kill(job.pids()[1], signal.SIGSTOP)
        job.wait(lambda: 2 in job.sizes(since), "the others go on")
        since = len(job.output)
        job.wait(lambda: 3 in job.sizes(since), "it is replaced")
        job.finish()
    (silence,) = re.findall("member 1 is lost: it gave no sign of life for ([0-9.]+) s", job.report())
    assert float(silence) < 2.5


def test_members_of_hosts_outlive_the_launcher_but_not_their_agent(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = Path("~/.local/state/farandole").expanduser()  # of the hosts' agents
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    sizes = ("-np", "5", "--min-np", "1", "--survive-launcher", "-H", f"localhost:1,{hosts.slots(2)}")
    with training(tmp_path, *sizes, *hosts.options) as job:
        job.wait(lambda: len(job.pids()) == 5, "ranks of three hosts train")
        alive = job.pids()
        job.process.kill()
        job.process.wait()
        members = Survivors(job)
        try:
            step = members.wait(5, 0)
            os.kill(parent_of(parent_of(alive[1])), signal.SIGKILL)
            step = members.wait(3, step)
            members.wait_ended([alive.pop(1), alive.pop(2)])
            (tmp_path / "end").touch()
            members.wait_ended(alive.values())
            assert [pid for _, _, pid in members.ends()] == [alive[0]]
            (name,) = (tmp_path / "home/.local/state/farandole").iterdir()
            logs = "".join(each.read_text() for each in (states / name.name).iterdir())
            assert logs.count("done ") == 2
            deadline = time.monotonic() + PATIENCE
            while any(f"-F\0{hosts.config}".encode() in line for line in command_lines()):
                assert time.monotonic() < deadline, "the connections end with the agents"
                time.sleep(0.02)
        finally:
            for name in (tmp_path / "home/.local/state/farandole").glob("*"):
                shutil.rmtree(states / name.name, ignore_errors=True)
