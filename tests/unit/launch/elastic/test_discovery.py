"""Hosts that a discovery has found."""

from contextlib import AbstractContextManager, nullcontext

import pytest

from farandole.config import Config
from farandole.launch.backend import Host
from farandole.launch.backends.ssh import Ssh
from farandole.launch.elastic import options
from farandole.launch.elastic.hosts import HostDiscovery, log_hosts
from farandole.launch.elastic.options import Elastic


@pytest.mark.parametrize(("wanted", "warns"), [(4, True), (3, False), (0, False)])
def test_a_job_that_waits_for_slots_says_so(wanted: int, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    log_hosts([Host("a", 1), Host("b", 2)], wanted)
    assert ("4 ranks (-np) have 3 slots: the job waits" in caplog.text) == warns


def test_slots_of_a_host_that_is_named_twice_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, int]] = []

    def open_job(_: object, discovery: HostDiscovery, *__: object) -> AbstractContextManager[None]:
        found.append(dict(discovery.find_available_hosts_and_slots()))
        return nullcontext()

    monkeypatch.setattr(options, "open_elastic_job", open_job)
    Elastic(min_num_proc=2).open_job(3, {}, Config(), hosts="a:1,b:2,a:1", hostfile=None, shell=Ssh())
    assert found == [{"a": 2, "b": 2}]
