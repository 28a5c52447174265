"""Elastic jobs on hosts that a real sshd serves: hosts come, go, and are cut off while their ranks train."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import DEVICE, ip

from helpers.ssh_hosts import Hosts, problem, serving_hosts
from system.elastic_training import training

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
