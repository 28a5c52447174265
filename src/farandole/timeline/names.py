"""Names of events in timelines: farandole's, and those of Horovod, which its programs look for."""

import re
from collections.abc import Callable
from typing import ClassVar

NEGOTIATE, QUEUE, PLAN = "negotiate", "queue", "plan"
CYCLE = "CYCLE_START"  # Horovod's mark for the moment of our PLAN

# The text of a timeline has an event per line. The phases of an operation follow each other.
_NEGOTIATION = re.compile(
    rb'^(\{"name":")negotiate(",[^\n]*\n(?:\{"name":"queue",[^\n]*\n)?\{"name":"([a-z_]+)")', re.MULTILINE
)
_PHASE = re.compile(rb'(?<=^\{"name":")[a-z_]+(?=","ts":)', re.MULTILINE)


class Spelling:
    """The spelling of events that timelines write, here as the engine gives their text; compat patches it."""

    of_events: ClassVar[Callable[[bytes], bytes]] = bytes


def as_horovod(events: bytes) -> bytes:
    """Return the text of events with the names NEGOTIATE_ALLREDUCE, QUEUE, ALLREDUCE, CYCLE_START, ..."""
    named = _NEGOTIATION.sub(lambda found: b"%bNEGOTIATE_%b%b" % (found[1], found[3].upper(), found[2]), events)
    return _PHASE.sub(lambda found: CYCLE.encode() if found[0] == PLAN.encode() else found[0].upper(), named)


def own_name(name: str) -> str:
    """Return farandole's name of an event that may have Horovod's."""
    if name.startswith("NEGOTIATE_"):
        return NEGOTIATE
    return PLAN if name == CYCLE else name.lower() if name.isupper() else name
