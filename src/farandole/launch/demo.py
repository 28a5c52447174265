"""`farandole demo`: ranks on this machine train a small model, and a picture in the terminal shows how it goes."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from farandole.launch.backend import Command
from farandole.launch.job import open_job
from farandole.launch.options import positive_count

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 50  # characters of the curve
NEXT = """Train your own program the same way: [bold]farandole run -np 2 python train.py[/bold]
The program of this demo is [bold]farandole/torch/demo.py[/bold], of 70 lines."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One line of rank 0."""

    step: int
    loss: float
    right: float  # share of the test's points
    rate: float  # samples per second, of all ranks
    communication: float  # share of the time in which rank 0 waited for other ranks

    def row(self) -> list[str]:
        """Return the texts of a row of the table."""
        return [
            str(self.step),
            f"{self.loss:.4f}",
            f"{self.right:.1%}",
            f"{self.rate:,.0f}",
            f"{self.communication:.0%}",
        ]


class Picture:
    """What the terminal shows; it is called with each line of the ranks."""

    def __init__(self, ranks: int, steps: int, console: Console) -> None:
        self._ranks, self._steps, self._console = ranks, steps, console
        self._seen: list[Progress] = []
        self._live = Live(self._panel(), console=console) if console.is_terminal else None

    def __call__(self, rank: int, stream: str, line: str) -> None:
        """Show a line of rank 0's progress; print any other one."""
        try:
            progress = Progress(**json.loads(line))
        except (ValueError, TypeError):
            self._console.print(f"[{rank}] {line}", markup=False)
            return
        self._seen.append(progress)
        if self._live is not None:
            self._live.update(self._panel())
        else:
            self._console.print("step {}  loss {}  right {}  samples/s {}  communication {}".format(*progress.row()))

    def _panel(self) -> Panel:
        content = Table.grid(padding=(0, 2))
        done = self._seen[-1].step if self._seen else 0
        content.add_row("training", ProgressBar(total=self._steps, completed=done, width=WIDTH))
        content.add_row("loss", f"[green]{curve([each.loss for each in self._seen])}")
        if self._seen:
            names = ("step", "loss", "right", "samples/s", "communication")
            for name, text in zip(names, self._seen[-1].row(), strict=True):
                content.add_row(name, text)
        return Panel(content, title=f"{self._ranks} ranks on this machine", expand=False)

    def __enter__(self) -> "Picture":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()


def curve(values: Sequence[float], width: int = WIDTH) -> str:
    """Draw `values` as at most `width` bars, the highest for the greatest value."""
    if not values:
        return ""
    picked = [values[place * len(values) // width] for place in range(width)] if len(values) > width else list(values)
    most = max(picked) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int(value / most * len(BARS)))] for value in picked)


def demo_parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments of `farandole demo`."""
    parser = argparse.ArgumentParser(
        prog="farandole demo", description="Train a small model as ranks on this machine, and watch it (needs PyTorch)."
    )
    parser.add_argument("-np", "--num-proc", type=positive_count, default=2, metavar="N", help="ranks (default: 2)")
    parser.add_argument("--steps", type=positive_count, default=3000, metavar="N", help="steps (default: 3000)")
    return parser


def run_demo(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = demo_parser()
    given = parser.parse_args(arguments)
    if find_spec("torch") is None:
        parser.error("PyTorch is not installed: pip install 'farandole[torch]'")
    console = Console()
    task = Command([sys.executable, "-P", "-m", "farandole.torch.demo", str(given.steps)])
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(open_job(given.num_proc, dict(os.environ)))
        failure = job.run(task, stack.enter_context(Picture(given.num_proc, given.steps, console)))
    if failure is not None:
        console.print(str(failure.error()), markup=False)
        return failure.code
    console.print(NEXT)
    return 0
