"""Batches of rows that lie on the ranks: each rank goes through its own, in as many steps as all others."""

import hashlib
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from farandole.data.agreement import Gather, agree, in_step, together
from farandole.data.cutter import Cutter, empty_like
from farandole.data.deal import Deal, Policy
from farandole.data.fields import check_names, plan_fields
from farandole.data.loader import LANES_BYTES, LEAST_WINDOW, NO_SEED, ROUND_BYTES, Batch, Reading, transformed
from farandole.data.meter import Meter, Metrics
from farandole.data.order import Order, choose_lanes
from farandole.data.pool import ReadPool
from farandole.data.rounds import Columns, Reader, read_ahead, read_rounds
from farandole.data.row_groups import RowGroup, Source
from farandole.data.shard_sample import join_samples, sample_rows
from farandole.data.sharding import StepsPlan
from farandole.data.state import State
from farandole.errors import ConfigError, DataError

__all__ = ["FeedLoader"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """What one rank tells the others of its rows."""

    rows: int
    nbytes: int
    lanes: int  # that its row groups make
    nulls: Mapping[str, int]
    sample: bytes
    mark: str  # stands for the rows and their order


class FeedLoader:
    """Batches for one rank of the rows in `source`, which no other rank has: `for batch in loader` as with `Loader`.

    Every row comes once per epoch, on the rank where it lies; ranks do the same number of steps, however many rows each
    has. `policy`: "join" spreads the rows of ranks that have fewer, with weights; "pad" repeats rows of these; "drop"
    ends the epoch with the emptiest rank. The order, new in each epoch, is a function of seed, epoch, rank, and the
    order of the rows in `source`.
    With several ranks, `gather`, an all-gather of objects, is needed, and as with `Loader` making a loader, starting an
    epoch and each step are collective: what is wrong with one rank's rows, or what its transform raises, all ranks
    raise before any of them has that step's batch. With `alone` only making it is collective: each rank takes batches
    when it likes, and what its transform raises is its own. Raises `DataError` for columns and rows, `ConfigError` for
    settings.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        policy: Policy,
        columns: Sequence[str] | None = None,
        rank: int = 0,
        size: int = 1,
        reading: Reading | None = None,
        gather: Gather | None = None,
        alone: bool = False,
        report: Callable[[Metrics], None] | None = None,
    ) -> None:
        if not 0 <= rank < size:
            raise ConfigError("rank", f"must be in 0..{size - 1}, got {rank}")
        if gather is None and size > 1:
            raise ConfigError("gather", "is needed: ranks know only their own rows; hvd.allgather_object is one")
        if reading is not None and reading.processes:
            raise ConfigError("processes", "cannot read what only this process has; transform on threads")
        if batch_size < 1:
            raise ConfigError("batch_size", f"must be >= 1, got {batch_size}")
        self._source, self._rank, self._size = source, rank, size
        self._reading, self._gather, self._report = reading or Reading(), None if alone else gather, report
        self._columns = list(source.schema.names if columns is None else columns)
        settings = f"{size} ranks, batch_size {batch_size}, policy {policy}"
        agree("the loader", f"{settings}, seed {self._reading.seed}, shuffle {self._reading.shuffle}", gather)
        mine = together(self._look, gather)
        agree("the columns", ", ".join(f"{field.name} {field.type}" for field in self._schema()), gather)
        shares = [mine] if gather is None else gather(mine)
        self._reader = self._plan_reader(shares)
        self._plan = StepsPlan(rows=tuple(share.rows for share in shares), batch_size=batch_size, policy=policy)
        self._check_plan()
        self._row_bytes = max(1, sum(share.nbytes for share in shares) // self._plan.total)
        self._order = self._plan_order(shares)
        marks = "\n".join([str(batch_size), policy, *(share.mark for share in shares)])
        self._fingerprint = int.from_bytes(hashlib.sha256(marks.encode()).digest()[:7])
        self._epoch, self._step = 0, 0
        self._meter: Meter | None = None
        log.info("%s", self)

    @property
    def kinds(self) -> dict[str, str]:
        """What each column holds, for a reader: {"pixels": "float[64]"}."""
        return {field.name: field.kind for field in self._reader.fields}

    @property
    def batch_rows(self) -> int | None:
        """How many rows each batch has; None where ranks may have fewer."""
        return None if self._plan.policy == "join" else self._plan.batch_size

    @property
    def transforms(self) -> bool:
        """Whether a transform makes the columns of batches."""
        return self._reading.transform is not None

    def sample(self) -> Columns:
        """Return columns of the types and shapes that batches have.

        They have no rows, but where a transform makes them: then those of this rank's first row group, if it has one.
        That is collective, unless `alone`."""
        if not self.transforms:
            return self._no_rows
        return together(self._few_rows, self._gather)

    @property
    def rows(self) -> int:
        """Rows of an epoch, of all ranks together."""
        return self._plan.total

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._epoch

    @property
    def metrics(self) -> Metrics | None:
        """Speed and waiting of the epoch that was read last; None before the first."""
        return None if self._meter is None else self._meter.metrics

    def __len__(self) -> int:
        """Return the steps that are left of this epoch, the same number on every rank."""
        return self._plan.steps - self._step

    def __str__(self) -> str:
        plan, order = self._plan, self._order
        kinds = ", ".join(f"{name} {kind}" for name, kind in self.kinds.items())
        order_text = "not shuffled" if order.seed is None else f"seed {self._reading.seed}"
        return (
            f"{plan.total} rows on {len(plan.rows)} ranks, {min(plan.rows)} to {max(plan.rows)} each ({kinds}); "
            f"{plan.steps} steps of {self._size} x {plan.batch_size} rows by '{plan.policy}', "
            f"{plan.left_out} rows left out; {order_text}, {order.lanes} lanes, windows of {order.window} rows"
        )

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches that are left of this epoch; when all have been taken, the next one is due."""
        together(self._source.check, self._gather)
        meter = self._meter = Meter(self._epoch)
        first, steps = self._step, self._plan.steps
        batches = self._batches(first, meter)
        with closing(batches):
            for step, batch in enumerate(
                in_step(batches, self._gather, self._row_bytes * self._plan.batch_size), first + 1
            ):
                meter.steps += 1
                meter.rows += batch.rows
                # Before it is given out: whoever saves the state then has this batch behind him.
                self._step = step
                if step == steps:
                    self._finish(meter.metrics)
                yield batch

    def set_epoch(self, epoch: int) -> None:
        """Go to the first row of this epoch; in the epoch that is under way, stay where we are."""
        if epoch < 0:
            raise ConfigError("epoch", f"must be >= 0, got {epoch}")
        if epoch != self._epoch:
            self._epoch, self._step = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return where this loader stands, after the last batch that was taken; the same on every rank."""
        return State(
            epoch=self._epoch,
            visited=self._step,
            seed=self._reading.seed if self._reading.shuffle else NO_SEED,
            lanes=self._order.lanes,
            window=self._order.window,
            fingerprint=self._fingerprint,
        ).as_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where another loader stood: at any step over the same rows, else at the beginning of an epoch.

        Rows are the same on the same number of ranks if they come in the same order; what another job evaluates anew
        may not. Raises `ConfigError` for the middle of an epoch of other rows, and for another seed."""
        found = State.of(state)
        here = self.state_dict()
        if found.seed != here["seed"]:
            raise ConfigError("state", f"has seed {found.seed}, but this loader {here['seed']}")
        same = (found.fingerprint, found.lanes, found.window) == (here["fingerprint"], here["lanes"], here["window"])
        if found.visited and not same:
            raise ConfigError(
                "state",
                f"is {found.visited} steps into epoch {found.epoch} of other rows, or of the same in another order or "
                f"on other ranks; set_epoch({found.epoch}) begins that epoch anew",
            )
        self._epoch, self._step = found.epoch, found.visited

    def _look(self) -> _Share:
        """Look at this rank's rows once: nothing of their content is read but lengths of arrays."""
        check_names(self._source.schema, self._columns)
        self._reading.fields.check(self._columns)
        nulls, digest = dict.fromkeys(self._columns, 0), hashlib.sha256()
        digest.update(self._source.schema.serialize())
        sampled = []
        groups = [group for group in self._source.row_groups if group.rows]
        for group in groups:
            table = self._source.read(group, self._columns)
            for name in self._columns:
                nulls[name] += table[name].null_count
            digest.update(repr((group.rows, table.slice(0, 1).to_pylist())).encode())
            sampled.append(sample_rows(table))
        nbytes = self._source.nbytes(self._columns)
        return _Share(
            rows=sum(group.rows for group in groups),
            nbytes=nbytes,
            lanes=choose_lanes([group.rows for group in groups], nbytes, most_bytes=LANES_BYTES),
            nulls=nulls,
            sample=join_samples(self._schema(), sampled),
            mark=digest.hexdigest(),
        )

    def _schema(self) -> pa.Schema:
        return pa.schema([self._source.schema.field(name) for name in self._columns])

    def _plan_reader(self, shares: Sequence[_Share]) -> Reader:
        rows = sum(share.rows for share in shares)
        if not rows:
            raise DataError(", ".join(self._columns), f"there are no rows on any of {self._size} ranks")
        for name in self._columns:
            nulls = sum(share.nulls[name] for share in shares)
            if nulls and self._reading.fields.nulls.get(name) is None:
                raise DataError(
                    name,
                    f"{nulls} of {rows} rows are null; fill or drop them before, or say what stands for them: "
                    f"nulls={{'{name}': ...}}",
                )
        seen = pa.concat_tables([pa.ipc.open_stream(share.sample).read_all() for share in shares])
        fields = plan_fields(self._source.schema, self._columns, seen, self._reading.fields)
        none = seen.slice(0, 0)
        self._no_rows: Columns = {field.name: field.values(none[field.name]) for field in fields}
        return Reader(self._source, tuple(fields))

    def _few_rows(self) -> Columns:
        first = next((group for group in self._source.row_groups if group.rows), None)
        return transformed(self._reading.transform, self._no_rows if first is None else self._reader(first))

    def _check_plan(self) -> None:
        plan = self._plan
        if not plan.steps:
            raise DataError(
                ", ".join(self._columns),
                f"ranks hold {', '.join(map(str, plan.rows))} rows, which make no step of {plan.batch_size} on each; "
                "take a smaller batch_size, or policy='join'",
            )
        if plan.policy == "pad" and not all(plan.rows):
            raise DataError(
                ", ".join(self._columns), f"{plan.total} rows for {self._size} ranks: some have none to repeat"
            )

    def _plan_order(self, shares: Sequence[_Share]) -> Order:
        asked = self._reading
        lanes = asked.lanes or (min(share.lanes for share in shares if share.rows) if asked.shuffle else 1)
        # Ranks shuffle apart from each other, and differently.
        stream = np.random.SeedSequence(asked.seed, spawn_key=(self._rank,))
        return Order(
            row_groups=tuple(group.rows for group in self._source.row_groups),
            lanes=lanes,
            window=asked.window or max(LEAST_WINDOW, ROUND_BYTES // self._row_bytes // lanes),
            seed=int(stream.generate_state(1, np.uint64)[0]) if asked.shuffle else None,
        )

    def _batches(self, first: int, meter: Meter) -> Generator[Batch]:
        """Yield the rank's batches of the steps from `first` on."""
        plan = self._plan
        held = plan.rows[self._rank]
        pieces = self._pieces(min(held, plan.bounds(self._rank, first)[0]))
        with closing(pieces):
            cutter = Cutter(pieces, meter)
            # Of no rows a transform could not tell what it makes.
            like = self._few_rows() if self.transforms and held < plan.steps else self._no_rows
            for step in range(first, plan.steps):
                own = plan.batch(self._rank, step)
                count = own if plan.policy == "join" else plan.batch_size
                columns = cutter.take(count) if count else empty_like(like)
                yield Batch.of(columns, count, plan.weight(self._rank, step), count - own)

    def _pieces(self, start: int) -> Generator[Columns]:
        """Yield the rank's rows from `start` on in its order, in pieces of any length; "pad": again and again."""
        asked, held = self._reading, self._plan.rows[self._rank]
        groups = self._source.row_groups
        order = self._order.epoch(self._epoch)
        pool: ReadPool[RowGroup, Columns] = ReadPool(self._reader, max(1, asked.workers))
        try:
            while held:
                rounds = read_rounds(
                    order,
                    Deal(rows=held, lanes=self._order.lanes, batch_size=1, size=1, start=start, policy="join"),
                    0,
                    read=lambda number: pool.submit(groups[number]),
                    ahead=asked.ahead,
                    timeout=asked.timeout,
                )
                made = (transformed(asked.transform, columns) for columns in rounds)
                yield from read_ahead(made, 1) if asked.workers else made
                if self._plan.policy != "pad":
                    break
                start = 0
        finally:
            pool.close()

    def _finish(self, metrics: Metrics) -> None:
        self._epoch, self._step = self._epoch + 1, 0
        log.info("rank %d, %s", self._rank, metrics)
        if self._report is not None:
            self._report(metrics)
