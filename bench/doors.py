"""Speed of unedited programs of other libraries: gloo, and farandole in its place (FARANDOLE_AS_GLOO=1).

    python bench/doors.py [--only trainer lightning_ddp] [--rounds 3]

The programs of bench/programs and accelerate's own test script know nothing of farandole. Two ranks, each with one
thread of torch, run each of them below torchrun, in turn over gloo and over farandole. Prints whether the losses are
equal, and a table of seconds per step, and writes bench/results/*-doors.json. A program whose library is not installed
is left out with the reason."""

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from comparison import OURS, Line, compare, table
from race import Race, race, record, spread

PROGRAMS = Path(__file__).with_name("programs")
PREFIX = "doors: "  # as in programs/timing.py
GLOO = "gloo"
DEADLINE = 600  # seconds of one program
# The least ratio of the seconds of a step, where communication takes over SHARE of gloo's step.
MUST, SHARE = 1.3, 0.1
SETTINGS: Mapping[str, Mapping[str, str]] = {OURS: {"FARANDOLE_AS_GLOO": "1"}, GLOO: {"FARANDOLE_AS_GLOO": "0"}}


ACCELERATE = "accelerate"
# By program: the packages that it needs.
DOORS: Mapping[str, Sequence[str]] = {
    "trainer": ["transformers", "accelerate"],
    "lightning_ddp": ["lightning"],
    "keras_torch": ["keras"],
    ACCELERATE: ["accelerate"],
}
ACCELERATE_SCRIPT = "accelerate.test_utils.scripts.test_script"


@dataclass(frozen=True, slots=True)
class Found:
    """Results of one run: median seconds of a step, losses of rank 0, and the share of the operations' time."""

    seconds: float
    losses: Sequence[float]
    share: float


def launch(contender: str, program: Sequence[str]) -> str:
    """Run a program over a contender and return its output; raises `RuntimeError` with the output if it fails."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port, *program],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1", **SETTINGS[contender]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )
    if done.returncode:
        raise RuntimeError(f"{program} over {contender} failed:\n{done.stdout[-4000:]}")
    return done.stdout


def measure(name: str, rounds: int) -> tuple[Race, Line]:
    """Run one program in turn over the contenders; raises `RuntimeError` if their losses differ."""
    runs: dict[str, list[Found]] = {OURS: [], GLOO: []}

    def run(contender: str) -> float:
        output = launch(contender, [str(PROGRAMS / f"{name}.py")])
        found = next(line for line in output.splitlines() if PREFIX in line).partition(PREFIX)[2]
        runs[contender].append(Found(**json.loads(found)))
        return runs[contender][-1].seconds

    times = race({OURS: lambda: run(OURS), GLOO: lambda: run(GLOO)}, rounds)
    if len({tuple(each.losses) for found in runs.values() for each in found}) != 1:
        raise RuntimeError(f"{name}: the losses over {OURS} are not those over {GLOO}: {runs}")
    share = spread([each.share for each in runs[GLOO]]).median
    musts = {GLOO: MUST} if share > SHARE else {}
    (line,) = compare(f"{name}: a step, {share:.0%} of it communication, equal losses", times, musts)
    return times, line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=DOORS, default=[*DOORS])
    given = parser.parse_args()
    races: dict[str, Race] = {}
    lines: list[Line] = []
    for name in given.only:
        missing = [each for each in DOORS[name] if importlib.util.find_spec(each) is None]
        if missing:
            sys.stdout.write(f"{name} is left out: {', '.join(missing)} is not installed\n")
        elif name == ACCELERATE:
            for contender in SETTINGS:
                launch(contender, ["-m", ACCELERATE_SCRIPT])
                sys.stdout.write(f"{ACCELERATE_SCRIPT} passes over {contender}\n")
        else:
            races[name], line = measure(name, given.rounds)
            lines.append(line)
            sys.stdout.write(f"{table(name, [line])}\n")
        sys.stdout.flush()
    if lines:
        sys.stdout.write(f"{table('unedited programs over gloo, 2 ranks', lines)}\n")
        packages = ["farandole", "torch", *dict.fromkeys(each for needed in DOORS.values() for each in needed)]
        sys.stdout.write(f"{record('doors', races, packages, lines)}\n")


if __name__ == "__main__":
    main()
