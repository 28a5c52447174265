"""Agreement between ranks about data: a failure on one rank is raised on all of them, with its text."""

import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from farandole.errors import ConfigError, FarandoleError, SourceError, spell_ranks
from farandole.masking import mask

MOST_AHEAD = 16  # items per exchange; its cost per item is then negligible
AHEAD_BYTES = 1 << 20  # of items per exchange

A = TypeVar("A")
T = TypeVar("T")


class Gather(Protocol):
    """An all-gather of small objects, such as `hvd.allgather_object`; returns every rank's object in rank order."""

    def __call__(self, obj: T, /) -> list[T]: ...


def together(act: Callable[[], T], gather: Gather | None) -> T:
    """Call `act` and return its result on this rank; if it fails on any rank, all ranks raise.

    A rank on which `act` failed raises its own error. The others raise `SourceError` with the rank and text of the
    first failure. Collective with `gather`; without it, only calls `act`.
    """
    if gather is None:
        return act()
    try:
        done, failure = act(), None
    except Exception as error:  # of any class: the other ranks wait for this rank's report
        failure = error
    problems = gather("" if failure is None else _spell(failure))
    if failure is not None:
        raise failure
    for rank, problem in enumerate(problems):
        if problem:
            raise SourceError(f"rank {rank}", problem)
    return done


def place_in(gather: Gather) -> tuple[int, int]:
    """Return this rank, and the number of ranks; collective."""
    mine = uuid.uuid4().hex
    tokens = gather(mine)
    return tokens.index(mine), len(tokens)


def from_first(act: Callable[[], T], gather: Gather, rank: int) -> T:
    """Call `act` on rank 0 and return its result on every rank; if it fails, all ranks raise as `together` does."""
    made = together(lambda: [act()] if rank == 0 else [], gather)
    gathered = gather(made)[0]
    return (made or gathered)[0]


def shared_out(
    items: Sequence[A], make: Callable[[Sequence[A]], list[T]], gather: Gather | None, *, shared: bool
) -> list[T]:
    """Return what `make` makes of all items: each rank makes some for all ranks if they are `shared`, else all.

    Collective with `gather`; if it fails on one rank, all ranks raise as `together` does."""
    rank, size = place_in(gather) if gather is not None and shared else (0, 1)
    mine = together(lambda: make(items[rank::size]), gather)
    parts = gather(mine) if gather is not None and shared else [mine]
    return [parts[place % size][place // size] for place in range(len(items))]


def in_step(items: Iterator[T], gather: Gather | None, item_bytes: int) -> Iterator[T]:
    """Yield each item when all ranks have made theirs; all ranks must have the same number of items.

    If an item fails on any rank, all ranks raise as `together` does, before any of them yields that item. Each exchange
    covers one item at first, and then up to `MOST_AHEAD` items of `item_bytes`, within `AHEAD_BYTES`."""
    if gather is None:
        return items
    return _in_groups(items, gather, max(1, min(MOST_AHEAD, AHEAD_BYTES // max(1, item_bytes))))


def _in_groups(items: Iterator[T], gather: Gather, ahead: int) -> Iterator[T]:
    count = 1
    while True:
        made: list[T] = []
        failure = None
        try:
            made.extend(itertools.islice(items, count))
        except Exception as error:  # of any class: the other ranks wait for this rank's report
            failure = error
        reports: list[tuple[int, str, int]] = gather((len(made), "" if failure is None else _spell(failure), ahead))
        failed = min(((number, rank) for rank, (number, text, _) in enumerate(reports) if text), default=None)
        yield from made if failed is None else made[: failed[0]]
        if failed is not None:
            if failure is not None and len(made) == failed[0]:
                raise failure
            raise SourceError(f"rank {failed[1]}", reports[failed[1]][1])
        if len(made) < count:
            return
        count = min(wish for _, _, wish in reports)


def agree(what: str, mine: str, gather: Gather | None) -> None:
    """Raise `ConfigError` on every rank, naming ranks and values, unless `mine` is the same on all of them."""
    if gather is None:
        return
    ranks_by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(gather(mine)):
        ranks_by_value.setdefault(value, []).append(rank)
    if len(ranks_by_value) > 1:
        each = "; ".join(f"{spell_ranks(ranks)}: {value}" for value, ranks in ranks_by_value.items())
        raise ConfigError(what, f"differs between ranks ({each}); open the same files in the same way on every rank")


def check_places(rank: int, size: int, gather: Gather | None, *, alone: bool = False) -> None:
    """Raise `ConfigError` on every rank unless each of `size` shares of the rows is that of some rank.

    Several ranks may have one share, as the parts of one model do, unless `alone`. Collective with `gather`."""
    places = gather(rank) if gather is not None else list(range(size))
    if set(range(size)).difference(places) or (alone and places != list(range(size))):
        given = ", ".join(map(str, places))
        problem = f"is {given} on the ranks, and size is {size}, so that rows would be read twice or not at all"
        raise ConfigError("rank", f"{problem}; pass hvd.rank() and hvd.size()")


def _spell(failure: Exception) -> str:
    return str(failure) if isinstance(failure, FarandoleError) else mask(f"{type(failure).__name__}: {failure}")
