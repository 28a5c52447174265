"""Rounds by which the members of a new process set connect, and all ranks learn whether they have."""

import json
from collections.abc import Callable, Sequence

from farandole.errors import RendezvousError, spell_ranks

__all__ = ["Forming"]

# First bytes of a rank's message in a round.
CARD, DONE, FAILED = b"c", b"d", b"f"  # a member's payload; nothing more to say; a member's failure


class Forming:
    """One attempt to form a set; `gather` is an all-gather over all ranks of the job.

    In each round every rank speaks. Rounds end, for all ranks alike, with the first in which a member says that it has
    failed, or in which no member has a payload left: members may take any number of rounds."""

    def __init__(self, gather: Callable[[bytes], list[bytes]], members: Sequence[int], name: str) -> None:
        self._everybody, self._members, self._name = gather, members, name
        self._over: Exception | None = None

    def gather(self, payload: bytes) -> list[bytes]:
        """Exchange payloads with the other members; raises `RendezvousError` when one of them has failed."""
        said = self._round(CARD + payload)
        cards = [said[member] for member in self._members]
        if any(not card.startswith(CARD) for card in cards):
            raise RendezvousError(f"the members of {self._name} do not take the same steps")
        return [card[1:] for card in cards]

    def finish(self, failure: Exception | None) -> None:
        """Say how it went here, and return when all members are done; raises the same for all when one has failed."""
        if self._over is not None:
            raise self._over
        word = DONE if failure is None else FAILED + json.dumps(self._report(failure)).encode()
        try:
            while any(each.startswith(CARD) for each in self._round(word)):
                pass
        except RendezvousError as error:
            raise error from failure

    def _report(self, failure: Exception) -> tuple[str, list[int]]:
        """Return what the others get of `failure`: a text, and the ranks of the job that were missed."""
        if isinstance(failure, RendezvousError) and failure.missing:
            # Members count themselves from 0 among themselves, and its text speaks of them so.
            missed = [self._members[place] for place in failure.missing]
            return f"{spell_ranks(missed)} did not connect", missed
        return f"{type(failure).__name__}: {failure}", []

    def _round(self, word: bytes) -> list[bytes]:
        try:
            said = self._everybody(word)
        except Exception as error:
            self._over = error
            raise
        failed = {rank: json.loads(each[1:]) for rank, each in enumerate(said) if each.startswith(FAILED)}
        if failed:
            each = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in failed.items())
            missed = sorted({rank for _, ranks in failed.values() for rank in ranks})
            self._over = RendezvousError(f"{self._name} was not made ({each})", missed)
            raise self._over
        return said
