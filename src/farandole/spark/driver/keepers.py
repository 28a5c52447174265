"""Keepers of a job's dealt rows, as the driver follows them."""

import threading

from farandole.spark.driver.peers import Job, Peer


class Keepers:
    """Keepers that are connected or lost, and the ranks that have their rows.

    A keeper ends at the driver's first message, or when its connection to the driver does."""

    def __init__(self, job: Job, size: int, changed: threading.Condition) -> None:
        self._job, self._size, self._changed = job, size, changed
        self._connected: set[Peer] = set()
        self._lost: list[str] = []
        self._fed: set[int] = set()
        self._over = False  # keepers are no longer needed

    @property
    def lost(self) -> list[str]:
        """The hosts of keepers that have ended too early, whose rows are lost."""
        with self._changed:
            return [*self._lost]

    @property
    def feeding(self) -> bool:
        """True until the first rank has its rows; until then no rank's function has begun."""
        with self._changed:
            return not self._fed

    def welcome(self, keeper: Peer) -> None:
        """Add a keeper, or dismiss one that comes too late."""
        with self._changed:
            self._connected.add(keeper)
            late = self._over
        if late:
            keeper.dismiss("too late")
        self._job.on_keeper()

    def leave(self, keeper: Peer, *, dismissed: bool) -> bool:
        """Remove a keeper that has disconnected; return whether its rows are lost.

        They are not if it, or the whole job, was dismissed before."""
        with self._changed:
            self._connected.discard(keeper)
            lost = not (dismissed or self._over)
            if lost:
                self._lost.append(str(keeper.host))
        return lost

    def fed(self, rank: int) -> None:
        """Note that `rank` has its rows; once all have, and none may ask again, dismiss the keepers."""
        with self._changed:
            self._fed.add(rank)
            all_fed = len(self._fed) == self._size
        if all_fed and not self._job.repeats:
            self.dismiss()

    def dismiss(self) -> None:
        """Make all keepers end, those that connect later as well."""
        with self._changed:
            self._over = True
            connected = [*self._connected]
        for keeper in connected:
            keeper.dismiss("no rank needs the rows any more")
