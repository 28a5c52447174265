"""Speed of unedited programs of other libraries: gloo, and farandole in its place (FARANDOLE_AS_GLOO=1).

    python bench/doors.py [--only trainer lightning_ddp] [--rounds 3]

The programs of bench/programs and accelerate's own test scripts know nothing of farandole. Two ranks, each with one
thread of torch, run each of them in turn over gloo and over farandole, below torchrun or as Ray starts them. Prints
whether the losses are equal, and a table of seconds per step, and writes bench/results/*-doors.json. A program whose
library is not installed is left out with the reason."""

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
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


@dataclass(frozen=True, slots=True)
class Door:
    """A program: the packages that it needs, and how its two processes start."""

    packages: Sequence[str]
    torchrun: bool = True  # or it starts them itself


ACCELERATE = "accelerate"
DOORS: Mapping[str, Door] = {
    "trainer": Door(["transformers", "accelerate"]),
    "lightning_ddp": Door(["lightning"]),
    "keras_torch": Door(["keras"]),
    "ray_train": Door(["ray"], torchrun=False),
    "deepspeed_zero": Door(["deepspeed"]),
    ACCELERATE: Door(["accelerate"]),
}
ACCELERATE_SCRIPTS = ["test_script", "test_sync", "test_ops"]  # test_distributed_data_loop needs GPUs


@dataclass(frozen=True, slots=True)
class Found:
    """Results of one run: median seconds of a step, losses of rank 0, and the share of the operations' time."""

    seconds: float
    losses: Sequence[float]
    share: float


def launch(contender: str, program: Sequence[str], torchrun: bool = True) -> str:
    """Run a program over a contender and return its output; raises `RuntimeError` with the output if it fails."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    before = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port] if torchrun else []
    done = subprocess.run(
        [sys.executable, *before, *program],
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
        output = launch(contender, [str(PROGRAMS / f"{name}.py")], DOORS[name].torchrun)
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
        missing = [each for each in DOORS[name].packages if importlib.util.find_spec(each) is None]
        if missing:
            sys.stdout.write(f"{name} is left out: {', '.join(missing)} is not installed\n")
        elif name == ACCELERATE:
            for script, contender in product(ACCELERATE_SCRIPTS, SETTINGS):
                launch(contender, ["-m", f"accelerate.test_utils.scripts.{script}"])
                sys.stdout.write(f"accelerate's {script} passes over {contender}\n")
        else:
            races[name], line = measure(name, given.rounds)
            lines.append(line)
            sys.stdout.write(f"{table(name, [line])}\n")
        sys.stdout.flush()
    if lines:
        sys.stdout.write(f"{table('unedited programs over gloo, 2 ranks', lines)}\n")
        packages = ["farandole", "torch", *dict.fromkeys(chain(*(DOORS[name].packages for name in races)))]
        sys.stdout.write(f"{record('doors', races, packages, lines)}\n")


if __name__ == "__main__":
    main()
