"""Loader of one rank's batches: every row once per epoch, equal steps on all ranks, resumable."""

import logging
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace

import pyarrow as pa

from farandole.data.formats.columns import check_names, columns_to_read
from farandole.data.formats.fields import lengths_in_rows, plan_fields
from farandole.data.formats.row_groups import RowGroup, fingerprint, rows_in
from farandole.data.formats.shard_source import is_own
from farandole.data.formats.source import LEAST_WINDOW, Source
from farandole.data.loading.agreement import Gather, agree, check_places, in_step, together
from farandole.data.loading.batches import Batch, BatchBuffer, empty_like, fill_up, joined, rows_of
from farandole.data.loading.meter import Meter, Metrics
from farandole.data.loading.order import MIXED, Order, choose_lanes, choose_window
from farandole.data.loading.plans import GlobalPlan, LocalPlan, Policy
from farandole.data.loading.reading import ROUND_BYTES, Reading, checked_meanwhile, read_pieces, transformed
from farandole.data.loading.rounds import Columns, Piece, RowGroupReader
from farandole.data.loading.settings import check_loader, check_source
from farandole.data.loading.state import MOVED, NO_SEED, NO_VERSION, State
from farandole.data.tables.versions import at_version, same_version
from farandole.errors import ConfigError, DataError, ReaderError

log = logging.getLogger(__name__)

# Limit for the default number of lanes: the bytes of one row group of each lane.
LANES_BYTES = 512 << 20
# Row groups per lane at least. More in remote files, where reading a row group twice costs a request.
PER_LANE, FAR_PER_LANE = 8, 16

_LOCAL = (
    "%d rows are shuffled together, fewer than the %d of a row group, so rows that are sorted mix badly; set a larger "
    "shuffle_window, raise shuffle_bytes (%d), or write smaller row groups"
)
SMALLER = "take a smaller batch_size, or policy='join'"


