"""Loader of rows that each rank holds itself: every row on its rank, equal steps on all ranks, resumable."""

import hashlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa

from farandole.data.formats.columns import columns_to_read
from farandole.data.loading.agreement import Gather, agree, check_places, together
from farandole.data.loading.loader import LANES_BYTES, SMALLER, Loader
from farandole.data.loading.plans import GlobalPlan, LocalPlan
from farandole.data.loading.reading import ROUND_BYTES
from farandole.data.loading.rounds import Columns, Piece
from farandole.data.loading.shares import check_shares, look_at_share
from farandole.data.loading.state import State
from farandole.errors import ConfigError, DataError


class FeedLoader(Loader):
    """Batches for one rank of the rows in `source`, which no other rank has.

    Works as `Loader`, with these differences. Every row comes once per epoch, on the rank that holds it; all ranks do
    the same number of steps, however many rows each has. `policy` "join" spreads the rows of a rank that has fewer over
    all steps, with weights; "pad" repeats the rows of such a rank; "drop" ends the epoch with the rank that has the
    fewest rows. The order, new in each epoch, is a function of seed, epoch, rank, and the order of the rows in
    `source`. Several ranks need `gather`.
    """

    _plan: LocalPlan

    def __str__(self) -> str:
        plan = self._plan
        return (
            f"{plan.total} rows on {len(plan.rows)} ranks, {min(plan.rows)} to {max(plan.rows)} each "
            f"({self._kinds_text()}); {plan.steps} steps of {self._size} x {plan.batch_size} rows by '{plan.policy}', "
            f"{plan.left_out} rows left out; {self._order_text()}"
        )

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from the state of another loader: over the same rows at any step, else at the start of an epoch.

        Rows are the same if the same number of ranks hold them in the same order. Another job that evaluates the
        DataFrame may get another order. Raises `ConfigError` for the middle of an epoch of other rows, and for another
        seed."""
        found, here = State.of(state), State.of(self.state_dict())
        if found.seed != here.seed:
            raise ConfigError("state", f"has seed {found.seed}, but this loader {here.seed}")
        same = replace(found, epoch=here.epoch, visited=here.visited, version=here.version) == here
        if found.visited and not same:
            raise ConfigError(
                "state",
                f"is {found.visited} steps into epoch {found.epoch} of other rows, or of the same in another order or "
                f"on other ranks; set_epoch({found.epoch}) begins that epoch anew",
            )
        self._epoch, self._position, self.moves = found.epoch, found.visited, self.moves + 1

    def resize(self, rank: int, size: int) -> None:
        """Raise `ConfigError` if the ranks are others: the rows of a rank that is lost are lost with it."""
        if (rank, size) != (self._rank, self._size):
            raise ConfigError("source", "has the rows of this rank alone, which others cannot read; use Loader")

    def _prepare(self, gather: Gather | None) -> None:
        asked, source = self._reading, self._source
        columns = self._columns = columns_to_read(source.schema, self._asked_columns, warn=self._rank == 0)
        if gather is None and self._size > 1:
            raise ConfigError("gather", "is needed: ranks know only their own rows; hvd.allgather_object is one")
        if asked.processes:
            raise ConfigError("processes", "cannot read what only this process has; transform on threads")
        check_places(self._rank, self._size, gather, alone=True)
        agree("the loader", f"{self._settings()}, seed {asked.seed}, shuffle {asked.shuffle}", gather)
        options = asked.fields
        mine = together(lambda: look_at_share(self._source, columns, options, LANES_BYTES), gather)
        schema = self._source.schema
        agree("the columns", ", ".join(f"{name} {schema.field(name).type}" for name in columns), gather)
        shares = [mine] if gather is None else gather(mine)
        self._plan = plan = LocalPlan(
            rows=tuple(share.rows for share in shares), batch_size=self._batch_size, policy=self._policy
        )
        check_shares(shares, columns, None if self.transforms else options)
        self._plan_columns(pa.concat_tables([pa.ipc.open_stream(share.sample).read_all() for share in shares]))
        if not plan.steps:
            held = f"ranks hold {', '.join(map(str, plan.rows))} rows"
            raise DataError("", f"{held}, which make no step of {plan.batch_size} on each; {SMALLER}")
        if self._policy == "pad" and not all(plan.rows):
            raise DataError("", f"{plan.total} rows for {self._size} ranks: some have none to repeat")
        self._row_bytes = max(1, sum(share.nbytes for share in shares) // plan.total)
        lanes = asked.lanes or (min(share.lanes for share in shares if share.rows) if asked.shuffle else 1)
        # A seed for each rank, derived from the common one.
        stream = np.random.SeedSequence(asked.seed, spawn_key=(self._rank,))
        self._order = self._make_order(lanes, ROUND_BYTES, 0, int(stream.generate_state(1, np.uint64)[0]))
        marks = "\n".join([str(self._batch_size), self._policy, *(share.mark for share in shares)])
        self._fingerprint = int.from_bytes(hashlib.sha256(marks.encode()).digest()[:7])

    def _stream(self, plan: GlobalPlan | LocalPlan, first: int) -> Generator[Piece]:
        """Yield the rank's rows from step `first` on; with "pad", repeat them without end."""
        held = self._plan.rows[self._rank]
        start = min(held, self._plan.bounds(self._rank, first)[0])
        while held:
            own = GlobalPlan(rows=held, lanes=self._order.lanes, batch_size=1, size=1, start=start, policy="join")
            yield from self._pieces(own, 0)
            if self._policy != "pad":
                return
            start = 0

    def _fill(self, take: Callable[[int], Columns], own: int, count: int) -> Columns:
        return take(count) if count else self._empty()
