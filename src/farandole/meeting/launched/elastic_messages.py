"""Messages between the members of an elastic job, its launcher, and a member that leads in the launcher's place."""

from dataclasses import dataclass, field

from farandole.meeting.frames import Kinds

LARGEST = 1 << 24  # bytes of a message: places of thousands of ranks name the host of each


@dataclass(frozen=True, slots=True)
class Ready:
    """A member wants a place, for a state of so many commits; -1: it has none.

    Others find it at `addresses` when the launcher is lost."""

    commits: int
    addresses: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Standing:
    """A member wants a place from the one that leads: its commits, its latest generation, and its slot."""

    commits: int
    generation: int
    slot: int


@dataclass(frozen=True, slots=True)
class Pong:
    """A member is alive, and has finished so many operations in its generation."""

    operations: int


@dataclass(frozen=True, slots=True)
class Back:
    """A member whose launcher was lost has found one at the same address: its place, and its process there."""

    generation: int
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class Bye:
    """A member's part has ended, well or with an exception of its program."""

    well: bool


@dataclass(frozen=True, slots=True)
class Ping:
    """The launcher asks whether the member is alive."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The job's hosts have changed since the member got its place."""

    added: bool = False
    removed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A member's rank in a generation, the identities of all ranks' hosts, and where the ranks meet.

    The local rank is the member's slot on its host: it stays the same for life, as the GPU of that number does. Ranks
    that outlive the launcher get the number of each rank's member, from the launcher also the address at which this
    one finds it, and the number of ranks without which they cannot go on. The job never has more than `most` ranks."""

    rank: int
    local_rank: int
    generation: int
    most: int
    hosts: list[str]
    address: str
    secret: bytes = field(repr=False)
    members: list[int] = field(default_factory=list)
    reach: list[str] = field(default_factory=list)
    least: int = 1


@dataclass(frozen=True, slots=True)
class Leave:
    """The training has ended, or has no place for the member any more."""

    why: str


FROM_MEMBER = Kinds[Ready | Pong | Back | Bye](Ready, Pong, Back, Bye)
FROM_LAUNCHER = Kinds[Ping | Hosts | Place | Leave](Ping, Hosts, Place, Leave)
