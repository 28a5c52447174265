"""`farandole timeline merge`, `report` and `horovod`: a merged trace, a page, or a timeline in Horovod's form."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from farandole.errors import TraceError
from farandole.launch.options import CommandParser
from farandole.timeline.clocks import Clock, compare_clocks, shift_traces
from farandole.timeline.horovod import spell_as_horovod
from farandole.timeline.merging import merge_traces
from farandole.timeline.page import write_page
from farandole.timeline.reading import read_traces
from farandole.timeline.trace import RankTrace

log = logging.getLogger(__name__)

FAILED = 1


class Command(NamedTuple):
    """A subcommand: its description, and the function that makes its output."""

    about: str
    make: Callable[[Mapping[int, RankTrace], Sequence[Clock], Sequence[str]], Iterable[str]]
    suffix: str | None  # of the output beside the first input, unless OUT is given; None: OUT is required


COMMANDS = {
    "merge": Command("write one trace of all ranks, on one clock", merge_traces, None),
    "report": Command(
        "write a page with the times of operations and the ranks that others waited for", write_page, ".html"
    ),
    "horovod": Command("write one timeline with Horovod's form and names, for programs", spell_as_horovod, None),
}


def run_timeline(words: Sequence[str]) -> int:
    """Run the subcommand in `words`, the arguments of `farandole timeline`; return the exit code."""
    given = timeline_parser().parse_args(words)
    logging.basicConfig(level=logging.INFO, format="farandole: %(message)s", stream=sys.stderr)
    command = COMMANDS[given.what]
    first: Path = given.files[0]
    output: Path = given.output or first.parent / f"{first.stem}{command.suffix}"
    try:
        traces = read_traces(given.files)
        for warning in traces.warnings:
            log.warning("%s", warning)
        count = sum(len(trace.operations) for trace in traces.ranks.values())
        log.info("read %d operations of %d ranks", count, len(traces.ranks))
        clocks = compare_clocks(traces.ranks)
        if len(clocks) > 1:
            for clock in clocks:
                log.info("%s", clock)
        ranks = shift_traces(traces.ranks, clocks)
        _write(output, traces.paths, command.make(ranks, clocks, traces.warnings))
        log.info("wrote %s", output)
    except TraceError as error:
        log.error("%s", error)
        return FAILED
    except OSError as error:
        log.error("cannot write %s (%s)", output, error.strerror)
        return FAILED
    return 0


def timeline_parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments of `farandole timeline`."""
    parser = CommandParser(prog="farandole timeline", allow_abbrev=False)
    commands = parser.add_subparsers(dest="what", required=True, metavar="|".join(COMMANDS))
    for name, (what, _, suffix) in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        command.add_argument(
            "files",
            nargs="+",
            type=Path,
            metavar="FILE",
            help="timelines of ranks; a single file stands for all ranks' files beside it",
        )
        about = "the file to write" + (f" (default: as the first FILE, with {suffix})" if suffix else "")
        command.add_argument("-o", "--output", required=suffix is None, type=Path, metavar="OUT", help=about)
    return parser


def _write(output: Path, inputs: Iterable[Path], pieces: Iterable[str]) -> None:
    """Write `pieces` to `output`; the file appears only once it is complete."""
    if output.exists():
        if any(each.samefile(output) for each in inputs):
            raise TraceError(str(output), "is one of the files to read; name another one to write")
        if not output.is_file():  # a pipe, a terminal
            with output.open("w", encoding="utf-8", errors="replace") as file:
                file.writelines(pieces)
            return
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with unfinished.open("x", encoding="utf-8", errors="replace") as file:
            file.writelines(pieces)
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)
