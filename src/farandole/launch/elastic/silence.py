"""Members that do not answer their launcher, while others wait for them."""

from farandole.launch.backend import Agent
from farandole.meeting.launched.stuck import BUSY

PING_EVERY = 0.25  # seconds
SILENT = 6  # questions without an answer after which a member that is stopped is lost
# Seconds in which the agent of a host answers nothing either, after which the host is lost. The ranks have missed it
# for their heartbeat then.
AWAY = 1.5


def why_lost(agent: Agent | None, number: int, secret: bytes, unanswered: int, is_awaited: bool) -> str | None:
    """Return why a member is lost that has left so many questions unanswered; None if it is not lost.

    `agent` is that of its host, `secret` that of the job. `is_awaited`: others have lost a rank, and wait for a place;
    otherwise they only seem to wait, so that a launcher whose own network is down ends nobody."""
    # One question earlier, because the agent of another host answers later.
    is_stopped = unanswered >= SILENT and agent is not None and agent.is_stopped(number, secret)
    silence = f"no sign of life for {PING_EVERY * unanswered:g} s while others waited"
    if PING_EVERY * unanswered > BUSY or (unanswered > SILENT and is_stopped):
        return f"it gave {silence}: it is stuck"
    if is_awaited and agent is not None and unanswered > SILENT and agent.silence > AWAY:
        return f"it gave {silence}, and its host answers nothing either"
    return None
