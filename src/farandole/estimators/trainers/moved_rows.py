"""Exchange of rows between ranks until all have equally many: shares by content differ slightly in size."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from farandole.data import Gather
from farandole.data.formats.shard_source import read_streams

_AT_ONCE = 1 << 25  # bytes, about, that all ranks together give away in one round, and that each of them receives


@dataclass(frozen=True, slots=True)
class Move:
    """Rows that one rank gives to another."""

    giver: int
    taker: int
    rows: int


def plan_moves(counts: Sequence[int]) -> list[Move]:
    """Return the moves of the fewest rows after which the ranks' counts differ by at most one."""
    total, size = sum(counts), len(counts)
    # The ranks with the most rows keep the remainder, a row each.
    more = sorted(range(size), key=lambda rank: (-counts[rank], rank))[: total % size]
    surplus = [count - total // size - (rank in more) for rank, count in enumerate(counts)]
    moves, taker = list[Move](), 0
    for giver in range(size):
        while surplus[giver] > 0:
            while surplus[taker] >= 0:
                taker += 1
            rows = min(surplus[giver], -surplus[taker])
            moves.append(Move(giver, taker, rows))
            surplus[giver] -= rows
            surplus[taker] += rows
    return moves


def even_out(path: Path, hashes: NDArray[np.int64], *, rank: int, gather: Gather) -> NDArray[np.int64]:
    """Give rows to other ranks, or append theirs to the file `path`; return the numbers of this rank's rows in it.

    `hashes` are the hashes of the rows' contents; a rank gives away those with the largest. A collective."""
    with pa.memory_map(str(path)) as mapped:
        mine = read_streams(mapped.read_buffer())
    facts = gather((mine.num_rows, mine.nbytes // max(1, mine.num_rows)))
    moves = plan_moves([rows for rows, _ in facts])
    if not moves:
        return np.arange(mine.num_rows)
    givers = len({each.giver for each in moves})
    at_once = max(1, _AT_ONCE // (givers * max(1, *(size for _, size in facts))))
    rounds = itertools.zip_longest(*(_pieces(moves, giver, at_once) for giver in range(len(facts))))
    order = np.argsort(hashes, kind="stable")
    left, rows = len(order), len(order)
    for pieces in rounds:
        piece = pieces[rank]
        given = b""
        if piece is not None:
            left -= piece.rows
            given = _dumped(mine.take(pa.array(order[left : left + piece.rows])))
        for each, content in zip(pieces, gather(given), strict=True):
            if each is not None and each.taker == rank:
                _append(path, content, mine.schema)
                rows += each.rows
    return np.concatenate([np.sort(order[:left]), np.arange(len(order), rows)])


def _pieces(moves: Sequence[Move], giver: int, at_once: int) -> Iterator[Move]:
    for move in moves:
        for first in range(0, move.rows if move.giver == giver else 0, at_once):
            yield Move(giver, move.taker, min(at_once, move.rows - first))


def _dumped(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _append(path: Path, content: bytes, schema: pa.Schema) -> None:
    with pa.ipc.open_stream(content) as stream:
        rows = stream.read_all().cast(schema)
    with path.open("ab") as file, pa.ipc.new_stream(file, schema) as writer:
        writer.write_table(rows)
