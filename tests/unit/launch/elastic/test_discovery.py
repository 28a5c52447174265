"""Hosts that a discovery has found."""

import pytest

from farandole.launch.backend import Host
from farandole.launch.elastic.hosts import log_hosts


@pytest.mark.parametrize(("wanted", "warns"), [(4, True), (3, False), (0, False)])
def test_a_job_that_waits_for_slots_says_so(wanted: int, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    log_hosts([Host("a", 1), Host("b", 2)], wanted)
    assert ("4 ranks (-np) have 3 slots: the job waits" in caplog.text) == warns
