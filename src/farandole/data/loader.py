"""One rank's batches of row groups that all ranks read: every row once per epoch, equal steps, resumable."""

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import pyarrow as pa

from farandole.data.agreement import Gather, agree, in_step, together
from farandole.data.cutter import Cutter, empty_like, fill_up, rows_of
from farandole.data.deal import Deal, Policy
from farandole.data.fields import FieldOptions, plan_fields
from farandole.data.meter import Meter, Metrics
from farandole.data.order import Order, choose_lanes
from farandole.data.pool import ReadPool
from farandole.data.reading_process import ReadingProcesses
from farandole.data.rounds import Columns, Reader, Transform, read_ahead, read_rounds
from farandole.data.row_groups import RowGroup, Source, fingerprint
from farandole.data.shard_source import is_own
from farandole.data.state import State
from farandole.data.values import Values
from farandole.errors import ConfigError, DataError

__all__ = ["Batch", "Loader", "Reading", "transformed"]

log = logging.getLogger(__name__)

NO_SEED = -1
# The default window and number of lanes keep a round, which better fits a processor's cache, and one row group of each
# lane within these; a window of fewer rows would mix badly. In file order there is nothing to mix.
ROUND_BYTES = 4 << 20
PLAIN_ROUND_BYTES = 4 << 20
LANES_BYTES = 512 << 20
LEAST_WINDOW = 64


