"""torch's own tests of torch.distributed over gloo and over farandole: torch_suite.py [--ranks 2 3 8] [--only PATTERN].

The tests are in torch's wheel. farandole stands in for gloo (FARANDOLE_AS_GLOO), so that torch opens the same tests for
both; those that torch opens only for MPI run too. Each test has processes of its own, forked from one that has imported
torch; one that fails runs once more. --write also writes docs/reference/torch-suite.md."""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
import unittest
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

__all__ = ["BACKENDS", "Outcome", "run_tests"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "torch-suite.md"
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


def run_tests(
    backend: str, ranks: int, *, only: str = "", opened: str = "gloo", timeout: float = SUITE_SECONDS
) -> Outcomes:
    """Run the tests that match `only` over a backend of `BACKENDS`, with those open that torch opens for `opened`.

    Blocks up to `timeout` seconds; raises `subprocess.TimeoutExpired`, or `CalledProcessError` if the suite breaks."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        env = {key: value for key, value in os.environ.items() if key != "FARANDOLE_AS_GLOO"}
        env |= {"BACKEND": opened, "WORLD_SIZE": str(ranks), "TEMP_DIR": folder, "MASTER_ADDR": "127.0.0.1"}
        env |= {"OMP_NUM_THREADS": "1", "PYTORCH_PRINT_REPRO_ON_FAILURE": "0", **BACKENDS[backend]}
        command = [sys.executable, __file__, "--inside", str(results), "--only", only]
        subprocess.run(command, env=env, timeout=timeout, check=True, capture_output=True, text=True)
        return {name: Outcome(*each) for name, each in json.loads(results.read_text(encoding="utf-8")).items()}


def run_inside(results: Path, only: str) -> None:
    """Run the tests in this process and its forks, and write their outcomes to `results`."""
    if "expecttest" not in sys.modules:  # torch's tests import it, and these do not use it
        module = types.ModuleType("expecttest")
        vars(module)["TestCase"] = unittest.TestCase
        sys.modules["expecttest"] = module
    import torch  # reads BACKEND and FARANDOLE_AS_GLOO
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test as theirs

    theirs.BACKEND = "gloo"  # the tests are open now
    common_distributed.TIMEOUT_DEFAULT = TEST_SECONDS
    fork = torch.multiprocessing.get_context("fork").Process

    class Suite(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()  # type: ignore[no-untyped-call]
            self._start_processes(fork)

    names = [name for name in unittest.TestLoader().getTestCaseNames(Suite) if re.search(only, name)]
    outcomes: Outcomes = {}
    for name in names:
        outcomes[name] = run_one(Suite(name))
        if outcomes[name].state == "failed":
            outcomes[name] = run_one(Suite(name))
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


def compare(ranks: int, only: str) -> tuple[str, list[str]]:
    """Run the tests over both backends; return the line of the table, and the lines of the tests that differ.

    Those that torch opens for MPI alone run over both, too."""
    found = {backend: run_tests(backend, ranks, only=only) for backend in BACKENDS}
    closed = [name for name, each in found["gloo"].items() if each.state == "skipped"]
    pattern = f"^({'|'.join(closed)})$"
    of_mpi = {backend: run_tests(backend, ranks, only=pattern, opened="mpi") for backend in BACKENDS}
    passed = [
        [sum(each.state == "passed" for each in outcomes[backend].values()) for backend in BACKENDS]
        for outcomes in (found, of_mpi)
    ]
    skipped = sum(each.state == "skipped" for each in of_mpi["gloo"].values())
    cells = [ranks, *passed[0], *passed[1], skipped]
    lines = [
        f"| `{name}` | {ranks} | {gloo.state} | {ours.state} | {reason_of(name, gloo, ours)} |"
        for outcomes in (found, of_mpi)
        for name, gloo in outcomes["gloo"].items()
        if (ours := outcomes["farandole"][name]).state != gloo.state or "failed" in (gloo.state, ours.state)
    ]
    return f"| {' | '.join(map(str, cells))} |", lines


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


def page(tables: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return the page's text with the lines of `tables`."""
    before = PAGE.read_text(encoding="utf-8").partition(RULE)[0]
    rows = "\n".join(row for row, _ in tables)
    differing = "\n".join(line for _, lines in tables for line in lines) or "| none | | | | |"
    tested = f"With torch {version('torch')}. Tests that fail over one of them:"
    return "\n".join([before + RULE, rows, "", tested, "", HEAD, differing, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 8])
    parser.add_argument("--only", default="", help="tests whose names match this pattern")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is not None:
        return run_inside(given.inside, given.only)
    tables = []
    for ranks in given.ranks:
        tables.append(compare(ranks, given.only))
        sys.stdout.write("\n".join([tables[-1][0], *tables[-1][1], ""]))
        sys.stdout.flush()
    if given.write:
        PAGE.write_text(page(tables), encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
