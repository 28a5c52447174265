"""The driver's progress display: a live table on a terminal and in a notebook, plain lines elsewhere."""

import html
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

PLAIN_EVERY = 5.0  # seconds between two plain lines of a rank within an epoch
NOTEBOOK_EVERY = 0.25  # seconds between two updates in a notebook
BAR = 20  # characters of a bar on a terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """The progress of a rank in its training, as `farandole.spark.driver.progress.Progress` reports it."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    rows_per_s: float
    waited: float | None  # share of the time, if the rank reports it

    @classmethod
    def read(cls, message: Mapping[str, object]) -> "RankProgress":
        """Read the fields of a message; raises `ValueError` if one is missing or not a number."""
        numbers: dict[str, float] = {}
        for name in cls.__slots__:
            value = message.get(name)
            if name == "waited" and value is None:
                continue
            if not isinstance(value, (int, float)):
                raise ValueError(f"a progress message without a number for {name}: {message!r}")
            numbers[name] = value
        counts = {name: int(numbers.pop(name)) for name in ("epoch", "epochs", "step", "steps")}
        waited = numbers.pop("waited", None)
        return cls(**counts, **numbers, waited=waited)  # type: ignore[arg-type]

    @property
    def done(self) -> int:
        """The number of steps that are done, over all epochs."""
        return (self.epoch - 1) * self.steps + self.step

    def cells(self) -> list[str]:
        """Return each field as text for a reader."""
        return [
            f"{self.epoch}/{self.epochs}",
            f"{self.step}/{self.steps}",
            f"{self.loss:.4f}",
            f"{self.rows_per_s:,.0f}",
            "" if self.waited is None else f"{self.waited:.0%}",
        ]


HEADERS = ("epoch", "step", "loss", "rows/s", "waiting for data")


class Display:
    """Table of the progress of all ranks; pass `show` as `on_message`.

    Shows nothing until a rank reports progress. On a terminal the table stays below all other output. Terminals and
    notebooks need the context manager, whose end shows the last state. Safe to call from several threads.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console()
        self._progress: dict[int, RankProgress] = {}
        self._live: Live | None = None
        self._notebook: _Notebook | None = None
        self._printed: dict[int, float] = {}
        self._lock = threading.Lock()

    def show(self, rank: int, message: Mapping[str, object]) -> None:
        """Show a message of kind "progress" or "epoch"; ignore others."""
        with self._lock:
            if message.get("kind") == "progress":
                self._move(rank, RankProgress.read(message))
            elif message.get("kind") == "epoch":
                self._console.print(_spell_epoch(message), highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None
            if self._notebook is not None:
                self._notebook.show(self._html(), last=True)
                self._notebook = None

    def _move(self, rank: int, progress: RankProgress) -> None:
        self._progress[rank] = progress
        console = self._console
        if console.is_jupyter:  # before `is_terminal`, which is true in a notebook, too
            self._notebook = self._notebook or _Notebook()
            self._notebook.show(self._html())
            return
        if not console.is_terminal or console.is_dumb_terminal:
            self._print(rank, progress)
            return
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()
        self._live.update(self._table())

    def _print(self, rank: int, progress: RankProgress) -> None:
        now = time.monotonic()
        if progress.step == progress.steps or now - self._printed.get(rank, 0.0) >= PLAIN_EVERY:
            self._printed[rank] = now
            epoch, step, loss, speed, waited = progress.cells()
            line = f"[{rank}] epoch {epoch} step {step} loss {loss} {speed} rows/s"
            line += f", {waited} waiting for data" if waited else ""
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(title=self._title, title_justify="left", box=box.SIMPLE_HEAD)
        for header in ("rank", *HEADERS):
            table.add_column(header, justify="right")
        table.add_column("")
        for rank, progress in sorted(self._progress.items()):
            bar = ProgressBar(total=progress.epochs * progress.steps, completed=progress.done, width=BAR)
            table.add_row(str(rank), *progress.cells(), bar)
        return table

    def _html(self) -> str:
        head = "".join(f"<th>{html.escape(header)}</th>" for header in ("rank", *HEADERS, ""))
        rows = []
        for rank, progress in sorted(self._progress.items()):
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in (str(rank), *progress.cells()))
            bar = f'<td><progress value="{progress.done}" max="{progress.epochs * progress.steps}"></progress></td>'
            rows.append(f"<tr>{cells}{bar}</tr>")
        title = html.escape(self._title)
        return f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


class _Notebook:
    """Output below a notebook's cell, updated at most every `NOTEBOOK_EVERY` seconds."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None
        self._shown = 0.0

    def show(self, content: str, *, last: bool = False) -> None:
        """Replace the output by `content`; without `last` only if the previous update is old enough."""
        from IPython.display import HTML, display  # every notebook has it, and nothing else needs it

        now = time.monotonic()
        if self._handle is None:
            self._handle = display(HTML(content), display_id=True)
        elif last or now - self._shown >= NOTEBOOK_EVERY:
            self._handle.update(HTML(content))
        else:
            return
        self._shown = now


def _spell_epoch(message: Mapping[str, object]) -> str:
    numbers = {name: value for name, value in message.items() if isinstance(value, (int, float))}
    epoch, rows_per_s = numbers.pop("epoch"), numbers.pop("rows_per_s")
    parts = [f"{name} {value:.4f}" for name, value in numbers.items() if name not in ("steps", "seconds", "waited")]
    return f"epoch {epoch:.0f}: {', '.join(parts)}, {rows_per_s:,.0f} rows/s over all ranks"
