"""Logic of a rendezvous, without sockets, threads or clocks: the rounds of a job and the answers to its ranks."""

import zlib
from dataclasses import dataclass, field
from typing import TypeAlias

from farandole.errors import RendezvousError
from farandole.meeting.frames import Kinds, decode, encode

# All ranks' payloads in rank order, or the error of the round.
RoundResult: TypeAlias = list[bytes] | RendezvousError

PACKED_FROM = 16 << 10  # bytes of a result


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A rank that calls an all-gather: the `round`-th of its rendezvous in this generation.

    Encoded, it is the identity that the handshake proves."""

    rank: int
    size: int
    generation: int
    round: int


@dataclass(slots=True)
class _Room:
    """A round in which some ranks wait for the others."""

    opened: float
    deadline: float
    payloads: dict[int, bytes] = field(default_factory=dict)
    tickets: dict[int, int] = field(default_factory=dict)  # by rank


class Meeting:
    """The rounds of one job. The transport gives each waiting caller a number, its `ticket`. Times are in seconds.

    Each method returns the answers that are now due, by ticket. A ticket gets one answer, unless its caller leaves."""

    def __init__(self, size: int, generation: int = 0) -> None:
        self.size, self.generation = size, generation
        self._rooms: dict[int, _Room] = {}
        self._gone: dict[int, str] = {}
        # Errors for ranks that arrive after their round has timed out, by round and rank: they must not wait alone.
        self._too_late: dict[int, dict[int, RendezvousError]] = {}

    def arrive(
        self, ticket: int, caller: Caller, payload: bytes, *, now: float, deadline: float
    ) -> dict[int, RoundResult]:
        """Accept the payload of `caller`, which waits until `deadline` at most."""
        if caller.size != self.size or not 0 <= caller.rank < self.size:
            # Check this before the generation: a rank of another job must not end the rounds of this one.
            problem = f"this job has {self.size} ranks, but rank {caller.rank} was started as one of {caller.size}"
            return {ticket: RendezvousError(problem)}
        answers = self._begin(caller.generation)
        refusal = self._refusal(caller)
        if refusal is not None:
            return {**answers, ticket: refusal}
        room = self._rooms.setdefault(caller.round, _Room(now, deadline))
        room.deadline = min(room.deadline, deadline)
        room.payloads[caller.rank] = payload
        room.tickets[caller.rank] = ticket
        if len(room.payloads) < self.size:
            return answers
        del self._rooms[caller.round]
        gathered = [room.payloads[rank] for rank in range(self.size)]
        return {**answers, **dict.fromkeys(room.tickets.values(), gathered)}

    def leave(self, ticket: int) -> dict[int, RoundResult]:
        """Remove a caller whose connection broke. Its rank is missing again; if it has departed, the round fails."""
        answers: dict[int, RoundResult] = {}
        for number, room in list(self._rooms.items()):
            for rank in [rank for rank, each in room.tickets.items() if each == ticket]:
                del room.tickets[rank], room.payloads[rank]
                if rank in self._gone:
                    answers.update(self._fail(number, RendezvousError(self._gone[rank], missing=(rank,))))
            if not room.tickets:
                self._rooms.pop(number, None)
        return answers

    def depart(self, rank: int, reason: str) -> dict[int, RoundResult]:
        """Note that `rank` will not call again: every round that lacks it fails, now and later."""
        self._gone[rank] = reason
        answers: dict[int, RoundResult] = {}
        for number in [number for number, room in self._rooms.items() if rank not in room.payloads]:
            answers.update(self._fail(number, RendezvousError(reason, missing=(rank,))))
        return answers

    def expire(self, now: float) -> dict[int, RoundResult]:
        """Fail the rounds whose deadline has passed."""
        answers: dict[int, RoundResult] = {}
        for number, room in [each for each in self._rooms.items() if each[1].deadline <= now]:
            missing = [rank for rank in range(self.size) if rank not in room.payloads]
            waited = room.deadline - room.opened
            problem = f"{len(missing)} of {self.size} ranks did not come within {waited:.3g} s"
            answers.update(self._fail(number, RendezvousError(problem, missing)))
            late = RendezvousError(f"this rank came too late: the others waited {waited:.3g} s and gave up")
            self._too_late.setdefault(number, {}).update(dict.fromkeys(missing, late))
        return answers

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of a round; None without rounds."""
        return min((room.deadline for room in self._rooms.values()), default=None)

    def _begin(self, generation: int) -> dict[int, RoundResult]:
        """Begin `generation` if it is newer, and end the rounds of the one before it."""
        if generation <= self.generation:
            return {}
        problem = f"generation {self.generation} is over: generation {generation} has begun"
        self.generation = generation
        self._gone.clear()
        self._too_late.clear()
        answers: dict[int, RoundResult] = {}
        for number in list(self._rooms):
            answers.update(self._fail(number, RendezvousError(problem)))
        return answers

    def _refusal(self, caller: Caller) -> RendezvousError | None:
        """Return the reason why `caller` cannot wait for its round; None when it can."""
        rank = caller.rank
        if caller.generation < self.generation:
            problem = f"generation {caller.generation} is over: generation {self.generation} has begun"
            return RendezvousError(problem)
        late = self._too_late.get(caller.round, {}).pop(rank, None)
        if late is not None:
            return late
        room = self._rooms.get(caller.round)
        if room is not None and rank in room.payloads:
            return RendezvousError(f"rank {rank} came twice: two processes were started as rank {rank}")
        gone = [each for each in self._gone if room is None or each not in room.payloads]
        return RendezvousError(self._gone[gone[0]], missing=gone) if gone else None

    def _fail(self, number: int, error: RendezvousError) -> dict[int, RoundResult]:
        return dict.fromkeys(self._rooms.pop(number).tickets.values(), error)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """All ranks' payloads, in rank order."""

    payloads: list[bytes]