class Loader:
    """Batches for rank `rank` of `size`. Each `for batch in loader` yields the rest of an epoch; then the next begins.

    `policy` decides about the rows that do not fill a last step: "drop" leaves them out, "pad" fills batches up by
    repeating rows, "join" shares them out, so that batches of the last step are smaller, or empty.
    `batch_size` is a rank's, or with `of_all_ranks` that of all ranks together, whose batches then differ by a row.
    With `gather`, an all-gather of objects, making a loader, starting an epoch and each step are collective. If ranks
    see different data, or one rank cannot read it, all ranks raise with the text of the failure, before any of them has
    that step's batch. With `alone`, only making the loader is collective: each rank takes batches at its own pace and
    raises only its own errors. Iterating blocks while no row is ready.
    `seed` replaces the seed of `reading`, which is 0 by default. Raises `DataError` for columns and rows, `SourceError`
    for files, `ConfigError` for settings, `ReaderError` in an iterator that goes on after another one, or in a fork.
    """

    _plan: GlobalPlan | LocalPlan
    _order: Order
    _row_bytes: int
    _fingerprint: int  # identifies the data in a state

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        policy: Policy,
        of_all_ranks: bool = False,
        columns: Sequence[str] | None = None,
        rank: int = 0,
        size: int = 1,
        reading: Reading | None = None,
        gather: Gather | None = None,
        alone: bool = False,
        report: Callable[[Metrics], None] | None = None,
        seed: int | None = None,
    ) -> None:
        check_source(source)
        check_loader(batch_size, policy, columns, rank, size, of_all_ranks)
        self._source, self._rank, self._size = source, rank, size
        self._step_rows = batch_size if of_all_ranks else 0
        self._batch_size = -(-batch_size // size) if of_all_ranks else batch_size
        self._reading, self._report = reading or Reading(), report
        if seed is not None:
            self._reading = replace(self._reading, seed=seed)
        self._policy, self._asked_columns = policy, columns
        self._known: dict[RowGroup, pa.Table] = {}  # read by `_look`; the first epoch uses it
        self._none: Columns | None = None
        self._prepare(gather)
        self._gather = None if alone else gather
        self._epoch = self._position = self.moves = 0  # rows visited, in `FeedLoader` steps; loaded states
        self._meter: Meter | None = None
        log.info("%s", self)

    @property
    def kinds(self) -> dict[str, str]:
        """Descriptions of the columns' types, for logs: {"pixels": "float[64]"}."""
        return {field.name: field.kind for field in self._reader.fields}

    @property
    def batch_rows(self) -> int | None:
        """The number of rows of each batch; None if a batch may have fewer."""
        return None if self._policy == "join" else self._batch_size

    @property
    def transforms(self) -> bool:
        """Return whether a transform makes the columns of batches."""
        return self._reading.transform is not None

    def sample(self) -> Columns:
        """Return columns of the types and shapes of batches, without rows.

        With a transform, returns the transformed rows of this rank's first row group instead. Reading it is collective
        if steps are."""
        return together(self._few_rows, self._gather) if self.transforms else self._no_rows

    @property
    def rows(self) -> int:
        """The number of rows of an epoch, in `GrowingLoader` of a generation, on all ranks together."""
        return self._plan.total

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to; in `GrowingLoader`, the number of the generation."""
        return self._epoch

    @property
    def metrics(self) -> Metrics | None:
        """Speed and waiting of the latest epoch, which may still be running; None before the first."""
        return None if self._meter is None else self._meter.metrics

    def __len__(self) -> int:
        """Return the number of steps that are left in this epoch, the same on every rank."""
        return self._steps_left

    @property
    def _steps_left(self) -> int:
        plan, first = self._plan.at(self._position)
        return plan.steps - first

    def __str__(self) -> str:
        plan, order = self._plan.at(self._position)[0], self._order
        assert isinstance(plan, GlobalPlan)
        left = plan.rows - plan.after(plan.steps - 1) if plan.steps else plan.rows - plan.start
        return (
            f"{order.rows} rows in {len(order.row_groups)} row groups ({self._kinds_text()}); {plan.steps} steps of "
            f"{self._size} x {self._batch_size} rows, the last by '{self._policy}', {left} rows left out; "
            f"{self._order_text()}"
        )

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches that are left in this epoch; the next iteration begins the next epoch."""
        far = self._source.in_flight > 0
        if not far:
            together(self._source.check, self._gather)
        meter = self._meter = Meter(self._epoch)
        steps, plan = self._steps_left, self._plan
        batches = self._batches(meter)
        # Rank 0 lists a store for all ranks. Reading checks each range, too, so first requests need not wait for that.
        if far and (self._gather is None or self._rank == 0):
            batches = checked_meanwhile(batches, self._source.check)
        with closing(batches):
            for batch in in_step(batches, self._gather, self._row_bytes * self._batch_size):
                meter.steps += 1
                meter.rows += batch.rows
                # Moved before the batch is yielded: a state that is saved while it is used counts it as done.
                self._position += plan.stride
                if meter.steps == steps:
                    meter.stop()
                    self._finish(meter.metrics)
                place = id(plan), self._epoch, self._position, os.getpid()  # a fork has none of the threads that read
                yield batch
                if meter.steps < steps and place != (id(self._plan), self._epoch, self._position, os.getpid()):
                    raise ReaderError(MOVED)

    def set_epoch(self, epoch: int) -> None:
        """Go to the first row of epoch `epoch`; keep the position if it is the current epoch."""
        if epoch < 0:
            raise ConfigError("epoch", f"must be >= 0, got {epoch}")
        if epoch != self._epoch:
            self._epoch, self._position = epoch, 0

    def shuffle_within(self, rows: int) -> None:
        """Shuffle at least `rows` rows of each rank together; in file order if row groups are not shuffled otherwise.

        An epoch that has begun keeps its order, and this call then has no effect."""
        order, window = self._order, -(-rows * self._size // self._order.lanes)
        if self._position or (order.seed is not None and window <= order.window):
            return
        permuted = order.permuted and order.seed is not None
        self._reading = replace(self._reading, shuffle=True)
        self._order = replace(
            order, window=window, seed=self._seed if order.seed is None else order.seed, permuted=permuted
        )

    def state_dict(self) -> dict[str, int]:
        """Return the state after the last yielded batch; the same on every rank."""
        state = State(
            epoch=self._epoch,
            visited=self._position,
            seed=NO_SEED if self._order.seed is None else self._seed,
            lanes=self._order.lanes,
            window=self._order.window,
            fingerprint=self._fingerprint,
            version=self._source.version,
            permuted=int(self._order.permuted),
        )
        return asdict(state)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from the state of another loader over the same data, with any number of ranks and any batch size.

        Uses the order of the state: seed, lanes, window, and whether row groups are permuted. If the state has another
        version of the table, all ranks open that one together. Raises `ConfigError` for the state of other data,
        `SourceError` for a version that is gone."""
        found = State.of(state)
        if found.version != self._source.version:
            self._source = together(lambda: at_version(self._source, found.version), self._gather)
            self._prepare(self._gather)
        if found.fingerprint != self._fingerprint:
            problem = (
                "the row groups of this data have other sizes, or another condition chooses rows"
                if found.version == NO_VERSION
                else "files or columns of this table differ, or the condition that chooses rows"
            )
            raise ConfigError("state", f"belongs to other data: {problem}")
        if found.epoch < 0 or not 0 <= found.visited <= self.rows:
            raise ConfigError("state", f"has visited {found.visited} of {self.rows} rows of epoch {found.epoch}")
        seed = None if found.seed == NO_SEED else found.seed
        self._order = replace(
            self._order, lanes=found.lanes, window=found.window, seed=seed, permuted=bool(found.permuted)
        )
        self._plan, self._seed = self._plan_steps(self._order), found.seed
        self._epoch, self._position, self.moves = found.epoch, found.visited, self.moves + 1
        if not self._steps_left:
            self._epoch, self._position = found.epoch + 1, 0

    def resize(self, rank: int, size: int) -> None:
        """Share out the rows that no rank has visited yet over `size` ranks, of which this one is `rank`.

        All ranks must call it after the same step, and iterate anew. An elastic state does so. Its loaders are made
        without `gather`, because new ranks make theirs while others train."""
        check_loader(self._batch_size, self._policy, None, rank, size)
        self._rank, self._size = rank, size
        self._batch_size = -(-self._step_rows // size) or self._batch_size
        self.load_state_dict(self.state_dict())

    def _prepare(self, gather: Gather | None) -> None:
        """Plan columns, order and steps; collective with `gather`."""
        if self._size > 1 and is_own(self._source):
            raise ConfigError("source", "has the rows of this rank alone, which others cannot read; use FeedLoader")
        source = self._source = same_version(self._source, gather)
        nbytes = together(self._look, gather)
        asked, rows = self._reading, rows_in(self._source.row_groups)
        self._row_bytes = max(1, nbytes // max(1, int(rows.sum())))
        # In file order there is one lane per rank; a shuffled order does not depend on the number of ranks.
        per_lane = FAR_PER_LANE if source.in_flight else PER_LANE
        in_order = not asked.shuffle or not asked.shuffle_row_groups
        most_bytes = max(LANES_BYTES, asked.shuffle_bytes, (asked.shuffle_window or 0) * self._row_bytes)
        chosen = self._size if in_order else choose_lanes(rows, nbytes, most_bytes=most_bytes, per_lane=per_lane)
        lanes = asked.lanes or chosen
        mixed = asked.shuffle and source.least_window >= LEAST_WINDOW
        usual_bytes = ROUND_BYTES * self._size if in_order else ROUND_BYTES
        self._order = order = self._make_order(lanes, usual_bytes, asked.shuffle_bytes if mixed else 0, asked.seed)
        if mixed and lanes < MIXED and order.round_rows < rows.max(initial=0) and self._rank == 0:
            log.warning(_LOCAL, order.round_rows, rows.max(), asked.shuffle_bytes)
        self._fingerprint = fingerprint(source.row_groups, of_table=source.version != NO_VERSION, choice=source.choice)
        agree("the data", f"{len(rows)} row groups of {rows.sum()} rows, fingerprint {self._fingerprint:x}", gather)
        agree("the columns", self._kinds_text(), gather)
        agree("the loader", f"{self._settings()}, {self._order_text()}", gather)
        check_places(self._rank, self._size, gather)
        self._plan = self._plan_steps(order)
        if len(rows) < self._size and self._rank == 0:
            text = "%d row groups for %d ranks: several ranks read each of them; write smaller row groups to read less"
            log.warning(text, len(rows), self._size)

    def _look(self) -> int:
        """Plan the columns, and return their bytes; reads the first row group if it decides the lengths of arrays."""
        source = self._source
        self._columns = columns_to_read(source.schema, self._asked_columns, warn=self._rank == 0)
        if not self._columns:
            raise ConfigError("columns", "names no column that is to be read")
        first = next((group for group in source.row_groups if group.rows), None)
        if first is None:
            raise DataError("", "there are no rows")
        check_names(source.schema, self._columns)
        nbytes = source.nbytes(self._columns)
        needed = any(lengths_in_rows(source.schema.field(name).type) for name in self._columns)
        first_rows = source.read(first, self._columns) if needed else pa.Table.from_batches([], source.schema)
        self._known = {first: first_rows} if needed else {}
        self._plan_columns(first_rows)
        return nbytes

    def _plan_columns(self, few_rows: pa.Table) -> None:
        options, schema = self._reading.fields, self._source.schema
        fields = plan_fields(schema, self._columns, few_rows, options, transforms=self.transforms)
        none = few_rows.slice(0, 0)
        self._no_rows: Columns = {field.name: field.values(none[field.name]) for field in fields}
        self._reader = RowGroupReader(self._source, tuple(fields))

    def _make_order(self, lanes: int, usual_bytes: int, most_bytes: int, seed: int) -> Order:
        """Return the order; the two numbers of bytes are those of `choose_window`."""
        asked, rows = self._reading, rows_in(self._source.row_groups)
        self._seed = asked.seed
        if asked.window or asked.shuffle_window:
            window = asked.window or -(-(asked.shuffle_window or 0) // lanes)
        elif asked.shuffle and rows.max(initial=0) <= 1:
            window = 1  # the order shuffles row groups; a larger window would only delay the first batch
        else:
            chosen = choose_window(rows, lanes, self._row_bytes, usual_bytes=usual_bytes, most_bytes=most_bytes)
            window = max(self._source.least_window, chosen)
        return Order(
            row_groups=rows,
            lanes=lanes,
            window=window,
            seed=seed if asked.shuffle else None,
            permuted=asked.shuffle_row_groups,
        )

    def _plan_steps(self, order: Order) -> GlobalPlan:
        plan = GlobalPlan(
            rows=order.rows,
            lanes=order.lanes,
            batch_size=self._batch_size,
            size=self._size,
            start=0,
            policy=self._policy,
            of_all_ranks=self._step_rows,
        )
        if not plan.steps:
            raise DataError("", f"{plan.rows} rows make no step of {plan.step_rows}; {SMALLER}")
        if self._policy == "pad" and plan.rows < self._size:
            raise DataError("", f"{plan.total} rows for {self._size} ranks: some have none to repeat")
        return plan

    def _settings(self) -> str:
        return f"{self._size} ranks, batch_size {self._batch_size}, policy {self._policy}"

    def _kinds_text(self) -> str:
        return ", ".join(f"{name} {kind}" for name, kind in self.kinds.items())

    def _order_text(self) -> str:
        order = self._order
        seed_text = "not shuffled" if order.seed is None else f"seed {self._seed}"
        kept = "" if order.permuted else ", row groups in their order"
        return f"{seed_text}{kept}, {order.lanes} lanes, windows of {order.window} rows"

    def _finish(self, metrics: Metrics) -> None:
        self._epoch, self._position = self._epoch + 1, 0
        log.info("rank %d, %s", self._rank, metrics)
        if self._report is not None:
            self._report(metrics)

    def _batches(self, meter: Meter) -> Generator[Batch]:
        plan, first = self._plan.at(self._position)
        pieces = self._stream(plan, first)
        with closing(pieces):
            take, size, full = BatchBuffer(pieces, meter).take, self._batch_size, plan.full_steps
            for step in range(first, plan.steps):
                if step < full:
                    batch = Batch(take(size))
                    batch.rows = size
                else:
                    own = plan.batch(self._rank, step)
                    count = own if self._policy == "join" else size
                    columns = self._fill(take, own, count)
                    batch = Batch.of(columns, count, plan.weight(self._rank, step), count - own)
                yield batch

    def _stream(self, plan: GlobalPlan | LocalPlan, first: int) -> Generator[Piece]:
        """Yield the rank's rows from step `first` of the plan on, in pieces of any length."""
        assert isinstance(plan, GlobalPlan)
        return self._pieces(plan, self._rank)

    def _pieces(self, plan: GlobalPlan, rank: int) -> Generator[Piece]:
        known, self._known = self._known, {}
        order = self._order.epoch(self._epoch)
        return read_pieces(self._reader, self._reading, order, plan, rank, self._row_bytes, known, self._no_rows)

    def _fill(self, take: Callable[[int], Columns], own: int, count: int) -> Columns:
        """Return `own` rows, and repeated ones up to `count` rows."""
        columns = take(own) if own else self._empty()
        return columns if own == count else fill_up(columns, columns if own else self._first_rows(), count)

    def _first_rows(self) -> Columns:
        """Read rows to repeat for a rank that has none in the last step."""
        assert isinstance(self._plan, GlobalPlan)
        plan = replace(self._plan, batch_size=1, policy="join", of_all_ranks=0)
        with closing(self._pieces(plan, self._rank)) as pieces:
            return joined(next(piece for piece in pieces if rows_of(piece)))

    def _few_rows(self) -> Columns:
        first = next((group for group in self._source.row_groups if group.rows), None)
        piece: Piece = dict(self._no_rows) if first is None else self._reader.read(first)
        return joined(transformed(piece, self._reading.transform, self._no_rows))

    def _empty(self) -> Columns:
        if self._none is None:
            # A transform must be given rows to show the types of its result.
            self._none = self._few_rows() if self.transforms else self._no_rows
        return empty_like(self._none)
