"""Rounds of a rank's rows in an epoch, read before they are used."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from farandole.data import pool
from farandole.data.fields import Field
from farandole.data.order import EpochOrder, Extent
from farandole.data.plans import GlobalPlan
from farandole.data.row_groups import RowGroup, Source
from farandole.data.values import LooseRows, Values, ValuesOrLoose, gather_rows, own_rows
from farandole.errors import DataError, SourceError

__all__ = ["Columns", "Piece", "Reader", "Transform", "read_ahead", "read_rounds"]

Columns: TypeAlias = dict[str, Values]
Piece: TypeAlias = dict[str, ValuesOrLoose]  # of a batch; `LooseRows` are copied to the batch
Transform: TypeAlias = Callable[[Columns], Columns]


@dataclass(frozen=True, slots=True)
class Reader:
    """Reader and converter of single row groups; can be pickled for another process."""

    source: Source
    fields: tuple[Field, ...]

    def __call__(self, row_group: RowGroup) -> Piece:
        """Return all columns of the row group; raises `DataError` and `SourceError` that name it."""
        columns: Callable[[RowGroup, Sequence[Field]], Piece] | None = getattr(self.source, "columns", None)
        if columns is None:
            return self.convert(row_group, self.source.read(row_group, [field.name for field in self.fields]))
        with self._naming(row_group):
            made = columns(row_group, self.fields)
        self._check(row_group, len(next(iter(made.values()))))
        return made

    def convert(self, row_group: RowGroup, table: pa.Table) -> Piece:
        """Convert a table that was read from the row group; raises as `__call__` does."""
        self._check(row_group, table.num_rows)
        with self._naming(row_group):
            return {field.name: field.values(table[field.name]) for field in self.fields}

    def _check(self, row_group: RowGroup, rows: int) -> None:
        if rows != row_group.rows:
            raise SourceError(
                row_group.file.path,
                f"row group {row_group.number} has {rows} rows, not the {row_group.rows} of the plan",
            )

    @contextmanager
    def _naming(self, row_group: RowGroup) -> Iterator[None]:
        try:
            yield
        except DataError as error:
            raise DataError(error.column, f"{row_group}: {error.problem}") from error


@dataclass(frozen=True, slots=True)
class _Window:
    """A lane's rows of one round: their extents, and the futures of their row groups."""

    lane: int
    pieces: list[tuple[Extent, "Future[Piece]"]]