@dataclass(frozen=True, slots=True)
class _Packed:
    """The bytes of a `_Gathered`, compressed."""

    gathered: bytes


@dataclass(frozen=True, slots=True)
class _Failed:
    """The error of a round."""

    problem: str
    missing: list[int]


def encode_result(result: RoundResult) -> bytes:
    """Return the bytes of a result.

    Each of N ranks gets the N payloads, which are alike: those of 4,096 ranks have 1.3 MB, and a twentieth of that when
    compressed."""
    if isinstance(result, RendezvousError):
        return encode(_Failed(result.problem, list(result.missing)))
    gathered = encode(_Gathered(result))
    packed = encode(_Packed(zlib.compress(gathered, level=1))) if len(gathered) >= PACKED_FROM else gathered
    return min(packed, gathered, key=len)


def decode_result(payload: bytes, where: str, limit: int) -> RoundResult:
    """Read what `encode_result` wrote; an error gets `where`, the address of the rendezvous.

    Raises `RendezvousError` when the bytes are no result of at most `limit` bytes."""
    try:
        message = Kinds[_Gathered | _Packed | _Failed](_Gathered, _Packed, _Failed).decode(payload)
        if isinstance(message, _Packed):
            message = decode(_unpacked(message.gathered, limit), _Gathered)
    except ValueError as error:
        raise RendezvousError(f"the answer cannot be read: {error}", where=where) from error
    return (
        message.payloads if isinstance(message, _Gathered) else RendezvousError(message.problem, message.missing, where)
    )


def _unpacked(packed: bytes, limit: int) -> bytes:
    """Decompress `packed`; raises `ValueError` if it is damaged or its content has more than `limit` bytes."""
    reader = zlib.decompressobj()
    try:
        content = reader.decompress(packed, limit)
    except zlib.error as error:
        raise ValueError(f"its content is damaged ({error})") from error
    if not reader.eof or reader.unused_data:
        raise ValueError(f"its content is cut short, or over the limit of {limit} bytes")
    return content
