"""Autotune's log: a CSV file with a line per sample and the chosen knobs last, with which the next job starts."""

import csv
import logging
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self, TextIO

from farandole.closing import Closing
from farandole.config import Config
from farandole.core.autotune.knobs import Knobs
from farandole.errors import ConfigError

log = logging.getLogger(__name__)

PHASES = ("warmup", "search", "confirm", "chosen")
KNOBS = tuple(knob.name for knob in fields(Knobs))
HEAD = ("phase", "ranks", "hosts", *KNOBS, "bytes_per_second")


@dataclass(frozen=True, slots=True)
class Row:
    """One sample of a job with `ranks` ranks on `hosts` hosts, or with the phase "chosen" the result of its search."""

    phase: str
    ranks: int
    hosts: int
    knobs: Knobs
    bytes_per_second: float

    def cells(self) -> list[object]:
        knobs = asdict(self.knobs)
        sizes = [int(knobs[name]) for name in KNOBS]
        return [self.phase, self.ranks, self.hosts, *sizes, f"{self.bytes_per_second:.6g}"]

    @classmethod
    def read(cls, cells: list[str]) -> Self:
        """Parse the output of `cells`; raises `ValueError` with the reason if it is invalid."""
        if len(cells) != len(HEAD):
            raise ValueError(f"it has {len(cells)} columns and not {len(HEAD)}")
        phase, ranks, hosts, *sizes, speed = cells
        if phase not in PHASES:
            raise ValueError(f"{phase!r} is none of {', '.join(PHASES)}")
        numbers = {name: int(text) for name, text in zip(KNOBS, sizes, strict=True)}
        if min(numbers.values()) < 0 or numbers["hierarchical"] > 1:
            raise ValueError("a knob is out of range")
        for name in ("slot_bytes", "link_chunk"):
            if numbers[name] < 4096 or numbers[name] % 64:
                raise ValueError(f"{name} must be at least 4096 and a multiple of 64, got {numbers[name]}")
        hierarchical = bool(numbers.pop("hierarchical"))
        Config(**numbers, hierarchical=hierarchical)  # type: ignore[arg-type]  # refuses what no setting can be
        return cls(phase, int(ranks), int(hosts), Knobs(**numbers, hierarchical=hierarchical), float(speed))


class TuningLog(Closing):
    """Reads an existing log, and then appends to it. Without a path the log is empty, and `add` writes nothing.

    The constructor raises `ConfigError` with the file and the first invalid line, or with the reason why it cannot open
    the file. A last line without a line end, as a killed job leaves it, is skipped and overwritten. No other file is
    changed."""

    def __init__(self, path: str | None) -> None:
        self.rows: list[Row] = []
        self._file: TextIO | None = None
        if path is None:
            return
        try:
            self._file = open(path, "a+", encoding="utf-8", newline="")  # noqa: SIM115 - closed by close()
            self._file.seek(0)
            whole = self._read(self._file.read(), path)
            self._file.truncate(len(whole.encode()))
            self._file.seek(0, 2)
            if not whole:
                self._write(HEAD)
        except (OSError, UnicodeDecodeError) as error:
            self.close()
            raise ConfigError("autotune_log", f"cannot read and write {path}: {error}") from error
        except BaseException:
            self.close()
            raise

    def result(self, ranks: int, hosts: int) -> Knobs | None:
        """Return the result of the latest search with this many ranks and hosts; None without one."""
        chosen = [row for row in self.rows if (row.phase, row.ranks, row.hosts) == ("chosen", ranks, hosts)]
        return chosen[-1].knobs if chosen else None

    def add(self, row: Row) -> None:
        """Append a line. If that fails, log an error and write no more."""
        self.rows.append(row)
        try:
            self._write(row.cells())
        except OSError as error:
            log.error("autotune goes on without its file, which cannot be written any more (%s)", error.strerror)
            self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            # Only text whose write has failed, which was reported, is still to be written.
            with suppress(OSError):
                file.close()

    def _write(self, cells: "list[object] | tuple[str, ...]") -> None:
        if self._file is not None:
            csv.writer(self._file, lineterminator="\n").writerow(cells)
            self._file.flush()

    def _read(self, text: str, path: str) -> str:
        """Parse all whole lines of `text` into `rows`; return these lines."""
        whole = text[: text.rfind("\n") + 1]
        head = ",".join(HEAD)
        if not whole and not head.startswith(text):  # another file, of one line without a line end: nothing was cut off
            problem = f"is not a log of autotune, which begins with {head}; name another file"
            raise ConfigError("autotune_log", f"{path} {problem}")
        if whole != text:
            log.warning("%s ends in the middle of a line, which is left out", Path(path).name)
        for number, line in enumerate(whole.split("\n")[:-1], 1):
            cells = next(csv.reader([line]), [])
            try:
                if number > 1:
                    self.rows.append(Row.read(cells))
                elif tuple(cells) != HEAD:
                    raise ValueError(f"a log begins with {head}")
            except (ValueError, csv.Error) as error:
                raise ConfigError(
                    "autotune_log", f"{path}, line {number} cannot be read: {error}; mend it, or name another file"
                ) from error
        return whole
