"""torch's own tests of torch.distributed over gloo and over farandole: torch_suite.py [--ranks 2 3 8] [--only PATTERN].

The tests are in torch's wheel. farandole stands in for gloo (FARANDOLE_AS_GLOO), so that torch opens the same tests for
both; those that torch opens only for MPI run too. Each test has processes of its own, forked from one that has imported
torch; one that fails runs once more. --seconds ends a run early, with status 3; the next run goes on with the tests
that are left, from the outcomes in build/torch-suite. --write also writes docs/reference/torch-suite.md."""

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import types
import unittest
import zlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

__all__ = ["BACKENDS", "Outcome", "run_tests"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "torch-suite.md"
KEPT = ROOT / "build" / "torch-suite"
UNFINISHED = 3  # exit status
RULE = "|---|---|---|---|---|---|"  # of its first table; rows follow
HEAD = "| test | ranks | gloo | farandole | reason |\n|---|---|---|---|---|"
BACKENDS: Mapping[str, Mapping[str, str]] = {"gloo": {}, "farandole": {"FARANDOLE_AS_GLOO": "1"}}
OPENED = ("gloo", "mpi")  # for which torch opens tests
TEST_SECONDS = 120
SUITE_SECONDS = 3 * 3600
LONGEST_REASON = 160  # characters
# Why a test fails, where its error does not say it.
REASONS = {
    "test_ddp_logging_data_cpu": "wants gloo's name in DDP's log, for which torch reads a field of gloo's C++ class",
}


class Outcome(NamedTuple):
    """State of a test ("passed", "failed" or "skipped"), the reason of the last two, and its seconds."""

    state: str
    reason: str
    seconds: float


Outcomes = dict[str, Outcome]


class Unfinished(Exception):
    """The time is over before all tests have run."""


def run_tests(
    backend: str,
    ranks: int,
    *,
    only: str = "",
    opened: str = "gloo",
    timeout: float = SUITE_SECONDS,
    kept: Path | None = None,
) -> Outcomes:
    """Run the tests that match `only` over a backend of `BACKENDS`, with those open that torch opens for `opened`.

    With `kept`, a file, no test begins after `timeout` seconds, and those with outcomes in the file do not run again.
    Blocks up to `timeout` seconds, or to the end of the last test; raises `Unfinished`, `subprocess.TimeoutExpired`, or
    `CalledProcessError` if the suite breaks."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json") if kept is None else kept
        if results.exists() and not _left(outcomes := json.loads(results.read_text(encoding="utf-8"))):
            return {name: Outcome(*each) for name, each in outcomes.items()}
        env = {key: value for key, value in os.environ.items() if key != "FARANDOLE_AS_GLOO"}
        env |= {"BACKEND": opened, "WORLD_SIZE": str(ranks), "TEMP_DIR": folder, "MASTER_ADDR": "127.0.0.1"}
        env |= {"OMP_NUM_THREADS": "1", "PYTORCH_PRINT_REPRO_ON_FAILURE": "0", **BACKENDS[backend]}
        command = [sys.executable, __file__, "--inside", str(results), "--only", only, "--seconds", str(timeout)]
        longest = timeout if kept is None else timeout + 3 * TEST_SECONDS
        subprocess.run(command, env=env, timeout=longest, check=True, capture_output=True, text=True)
        found = json.loads(results.read_text(encoding="utf-8"))
        if left := _left(found):
            raise Unfinished(f"{left} of {len(found)} tests over {backend} at {ranks} ranks are left")
        return {name: Outcome(*each) for name, each in found.items()}


def _left(outcomes: Mapping[str, object]) -> int:
    """Return the number of tests that have not run."""
    return sum(each is None for each in outcomes.values())


def run_inside(results: Path, only: str, seconds: float) -> None:
    """Run the tests without outcomes in `results` in this process and its forks, and write their outcomes there.

    No test begins after `seconds`."""
    end = time.monotonic() + seconds
    if "expecttest" not in sys.modules:  # torch's tests import it, and these do not use it
        module = types.ModuleType("expecttest")
        vars(module)["TestCase"] = unittest.TestCase
        sys.modules["expecttest"] = module
    import torch  # reads BACKEND and FARANDOLE_AS_GLOO
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test as theirs

    if os.environ.get("FARANDOLE_AS_GLOO"):
        importlib.import_module("farandole.torch.distributed.gloo")  # once, not in the ranks of each test
    theirs.BACKEND = "gloo"  # the tests are open now
    common_distributed.TIMEOUT_DEFAULT = TEST_SECONDS
    fork = torch.multiprocessing.get_context("fork").Process

    class Suite(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()  # type: ignore[no-untyped-call]
            self._start_processes(fork)

    names = [name for name in unittest.TestLoader().getTestCaseNames(Suite) if re.search(only, name)]
    before = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    outcomes: dict[str, Outcome | None] = {name: before.get(name) for name in names}
    for name in names:
        if outcomes[name] is not None or time.monotonic() > end:
            continue
        found = run_one(Suite(name))
        outcomes[name] = run_one(Suite(name)) if found.state == "failed" else found
        results.write_text(json.dumps(outcomes), encoding="utf-8")
    results.write_text(json.dumps(outcomes), encoding="utf-8")


def run_one(test: unittest.TestCase) -> Outcome:
    """Run one test."""
    result, begin = unittest.TestResult(), time.monotonic()
    test.run(result)
    seconds = time.monotonic() - begin
    if result.skipped:
        return Outcome("skipped", result.skipped[0][1], seconds)
    problems = result.failures + result.errors
    return Outcome("failed", problems[0][1], seconds) if problems else Outcome("passed", "", seconds)


def compare(ranks: int, only: str, end: float) -> tuple[Outcomes, Outcomes, Outcomes, Outcomes]:
    """Run the tests over gloo and farandole, and then those that torch opens for MPI alone; return their outcomes.

    Keeps outcomes in `KEPT`. Blocks up to `end`, of the monotonic clock; raises `Unfinished`."""
    KEPT.mkdir(parents=True, exist_ok=True)

    def run(opened: str, only: str) -> list[Outcomes]:
        return [
            run_tests(
                backend,
                ranks,
                only=only,
                opened=opened,
                timeout=max(0, end - time.monotonic()),
                kept=KEPT / f"{ranks}-{backend}-{opened}-{zlib.crc32(only.encode()):x}.json",
            )
            for backend in BACKENDS
        ]

    gloo, ours = run("gloo", only)
    closed = [name for name, each in gloo.items() if each.state == "skipped"]
    of_mpi, ours_of_mpi = run("mpi", f"^({'|'.join(closed)})$")
    return gloo, ours, of_mpi, ours_of_mpi


def row(ranks: int, found: Sequence[Outcomes]) -> str:
    """Return the line of the first table for the outcomes that `compare` returns."""
    passed = [sum(each.state == "passed" for each in outcomes.values()) for outcomes in found]
    skipped = sum(each.state == "skipped" for each in found[2].values())
    return f"| {' | '.join(map(str, [ranks, *passed, skipped]))} |"


def differing(found: Mapping[int, Sequence[Outcomes]]) -> list[str]:
    """Return a line for each test that fails over one of the backends, with the numbers of ranks."""
    lines: dict[tuple[str, str, str], tuple[list[str], str]] = {}
    for ranks, (gloo, ours, of_mpi, ours_of_mpi) in found.items():
        for theirs, mine in ((gloo, ours), (of_mpi, ours_of_mpi)):
            for name, first in theirs.items():
                second = mine[name]
                if first.state != second.state or first.state == "failed":
                    key = (name, first.state, second.state)
                    lines.setdefault(key, ([], reason_of(name, first, second)))[0].append(str(ranks))
    rows: dict[tuple[str, ...], list[str]] = {}  # alike but for the names
    for (name, *states), (numbers, reason) in lines.items():
        rows.setdefault((", ".join(numbers), *states, reason), []).append(f"`{name}`")
    return [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items()]


def reason_of(name: str, *outcomes: Outcome) -> str:
    """Return why a test does not pass over one of the backends: the last error, in one line."""
    if name in REASONS:
        return REASONS[name]
    errors = [
        match[0]
        for each in outcomes
        for match in re.finditer(r"^\w[\w.]*(Error|Timeout|Lost|Exit)\b.*", each.reason, re.M)
    ]
    return (errors[-1] if errors else outcomes[0].reason.strip().rpartition("\n")[2])[:LONGEST_REASON].replace("|", "/")


def page(rows: Sequence[str], lines: Sequence[str]) -> str:
    """Return the page's text with the rows of its two tables."""
    before = PAGE.read_text(encoding="utf-8").partition(RULE)[0]
    tested = f"With torch {version('torch')}. Tests that fail over one of them:"
    return "\n".join([before + RULE, *rows, "", tested, "", HEAD, *(lines or ["| none | | | | |"]), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 8])
    parser.add_argument("--only", default="", help="tests whose names match this pattern")
    parser.add_argument("--seconds", type=float, default=SUITE_SECONDS, help="begin no test after so many seconds")
    parser.add_argument("--anew", action="store_true", help=f"forget the outcomes in {KEPT.relative_to(ROOT)}")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is not None:
        run_inside(given.inside, given.only, given.seconds)
        return 0
    if given.anew:
        shutil.rmtree(KEPT, ignore_errors=True)
    end = time.monotonic() + given.seconds
    try:
        found = {ranks: compare(ranks, given.only, end) for ranks in given.ranks}
    except Unfinished as left:
        sys.stderr.write(f"{left}; run the same command again\n")
        return UNFINISHED
    rows, lines = [row(ranks, each) for ranks, each in found.items()], differing(found)
    sys.stdout.write("\n".join([*rows, *lines, ""]))
    if given.write:
        PAGE.write_text(page(rows, lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