def read_rounds(
    order: EpochOrder,
    plan: GlobalPlan,
    rank: int,
    *,
    read: Callable[[int], "Future[Piece]"],
    ahead: int,
    most_ahead: int,
    hungry: Callable[[], bool],
    timeout: float,
) -> Iterator[Piece]:
    """Yield the rank's rows of each round from `plan.start` on, in the epoch's order, in one or several pieces.

    `read` starts to read a row group and returns its future. The row groups of `ahead` rounds are started before they
    are needed. After the first round, which must not wait for later ones, up to `most_ahead` rounds are started while
    `hungry()` is true. A lane drops a row group when its last row there has been yielded. Raises `SourceError` if a row
    group is not read within `timeout` seconds.
    """
    whole = order.order
    lanes = plan.lanes_of(rank)
    held: dict[int, dict[int, Future[Piece]]] = {lane: {} for lane in lanes}
    waiting: deque[tuple[int, list[_Window]]] = deque()
    scratch: dict[str, NDArray[Any]] = {}  # reused: allocating memory costs more than writing to it
    first = plan.start // whole.round_rows
    last = -(-plan.after(plan.steps - 1) // whole.round_rows) if plan.steps else first
    begun = first
    for turn in range(first, last):
        while begun < last and (begun <= turn + ahead or (first < turn and len(waiting) < most_ahead and hungry())):
            waiting.append((begun, [_start(order, lane, begun, held[lane], read) for lane in lanes]))
            begun += 1
        number, windows = waiting.popleft()
        yield from _assemble(order, plan, rank, number, windows, timeout, scratch)


def _start(
    order: EpochOrder,
    lane: int,
    number: int,
    held: dict[int, "Future[Piece]"],
    read: Callable[[int], "Future[Piece]"],
) -> _Window:
    pieces = []
    for extent in order.extents(lane, number):
        if extent.row_group not in held:
            held[extent.row_group] = read(extent.row_group)
        pieces.append((extent, held[extent.row_group]))
    # Only the window's last row group may have rows in the lane's next window.
    for done in [group for group in held if not pieces or group != pieces[-1][0].row_group]:
        del held[done]
    return _Window(lane, pieces)


def _assemble(
    order: EpochOrder,
    plan: GlobalPlan,
    rank: int,
    number: int,
    windows: list[_Window],
    timeout: float,
    scratch: dict[str, NDArray[Any]],
) -> Iterator[Piece]:
    rows = _rows_in_pool(order, plan, rank, number, windows)
    deadline = time.monotonic() + timeout
    asked = [piece for window in windows for piece in window.pieces]
    found = ((extent, _result(future, deadline, timeout)) for extent, future in asked)
    if isinstance(rows, slice):
        # Slices of row groups: no rows are copied, and each row group is awaited only when its rows are due.
        for extent, columns in _within(found, rows):
            yield {name: _own(values[extent.first : extent.last]) for name, values in columns.items()}
        return
    # One waiting for all row groups: waking after each would take Python's lock from the threads that decode.
    ended, _ = wait((future for _, future in asked), timeout, FIRST_EXCEPTION)
    for _, future in asked:
        if future in ended:
            future.result()  # raises the error of the first that failed, also if an earlier one has not come
    if pieces := list(found):
        yield {
            name: gather_rows([columns[name][each.first : each.last] for each, columns in pieces], rows, scratch, name)
            for name in pieces[0][1]
        }


def _own(values: ValuesOrLoose) -> ValuesOrLoose:
    return values if isinstance(values, LooseRows) else own_rows(values)


def _within(pieces: Iterable[tuple[Extent, Piece]], rows: slice) -> Iterator[tuple[Extent, Piece]]:
    """Yield the parts of consecutive pieces that are in the range `rows` of all their rows."""
    passed = 0
    for extent, columns in pieces:
        first = extent.first + max(0, rows.start - passed)
        last = min(extent.last, extent.first + rows.stop - passed)
        if first < last:
            yield Extent(extent.row_group, first, last), columns
        passed += extent.last - extent.first


def _result(future: "Future[Piece]", deadline: float, timeout: float) -> Piece:
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError as error:
        raise SourceError("the data", f"a row group has not come within {timeout:g} s; raise the timeout") from error


def _rows_in_pool(
    order: EpochOrder, plan: GlobalPlan, rank: int, number: int, windows: list[_Window]
) -> NDArray[np.int64] | slice:
    """Return the indices of the rank's rows of this round among the rows of all `windows`, laid end to end."""
    whole = order.order
    begin, end = number * whole.round_rows, (number + 1) * whole.round_rows
    starts = np.zeros(whole.lanes, np.int64)
    places, passed = [], 0
    for window in windows:
        starts[window.lane] = passed
        shuffled = order.shuffled(window.lane, number)
        shuffled += passed
        places.append(shuffled)
        passed += len(shuffled)
    if whole.seed is not None and end <= whole.rows and plan.takes_whole_lanes(begin, end):
        # The usual case, where lanes take turns; a fast form of the general case below.
        return np.stack(places, axis=1).reshape(-1)
    positions = plan.stream(rank, begin, end)
    in_windows = starts[positions % whole.lanes] + positions // whole.lanes - number * whole.window
    if whole.seed is None and len(windows) == 1:
        # In file order, if the rank takes consecutive rows of a single lane: nothing to gather.
        first = int(in_windows[0]) if len(in_windows) else 0
        if len(in_windows) and int(in_windows[-1]) - first + 1 == len(in_windows):
            return slice(first, first + len(in_windows))
    rows: NDArray[np.int64] = np.concatenate([np.arange(0), *places])[in_windows]
    return rows


def read_ahead(rounds: Iterator[Piece], depth: int, cancel: Callable[[], None]) -> Iterator[Piece]:
    """Yield the rounds; a thread makes up to `depth` of them in advance.

    The thread ends with the last round, with an error, which is raised here, and when this generator is closed. Closing
    calls `cancel`, which must end the thread's waiting for a row group, and waits up to `pool.PATIENCE` seconds for the
    thread, which may be in a function of the user."""
    ready: deque[Piece] = deque()
    changed = threading.Condition()
    ended: list[BaseException | None] = []
    closed = threading.Event()

    def work() -> None:
        failure: BaseException | None = None
        try:
            for columns in rounds:
                with changed:
                    changed.wait_for(lambda: closed.is_set() or len(ready) < depth)
                    if closed.is_set():
                        break
                    ready.append(columns)
                    changed.notify_all()
        except BaseException as error:
            failure = error  # raised by the generator
        with changed:
            ended.append(failure)
            changed.notify_all()

    thread = threading.Thread(target=work, name="farandole-rounds", daemon=True)
    thread.start()
    try:
        while True:
            with changed:
                # Without a deadline: reading a row group has one, and the thread always reports its end.
                changed.wait_for(lambda: ready or ended)
                if not ready:
                    break
                columns = ready.popleft()
                changed.notify_all()
            yield columns
        if ended[0] is not None:
            raise ended[0]
    finally:
        with changed:
            closed.set()
            changed.notify_all()
        cancel()
        thread.join(pool.PATIENCE)
