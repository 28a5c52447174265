"""Rounds of a rank's rows in an epoch, read before they are used."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from farandole.data.formats.fields import Field
from farandole.data.formats.row_groups import RowGroup
from farandole.data.formats.source import Source, convert
from farandole.data.loading import pool
from farandole.data.loading.order import EpochOrder, Extent
from farandole.data.loading.plans import GlobalPlan
from farandole.data.loading.pool import Pending, attempt
from farandole.data.loading.row_memory import RowMemory
from farandole.data.loading.values import Array, LooseRows, Values, ValuesOrLoose, cut_down, gather_rows, own_rows
from farandole.errors import DataError, SourceError

T = TypeVar("T")

# Pieces from which on the rows of a round are copied piece by piece. At once is faster, and takes twice the memory.
_PIECES = 16

Columns: TypeAlias = dict[str, Values]
Piece: TypeAlias = dict[str, ValuesOrLoose]  # of a batch; `LooseRows` are copied to the batch
Transform: TypeAlias = Callable[[Columns], Columns]
# A lane's rows of one round: their extents, and the row groups, which may be still to come.
_Window: TypeAlias = list[tuple[Extent, Pending[Piece]]]


@dataclass(frozen=True, slots=True)
class RowGroupReader:
    """Reader and converter of single row groups; can be pickled for another process."""

    source: Source
    fields: tuple[Field, ...]

    def each(
        self,
        numbers: Sequence[int],
        *,
        then: Callable[[Piece], Piece] = lambda piece: piece,
        memory: RowMemory | None = None,
        known: dict[RowGroup, pa.Table] | None = None,
    ) -> Iterator[Piece | BaseException]:
        """Yield the result of `then` for all columns of each row group, or an error, mostly one that names it.

        The columns are in `memory`, if it is given. Row groups in `known` were read before: each is taken from there
        once, and not read again."""
        groups = self.source.row_groups
        row_groups = [groups[number] for number in numbers]
        contents = attempt(self.source.contents, row_groups)
        if isinstance(contents, BaseException):
            contents = [None] * len(row_groups)  # reading the row group by itself raises the error
        for row_group, content in zip(row_groups, contents, strict=True):
            table = known.pop(row_group, None) if known else None
            piece = attempt(self.read, row_group, content, table, memory)
            yield piece if isinstance(piece, BaseException) else attempt(then, piece)

    def read(
        self,
        row_group: RowGroup,
        content: bytes | None = None,
        table: pa.Table | None = None,
        memory: RowMemory | None = None,
    ) -> Piece:
        """Return all columns of a row group, from `content` or `table` if given; raises what `each` yields."""
        source, fields, memory = self.source, self.fields, memory or RowMemory()
        try:
            if table is None:
                parts = source.parts(row_group, fields, content)
            else:
                # The table has a chunk for each part in which it was read.
                parts = (convert(pa.Table.from_batches([batch]), fields) for batch in table.to_batches())
            made = memory.join(parts, row_group.rows)
            if made is None:  # types of parts differ, which only shows here
                made = memory.keep(source.columns(row_group, fields) if table is None else convert(table, fields))
        except DataError as error:
            raise DataError(error.column, f"{row_group}: {error.problem}") from error
        except pa.ArrowException as error:
            raise DataError("", f"{row_group}: {error}") from error
        rows = len(next(iter(made.values())))
        if rows != row_group.rows:
            problem = f"row group {row_group.number} has {rows} rows, not the {row_group.rows} of the plan"
            raise SourceError(row_group.file.path, problem)
        return made


def read_rounds(
    order: EpochOrder,
    plan: GlobalPlan,
    rank: int,
    *,
    read: Callable[[int], Pending[Piece]],
    wait: Callable[[Sequence[Pending[Piece]], float], bool],
    ahead: int,
    most_ahead: int,
    idle: Callable[[], bool],
    timeout: float,
    most_rows: int,
) -> Iterator[Piece]:
    """Yield the rank's rows of each round from `plan.start` on, in the epoch's order, in one or several pieces.

    If a round's shuffled rows are many more than `most_rows`, they are copied to pieces of so many.
    `read` starts to read a row group, and `wait` is that of `ReadPool`. The row groups of `ahead` rounds are started
    before they are needed. After the first round, which must not wait for later ones, up to `most_ahead` rounds are
    started while `idle()` is true. A lane drops a row group when its last row there has been yielded. Raises
    `SourceError` if a row group is not read within `timeout` seconds.
    """
    whole = order.order
    lanes = plan.lanes_of(rank)
    held: dict[int, dict[int, Pending[Piece]]] = {lane: {} for lane in lanes}
    waiting: deque[tuple[int, list[_Window]]] = deque()  # of each round, the windows of `lanes`
    scratch: dict[str, Array] = {}  # reused: allocating memory costs more than writing to it
    first = plan.start // whole.round_rows
    last = -(-plan.after(plan.steps - 1) // whole.round_rows) if plan.steps else first
    begun = first
    for turn in range(first, last):
        while begun < last and (begun <= turn + ahead or (first < turn and len(waiting) < most_ahead and idle())):
            waiting.append((begun, [_start(order, lane, begun, held[lane], read) for lane in lanes]))
            begun += 1
        number, windows = waiting.popleft()
        wait_for = partial(_wait_for, wait, timeout, time.monotonic() + timeout)
        rows = _rows_in_pool(order, plan, rank, number, lanes)
        asked = [piece for window in windows for piece in window]
        del windows
        if isinstance(rows, slice):
            yield from _sliced(asked, rows, wait_for)
        else:
            yield from _gathered(asked, rows, wait_for, scratch, most_rows)
        del asked


def _start(
    order: EpochOrder,
    lane: int,
    number: int,
    held: dict[int, Pending[Piece]],
    read: Callable[[int], Pending[Piece]],
) -> _Window:
    pieces = []
    for extent in order.extents(lane, number):
        if extent.row_group not in held:
            held[extent.row_group] = read(extent.row_group)
        pieces.append((extent, held[extent.row_group]))
    # Only the window's last row group may have rows in the lane's next window.
    for done in [group for group in held if not pieces or group != pieces[-1][0].row_group]:
        del held[done]
    return pieces


def _sliced(asked: _Window, rows: slice, wait_for: Callable[[Sequence[Pending[Piece]]], None]) -> Iterator[Piece]:
    """Yield slices of row groups: no rows are copied, and each row group is awaited only when its rows are due."""
    passed = 0
    for extent, pending in asked:
        cut = slice(extent.first + max(0, rows.start - passed), min(extent.last, extent.first + rows.stop - passed))
        passed += extent.last - extent.first
        if cut.start < cut.stop:
            wait_for([pending])
            yield {
                name: values[cut] if isinstance(values, LooseRows) else own_rows(values[cut])
                for name, values in pending.result().items()
            }


def _gathered(
    asked: _Window,
    rows: NDArray[np.int64],
    wait_for: Callable[[Sequence[Pending[Piece]]], None],
    scratch: dict[str, Array],
    most_rows: int,
) -> Iterator[Piece]:
    """Yield copies of these rows, all at once, or `most_rows` at a time if they are many more."""
    # One waiting for all row groups: waking after each would take Python's lock from the threads that decode.
    wait_for([pending for _, pending in asked])
    if not asked:
        return
    pieces = [(extent, pending.result()) for extent, pending in asked]
    for _, columns in pieces[1:]:
        check_same_columns(pieces[0][1], columns)
    parts = {name: [columns[name][each.first : each.last] for each, columns in pieces] for name in pieces[0][1]}
    if len(rows) <= _PIECES * most_rows:
        yield {name: gather_rows(values, rows, scratch, name) for name, values in parts.items()}
        return
    for first in range(0, len(rows), most_rows):
        some = rows[first : first + most_rows]
        standing = np.argsort(some)
        places = np.empty_like(standing)
        places[standing] = np.arange(len(some))
        yield {
            name: gather_rows(cut_down(values, some[standing]), places, scratch, name) for name, values in parts.items()
        }


def check_same_columns(one: Piece, other: Piece) -> None:
    """Raise `DataError` for a column that only one of two pieces has: a transform may make others for other rows."""
    for name in one.keys() ^ other.keys():
        raise DataError(name, "is among the columns of some rows only; return the same columns for all rows")


def _wait_for(
    wait: Callable[[Sequence[Pending[Piece]], float], bool],
    timeout: float,
    deadline: float,
    pending: Sequence[Pending[Piece]],
) -> None:
    """Wait for row groups; raises the error of one that failed, and `SourceError` at the deadline."""
    if not wait(pending, max(0.0, deadline - time.monotonic())):
        raise SourceError("the data", f"a row group has not come within {timeout:g} s; raise the timeout")


def _rows_in_pool(
    order: EpochOrder, plan: GlobalPlan, rank: int, number: int, lanes: Sequence[int]
) -> NDArray[np.int64] | slice:
    """Return the indices of the rank's rows of this round among those of its windows, laid end to end."""
    whole = order.order
    begin, end = number * whole.round_rows, (number + 1) * whole.round_rows
    starts = np.zeros(whole.lanes, np.int64)
    places, passed = [], 0
    for lane in lanes:
        starts[lane] = passed
        shuffled = order.shuffled(lane, number)
        shuffled += passed
        places.append(shuffled)
        passed += len(shuffled)
    if whole.seed is not None and end <= whole.rows and plan.takes_whole_lanes(begin, end):
        # The usual case, where lanes take turns; a fast form of the general case below.
        return np.stack(places, axis=1).reshape(-1)
    positions = plan.stream(rank, begin, end)
    in_windows = starts[positions % whole.lanes] + positions // whole.lanes - number * whole.window
    if whole.seed is None and len(lanes) == 1:
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
    room = threading.Semaphore(depth)
    ready: SimpleQueue[Piece | BaseException | None] = SimpleQueue()
    closed = threading.Event()

    def work() -> None:
        failure: BaseException | None = None
        try:
            for columns in rounds:
                room.acquire()
                if closed.is_set():
                    break
                ready.put(columns)
        except BaseException as error:
            failure = error  # raised by the generator
        ready.put(failure)

    thread = threading.Thread(target=work, name="farandole-rounds", daemon=True)
    thread.start()
    try:
        # Without a deadline: reading a row group has one, and the thread always reports its end.
        while isinstance(item := ready.get(), dict):
            room.release()
            yield item
        if item is not None:
            raise item
    finally:
        closed.set()
        room.release()
        cancel()
        thread.join(pool.PATIENCE)
