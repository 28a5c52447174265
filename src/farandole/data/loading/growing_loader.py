"""Loader of rows that are still arriving: every row once, equal steps on all ranks, resumable."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from farandole.data.formats.row_groups import File, rows_in
from farandole.data.formats.source import Source
from farandole.data.loading.agreement import Gather, from_first, together
from farandole.data.loading.arrivals import Arrived, Growing, Seen
from farandole.data.loading.batches import Batch
from farandole.data.loading.loader import Loader
from farandole.data.loading.meter import Metrics
from farandole.data.loading.plans import Policy
from farandole.data.loading.reading import Reading
from farandole.data.loading.settings import check_loader
from farandole.data.loading.state import NO_VERSION
from farandole.errors import ConfigError, DataError, SourceError

_KEYS = {"loader", "generation", "files", "version", "format", "last", "seen", "columns"}


GrowingState: TypeAlias = Mapping[str, Any]  # as `GrowingLoader.state_dict` returns it


class GrowingLoader(Loader):
    """Batches for rank `rank` of `size` of files that are still being written: `for batch in loader`, until they end.

    Works as `Loader`, with these differences. Each row comes once. The files that have arrived when the ranks need rows
    are a generation: rank 0 lists them, all ranks read them as one epoch, and then rank 0 lists the next ones. `policy`
    applies to the last step of each generation; "drop" is refused. `wrap` makes the source to read from the source of
    each generation: a cache, or a choice of rows. `state` is a state to continue from. Several ranks need `gather`.

    Making a loader and iterating over it block while there is nothing to read, up to `growing.patience` seconds. Then
    they raise `SourceError`, as for files that changed. Raises `DataError` if columns change, or if the data ends
    without a row.
    """

    def __init__(
        self,
        growing: Growing,
        *,
        batch_size: int,
        policy: Policy = "join",
        columns: Sequence[str] | None = None,
        rank: int = 0,
        size: int = 1,
        reading: Reading | None = None,
        gather: Gather | None = None,
        report: Callable[[Metrics], None] | None = None,
        seed: int | None = None,
        wrap: Callable[[Source], Source] = lambda source: source,
        state: GrowingState | None = None,
    ) -> None:
        if not isinstance(growing, Growing):
            raise ConfigError("growing", f"must be Growing(url, ...), got {growing!r}")
        check_loader(batch_size, policy, columns, rank, size)
        if policy == "drop":
            raise ConfigError("policy", "'drop' would leave out rows of each generation; take 'join' or 'pad'")
        if gather is None and size > 1:
            raise ConfigError("gather", "is needed: rank 0 lists the files for all ranks; hvd.allgather_object is one")
        self._growing, self._wrap, self._rank, self._gather = growing, wrap, rank, gather
        self._seen, self._arrived = Seen(), Arrived((), NO_VERSION, "", False)
        self._generation, self._known_columns = -1, ""
        source = self._opened_next() if state is None else self._opened_at(state)
        if source is None:
            raise DataError("", f"{growing} has ended without a row")
        super().__init__(
            source,
            batch_size=batch_size,
            policy=policy,
            columns=columns,
            rank=rank,
            size=size,
            reading=reading,
            gather=gather,
            report=report,
            seed=seed,
        )
        self._go_to(state)

    def __len__(self) -> int:
        """Raise `TypeError`: more rows may arrive."""
        raise TypeError("the number of steps is not known while data is arriving")

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches; blocks while no new files have arrived."""
        while True:
            if self._epoch == self._generation:
                yield from super().__iter__()
            source = self._opened_next()
            if source is None:
                return
            self._source, self._epoch, self._position = source, self._generation, 0
            self._prepare(self._gather)

    def set_epoch(self, epoch: int) -> None:
        """Raise `ConfigError` for any generation but the current one: rows are read once."""
        if epoch != self._epoch:
            raise ConfigError("epoch", "cannot be chosen while data is arriving; open all of it with Loader")

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last yielded batch; the same on every rank.

        It can be written as JSON. It names the files of the generation, and takes 16 bytes for each earlier file."""
        return {
            "loader": super().state_dict(),
            "generation": self._generation,
            "files": [[file.path, file.size, file.mark] for file in self._arrived.files],
            "version": self._arrived.version,
            "format": self._arrived.format,
            "last": self._arrived.last,
            "seen": self._seen.numbers(),
            "columns": self._known_columns,
        }

    def load_state_dict(self, state: GrowingState) -> None:
        """Continue from the state of another loader over the same data, with any number of ranks and any batch size.

        Raises `ConfigError` for the state of other data, `SourceError` for missing files."""
        self._source = self._opened_at(state)
        self._prepare(self._gather)
        self._go_to(state)

    def _prepare(self, gather: Gather | None) -> None:
        super()._prepare(gather)
        found = self._kinds_text()
        if self._known_columns and self._known_columns != found:
            problem = f"generation {self._generation} has columns {found}, those before have {self._known_columns}"
            raise DataError("", problem)
        self._known_columns = found

    def _go_to(self, state: GrowingState | None) -> None:
        """Go to the state's position if it is of this generation, else to the first row."""
        if state is not None and state["generation"] == self._generation:
            super().load_state_dict(state["loader"])
        else:
            self._epoch, self._position = self._generation, 0

    def _opened_next(self) -> Source | None:
        """Open the next generation; None if the data has ended. Blocks until files with rows have arrived."""
        began = time.monotonic()
        while not self._arrived.last:
            self._seen.add(self._arrived.files)
            found = self._agree_on_files(began)
            if found is None:
                time.sleep(self._growing.poll)
                continue
            source = self._open(found)
            if source is not None:
                self._arrived, self._generation = found, self._generation + 1
                return source
            self._seen.add(found.files)
            self._arrived = replace(self._arrived, last=found.last)
        return None

    def _opened_at(self, state: GrowingState) -> Source:
        """Open the generation of a state, or the next one if the state is at its end."""
        if set(state) != _KEYS:
            raise ConfigError("state", f"of a GrowingLoader holds {', '.join(sorted(_KEYS))}, not {', '.join(state)}")
        files = tuple(File(str(path), int(size), str(mark)) for path, size, mark in state["files"])
        self._seen = Seen(state["seen"])
        self._arrived = Arrived(files, int(state["version"]), str(state["format"]), bool(state["last"]))
        self._generation, self._known_columns = int(state["generation"]), str(state["columns"])
        done = state["loader"]["epoch"] > self._generation and not self._arrived.last
        following = self._opened_next() if done else None
        source = self._open(self._arrived) if following is None else following
        if source is None:
            problem = f"belongs to other data: `wrap` chooses no row of its generation {self._generation}"
            raise ConfigError("state", problem)
        return source

    def _agree_on_files(self, began: float) -> Arrived | None:
        """Return the files that have arrived since the last listing, the same on all ranks; None if too few."""

        def look() -> Arrived | None:
            found = self._growing.look(self._seen)
            waited = time.monotonic() - began
            if found is None and waited > self._growing.patience:
                least = self._growing.least_files
                few = "no" if least == 1 else f"fewer than {least}"
                advice = "raise the patience" if least == 1 else "raise the patience, or lower least_files"
                problem = f"has {few} new files since {waited:.0f} s, and has not ended; {advice}"
                raise SourceError(str(self._growing), problem)
            return found

        return look() if self._gather is None else from_first(look, self._gather, self._rank)

    def _open(self, arrived: Arrived) -> Source | None:
        """Open files; None if they have no rows."""
        if not arrived.files:
            return None
        source = self._growing.open(arrived, self._gather)
        wrapped = together(lambda: self._wrap(source), self._gather)
        return wrapped if rows_in(wrapped.row_groups).any() else None