class Batch(dict[str, Values]):
    """What one rank works on in one step: columns by name. Their memory is the batch's own."""

    rows: int  # with the repeated ones
    weight = 1.0  # makes the plain average over ranks the mean over all rows of the step
    repeated = 0  # rows that "pad" has visited before, at the end

    @classmethod
    def of(cls, columns: Columns, rows: int, weight: float = 1.0, repeated: int = 0) -> Self:
        """Make one of something else than the usual."""
        batch = cls(columns)
        batch.rows, batch.weight, batch.repeated = rows, weight, repeated
        return batch


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How rows are read; what is None is chosen from the row groups, alike on every rank.

    shuffle, seed: the order. lanes, window: see `farandole.data.order`; more lanes than ranks let a rank read few row
    groups, larger windows mix better, and both take memory. workers: threads that read; 0: one, and rows are put
    together when a batch is asked for. ahead: rounds that are read before they are needed. timeout: seconds for a row
    group to come. transform: called with the columns of any number of rows, on a thread; it gives columns of as many.
    processes: the workers are processes, each with a copy of `transform` that it calls with whole row groups: for
    transforms that hold Python's lock. They are started for each epoch, and cost every row two copies.
    """

    shuffle: bool = True
    seed: int = 0
    lanes: int | None = None
    window: int | None = None
    workers: int = 2
    ahead: int = 1
    timeout: float = 300.0
    transform: Transform | None = None
    processes: bool = False
    fields: FieldOptions = field(default_factory=FieldOptions)

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("lanes", 1), ("window", 1), ("workers", 0), ("ahead", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(name, f"must be >= {least}, got {value}")
        if self.timeout <= 0:
            raise ConfigError("timeout", f"must be > 0 seconds, got {self.timeout}")
        if self.processes and not self.workers:
            raise ConfigError("processes", "are as many as there are workers, of which there are none")


class Loader:
    """Batches for rank `rank` of `size`: `for batch in loader` gives what is left of an epoch, then the next one.

    `policy` says what happens to the rows that do not fill a last step: "drop" leaves them out, "pad" fills batches up
    by repeating rows, "join" shares them out, so that batches of the last step are smaller, or empty.
    With `gather`, an all-gather of objects, making a loader, starting an epoch and each step are collective: ranks that
    see different data, or of which one cannot read it, all raise, before any of them has that step's batch, and with
    the text of what went wrong. Reading blocks while no row is ready.
    Raises `DataError` for columns, `SourceError` for files, `ConfigError` for settings.
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
        report: Callable[[Metrics], None] | None = None,
    ) -> None:
        if not 0 <= rank < size:
            raise ConfigError("rank", f"must be in 0..{size - 1}, got {rank}")
        if size > 1 and is_own(source):
            raise ConfigError("source", "has the rows of this rank alone, which others cannot read; use FeedLoader")
        self._source, self._rank, self._size, self._batch_size = source, rank, size, batch_size
        self._reading, self._gather, self._report = reading or Reading(), gather, report
        self._policy: Policy = policy
        self._columns = list(source.schema.names if columns is None else columns)
        self._reader = together(self._plan_reader, gather)
        order = self._plan_order()
        self._fingerprint = fingerprint(source.row_groups)
        self._order, self._epoch, self._visited = order, 0, 0
        self._meter: Meter | None = None
        self._check_deal()
        log.info("%s", self)

    @property
    def kinds(self) -> dict[str, str]:
        """What each column holds, for a reader: {"pixels": "float[64]"}."""
        return {field.name: field.kind for field in self._reader.fields}

    @property
    def batch_rows(self) -> int | None:
        """How many rows each batch has; None where the last one may have fewer."""
        return None if self._policy == "join" else self._batch_size

    @property
    def transforms(self) -> bool:
        """Whether a transform makes the columns of batches."""
        return self._reading.transform is not None

    def sample(self) -> Columns:
        """Return columns of the types and shapes that batches have.

        They have no rows, but where a transform makes them: then those of the first row group, which is read,
        collectively if there is a `gather`."""
        if not self.transforms:
            return self._no_rows
        return together(self._few_rows, self._gather)

    @property
    def rows(self) -> int:
        """Rows of an epoch, of all ranks together."""
        return self._order.rows

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
        return self._deal().steps

    def __str__(self) -> str:
        deal, order = self._deal(), self._order
        left = deal.rows - deal.after(deal.steps - 1) if deal.steps else deal.rows - deal.start
        order_text = "not shuffled" if order.seed is None else f"seed {order.seed}"
        return (
            f"{order.rows} rows in {len(order.row_groups)} row groups ({self._kinds_text()}); {deal.steps} steps of "
            f"{self._size} x {self._batch_size} rows, the last by '{self._policy}', {left} rows left out; "
            f"{order_text}, {order.lanes} lanes, windows of {order.window} rows"
        )

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches that are left of this epoch; when all have been taken, the next one is due."""
        together(self._source.check, self._gather)
        deal = self._deal()
        meter = self._meter = Meter(self._epoch)
        steps, step_rows = deal.steps, deal.step_rows
        batches = self._batches(deal, meter)
        with closing(batches):
            for batch in in_step(batches, self._gather, self._row_bytes * self._batch_size):
                meter.steps += 1
                meter.rows += batch.rows
                # Before it is given out: whoever saves the state then has this batch behind him.
                self._visited += step_rows
                if meter.steps == steps:
                    self._finish(meter.metrics)
                yield batch

    def set_epoch(self, epoch: int) -> None:
        """Go to the first row of this epoch; in the epoch that is under way, stay where we are."""
        if epoch < 0:
            raise ConfigError("epoch", f"must be >= 0, got {epoch}")
        if epoch != self._epoch:
            self._epoch, self._visited = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return where this loader stands, after the last batch that was taken; the same on every rank."""
        order = self._order
        return State(
            epoch=self._epoch,
            visited=self._visited,
            seed=NO_SEED if order.seed is None else order.seed,
            lanes=order.lanes,
            window=order.window,
            fingerprint=self._fingerprint,
        ).as_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where another loader stood, over the same data with any number of ranks and any batch size.

        Takes the order from the state: seed, lanes and window. Raises `ConfigError` when the data is not the same."""
        found = State.of(state)
        if found.fingerprint != self._fingerprint:
            raise ConfigError("state", "belongs to other data: the row groups of this data have other sizes")
        if not 0 <= found.visited <= self._order.rows:
            raise ConfigError("state", f"has visited {found.visited} of {self._order.rows} rows")
        self._order = Order(
            row_groups=self._order.row_groups,
            lanes=found.lanes,
            window=found.window,
            seed=None if found.seed == NO_SEED else found.seed,
        )
        self._epoch, self._visited = found.epoch, found.visited
        if not self._deal().steps:
            self._epoch, self._visited = found.epoch + 1, 0

    def _kinds_text(self) -> str:
        return ", ".join(f"{name} {kind}" for name, kind in self.kinds.items())

    def _plan_reader(self) -> Reader:
        groups = [group for group in self._source.row_groups if group.rows]
        if not groups:
            raise DataError(", ".join(self._columns), "there are no rows")
        known = [name for name in self._columns if name in self._source.schema.names]
        # The first row group tells what the schema does not: the length of arrays.
        nested = any(pa.types.is_nested(self._source.schema.field(name).type) for name in known)
        first_rows = self._source.read(groups[0], known) if nested else pa.Table.from_batches([], self._source.schema)
        fields = plan_fields(self._source.schema, self._columns, first_rows, self._reading.fields)
        # Read once: the first epoch takes it from here.
        self._known = {groups[0]: first_rows} if nested else {}
        none = first_rows.slice(0, 0)
        self._no_rows: Columns = {field.name: field.values(none[field.name]) for field in fields}
        return Reader(self._source, tuple(fields))

    def _few_rows(self) -> Columns:
        first = next(group for group in self._source.row_groups if group.rows)
        return transformed(self._reading.transform, self._reader(first))

    def _plan_order(self) -> Order:
        asked, rows = self._reading, tuple(group.rows for group in self._source.row_groups)
        nbytes = self._source.nbytes(self._columns)
        self._row_bytes = max(1, nbytes // max(1, sum(rows)))
        # In file order each rank takes a stretch of its own; a shuffled order does not know how many ranks there are.
        lanes = asked.lanes or (choose_lanes(rows, nbytes, most_bytes=LANES_BYTES) if asked.shuffle else self._size)
        round_bytes = ROUND_BYTES if asked.shuffle else PLAIN_ROUND_BYTES * self._size
        window = asked.window or max(LEAST_WINDOW, round_bytes // self._row_bytes // lanes)
        order = Order(row_groups=rows, lanes=lanes, window=window, seed=asked.seed if asked.shuffle else None)
        settings = f"{self._size} ranks, batch_size {self._batch_size}, policy {self._policy}"
        held = f"{len(rows)} row groups of {sum(rows)} rows, fingerprint {fingerprint(self._source.row_groups):x}"
        agree("the data", held, self._gather)
        agree("the columns", self._kinds_text(), self._gather)
        agree("the loader", f"{settings}, lanes {lanes}, window {window}, seed {order.seed}", self._gather)
        return order

    def _check_deal(self) -> None:
        deal = self._deal()
        if not deal.steps:
            raise DataError(
                ", ".join(self._columns),
                f"{deal.rows} rows make no step of {deal.step_rows}; take a smaller batch_size, or policy='join'",
            )
        if self._policy == "pad" and deal.rows < self._size:
            raise DataError(
                ", ".join(self._columns), f"{deal.rows} rows for {self._size} ranks: some have none to repeat"
            )
        if len(self._order.row_groups) < self._size:
            log.warning(
                "%d row groups for %d ranks: several ranks read each of them; write smaller row groups to read less",
                len(self._order.row_groups),
                self._size,
            )

    def _deal(self) -> Deal:
        return Deal(
            rows=self._order.rows,
            lanes=self._order.lanes,
            batch_size=self._batch_size,
            size=self._size,
            start=self._visited,
            policy=self._policy,
        )

    def _finish(self, metrics: Metrics) -> None:
        self._epoch, self._visited = self._epoch + 1, 0
        log.info("rank %d, %s", self._rank, metrics)
        if self._report is not None:
            self._report(metrics)

    def _batches(self, deal: Deal, meter: Meter) -> Generator[Batch]:
        pieces = self._pieces(deal)
        with closing(pieces):
            cutter = Cutter(pieces, meter)
            take, batch_size, full = cutter.take, self._batch_size, (deal.rows - deal.start) // deal.step_rows
            for step in range(deal.steps):
                if step < full:
                    batch = Batch(take(batch_size))
                    batch.rows = batch_size
                else:
                    batch = self._last_batch(deal, step, cutter)
                yield batch

    def _last_batch(self, deal: Deal, step: int, cutter: Cutter) -> Batch:
        """Return what the policy makes of the rows that do not fill a step."""
        in_step = deal.rows - deal.start - step * deal.step_rows
        held = len(deal.take(self._rank, step))
        # Of no rows a transform could not tell what it makes.
        columns = cutter.take(held) if held else empty_like(self._few_rows() if self.transforms else self._no_rows)
        if self._policy == "join":
            return Batch.of(columns, held, held * self._size / in_step)
        columns = fill_up(columns, columns if held else self._first_rows(), self._batch_size)
        return Batch.of(columns, self._batch_size, repeated=self._batch_size - held)

    def _first_rows(self) -> Columns:
        """Read rows for a rank that has none to repeat."""
        deal = replace(self._deal(), start=0, batch_size=1, policy="join")
        with closing(self._pieces(deal)) as pieces:
            return next(columns for columns in pieces if rows_of(columns))

    def _pieces(self, deal: Deal) -> Generator[Columns]:
        """Yield the rank's rows from `deal.start` on in pieces of any length, reading ahead of them."""
        asked = self._reading
        order = self._order.epoch(self._epoch)
        groups, reader = self._source.row_groups, self._reader
        transform, known = asked.transform, self._known
        self._known = {}

        def read(group: RowGroup) -> Columns:
            table = known.pop(group, None)
            return reader(group) if table is None else reader.convert(group, table)

        with ExitStack() as stack:
            if asked.processes:
                act = ReadingProcesses(partial(_read_transformed, reader, transform), asked.workers)
                stack.callback(act.close)
                transform = None
            pool: ReadPool[RowGroup, Columns] = ReadPool(act if asked.processes else read, max(1, asked.workers))
            stack.callback(pool.close)
            rounds = read_rounds(
                order,
                deal,
                self._rank,
                read=lambda number: pool.submit(groups[number]),
                ahead=asked.ahead,
                timeout=asked.timeout,
            )
            made = (transformed(transform, columns) for columns in rounds)
            # In file order nothing has to be put together, so a thread for it would only hand on what others read.
            with_thread = asked.workers and (asked.shuffle or transform is not None)
            yield from read_ahead(made, 1) if with_thread else made


def _read_transformed(reader: Reader, transform: Transform | None, group: RowGroup) -> Columns:
    return transformed(transform, reader(group))


def transformed(transform: Transform | None, columns: Columns) -> Columns:
    """Apply a user's transform, if there is one; raises `DataError` when it has changed the number of rows."""
    if transform is None or not columns:
        return columns
    made = transform(columns)
    for name, values in made.items():
        if len(values) != rows_of(columns):
            raise DataError(
                name,
                f"the transform made {len(values)} rows of {rows_of(columns)}; it may not change their number",
            )
    return made
