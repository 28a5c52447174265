"""Dealing of rows to ranks, in the task that reads a partition of a DataFrame."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from farandole.spark.rows.disks import no_room
from farandole.spark.rows.exchange.access import Borrowed, KeeperPlan, Kept

SHARE_SCHEMA = (
    "key int, rank int, number int, partition int, turn int, keeper string, file int, at long, length long, rows long"
)
_ARROW_TYPES = {"int": pa.int32(), "long": pa.int64(), "string": pa.string()}
_ARROW_SHARES = pa.schema(
    [(name, _ARROW_TYPES[kind]) for name, kind in map(str.split, SHARE_SCHEMA.split(", "))],
)

TURN_BYTES = 4 << 20  # bytes that are dealt at a time; they fit the cache of a core
BATCH_ROWS = 10_000  # rows of an Arrow batch, which ranks read at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class DealPlan:
    """The dealing of the rows of the job's `number`-th DataFrame."""

    keeper: KeeperPlan
    number: int
    keys: Sequence[int]  # Spark's `repartition` sends keys[rank] to the task of that rank
    arranged: bool  # by the user, not at random: the last column has the rank of all rows of the partition


def deal_rows(plan: DealPlan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write the partition's rows to a file of the host's keeper, and yield the places of each rank's shares.

    A function for `mapInArrow`. Raises `CacheError` if the disk is full, `SourceError` if there can be no keeper.
    """
    context = TaskContext.get()
    assert context is not None
    with Kept.started(plan.keeper) as kept:
        borrowed = kept.borrow()
        with borrowed.file:
            dealer = Dealer(plan, context.partitionId(), borrowed, kept.address)
            shares = list(dealer.deal(batches))
        kept.commit(dealer.end)
    yield pa.RecordBatch.from_pylist(shares, schema=_ARROW_SHARES)


class Dealer:
    """Dealer of one partition's rows.

    Each rank gets as many rows of the partition as the others, give or take one. A random generator chooses them, whose
    seeds are the numbers of the partition and of the turn."""

    def __init__(self, plan: DealPlan, partition: int, borrowed: Borrowed, keeper: str) -> None:
        self._plan, self._partition, self._borrowed, self._keeper = plan, partition, borrowed, keeper
        self._turn = 0
        self._next = partition  # modulo the number of ranks, the rank that gets the next row; ranks take turns
        self.end = borrowed.at  # of the written bytes

    def deal(self, batches: Iterable[pa.RecordBatch]) -> Iterator[dict[str, object]]:
        """Write the rows, some megabytes at a time; yield a row of SHARE_SCHEMA for each share that is not empty."""
        waiting: list[pa.RecordBatch] = []
        size = 0
        for batch in batches:
            waiting.append(batch)
            size += batch.nbytes
            if size >= TURN_BYTES:
                yield from self._deal(waiting)
                waiting, size = [], 0
        yield from self._deal(waiting)

    def _deal(self, waiting: list[pa.RecordBatch]) -> Iterator[dict[str, object]]:
        # One batch, unless its strings have more bytes than Arrow's offsets can count.
        for batch in pa.Table.from_batches(waiting).combine_chunks().to_batches() if waiting else []:
            for rank, rows in self._shares(batch) if batch.num_rows else ():
                if not rows.num_rows:
                    continue
                at, self.end = self.end, self._write(rows)
                place = {"file": self._borrowed.number, "at": at, "length": self.end - at, "rows": rows.num_rows}
                whose = {"key": self._plan.keys[rank], "rank": rank, "number": self._plan.number}
                yield {**whose, "partition": self._partition, "turn": self._turn, "keeper": self._keeper, **place}
            self._turn += 1

    def _shares(self, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield ranks, each with its rows of `batch`."""
        if self._plan.arranged:
            whose = batch.num_columns - 1
            yield batch.column(whose)[0].as_py(), batch.select(range(whose))
            return
        ranks = len(self._plan.keys)
        order = np.random.default_rng((self._partition, self._turn)).permutation(batch.num_rows)
        for rank in range(ranks):
            yield rank, batch.take(pa.array(order[(rank - self._next) % ranks :: ranks]))
        self._next += batch.num_rows

    def _write(self, rows: pa.RecordBatch) -> int:
        """Append an Arrow IPC stream of `rows` to the file; return the byte at which it ends. Raises `CacheError`."""
        try:
            with pa.OSFile(f"/proc/self/fd/{self._borrowed.file.fileno()}", "ab") as sink:
                with pa.ipc.new_stream(sink, rows.schema) as writer:
                    for first in range(0, rows.num_rows, BATCH_ROWS):
                        writer.write_batch(rows.slice(first, BATCH_ROWS))
                return int(sink.tell())
        except OSError as error:
            raise no_room(error, self._borrowed.directory) from error
