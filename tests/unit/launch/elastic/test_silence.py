"""Tests of when a silent member is lost."""

import pytest

from farandole.launch.elastic.silence import AWAY, PING_EVERY, SILENT, why_lost
from farandole.meeting.launched.stuck import BUSY
from unit.launch.test_job import FakeAgent, FakeBackend


class Agent(FakeAgent):
    """An agent that finds the member stopped or not, or owes its answer."""

    def __init__(self, stopped: bool = False, silence: float = 0.0) -> None:
        super().__init__(backend := FakeBackend(), backend.hosts[0], "")
        self._stopped, self._silence = stopped, silence

    def is_stopped(self, member: int, secret: bytes) -> bool:
        assert (member, secret) == (3, b"secret")
        return self._stopped

    @property
    def silence(self) -> float:
        return self._silence


def why(unanswered: int, agent: Agent | None, is_awaited: bool = True) -> str | None:
    return why_lost(agent, 3, b"secret", unanswered, is_awaited)


@pytest.mark.parametrize("agent", [None, Agent(), Agent(stopped=True), Agent(silence=60.0)])
def test_a_member_that_answers_is_not_lost(agent: Agent | None) -> None:
    assert why(SILENT, agent) is None


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_stopped_member_is_lost_early(is_awaited: bool) -> None:
    assert "for 1.75 s while others waited: it is stuck" in str(why(SILENT + 1, Agent(stopped=True), is_awaited))


@pytest.mark.parametrize("agent", [None, Agent()])
def test_a_busy_member_is_lost_late(agent: Agent | None) -> None:
    last = int(BUSY / PING_EVERY)
    assert why(last, agent) is None
    assert "is stuck" in str(why(last + 1, agent))


def test_a_member_whose_host_is_silent_is_lost_early() -> None:
    assert why(SILENT + 1, Agent(silence=AWAY)) is None
    assert "its host answers nothing either" in str(why(SILENT + 1, Agent(silence=AWAY + 0.1)))


def test_a_launcher_whose_network_is_down_ends_nobody_while_no_rank_is_missed() -> None:
    assert why(SILENT + 1, Agent(silence=AWAY + 0.1), is_awaited=False) is None
