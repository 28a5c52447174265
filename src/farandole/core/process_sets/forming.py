"""Rounds in which the members of a new process set exchange cards, and all ranks learn whether they connected."""

import json
from collections.abc import Callable, Sequence

from farandole.errors import RendezvousError, spell_ranks

# First byte of a rank's message in a round: a member's payload, no more payloads, or a member's failure.
CARD, DONE, FAILED = b"c", b"d", b"f"


class Forming:
    """One attempt to form a process set; `gather` is an all-gather over all ranks of the job.

    In each round every rank sends a message. Members may take any number of rounds. On all ranks, the last round is the
    first one in which a member reports a failure or no member sends a payload."""

    def __init__(self, gather: Callable[[bytes], list[bytes]], members: Sequence[int], name: str) -> None:
        self._gather_all, self._members, self._name = gather, members, name
        self._over: Exception | None = None

    def gather(self, payload: bytes) -> list[bytes]:
        """Exchange payloads with the other members; raises `RendezvousError` if one of them has failed."""
        messages = self._round(CARD + payload)
        cards = [messages[member] for member in self._members]
        if any(not card.startswith(CARD) for card in cards):
            raise RendezvousError(f"the members of {self._name} do not take the same steps")
        return [card[1:] for card in cards]

    def finish(self, failure: Exception | None) -> None:
        """Report success or `failure`, and block until all members are done; raises on all ranks if one has failed."""
        if self._over is not None:
            raise self._over
        message = DONE if failure is None else FAILED + json.dumps(self._report(failure)).encode()
        try:
            while any(received.startswith(CARD) for received in self._round(message)):
                pass
        except RendezvousError as error:
            raise error from failure

    def _report(self, failure: Exception) -> tuple[str, list[int]]:
        """Return the content of a failure message: the text, and the ranks of the job that did not connect."""
        if isinstance(failure, RendezvousError) and failure.missing:
            # The error and its text number the members from 0.
            missed = [self._members[place] for place in failure.missing]
            return f"{spell_ranks(missed)} did not connect", missed
        return f"{type(failure).__name__}: {failure}", []

    def _round(self, message: bytes) -> list[bytes]:
        try:
            messages = self._gather_all(message)
        except Exception as error:
            self._over = error
            raise
        failed = {rank: json.loads(each[1:]) for rank, each in enumerate(messages) if each.startswith(FAILED)}
        if failed:
            reports = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in failed.items())
            missed = sorted({rank for _, ranks in failed.values() for rank in ranks})
            self._over = RendezvousError(f"{self._name} was not made ({reports})", missed)
            raise self._over
        return messages
