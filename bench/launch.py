"""Time from the launch command until all ranks are initialized.

    python bench/launch.py [--rounds 7] [--ranks 2]

`farandole run` and torchrun (gloo) take turns; both programs import the same torch. The time of `import farandole` is
measured as well. Prints min / median / max and writes bench/results/*-launch.json."""

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from race import Race, race, record

OURS = """
import torch
import farandole.torch as hvd
hvd.init()
rank = hvd.rank()
"""

THEIRS = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
"""

# All processes of a machine share this clock. The program's end is not measured.
NOTE = """
import os, sys, time
now = time.monotonic()
with open(os.path.join(sys.argv[1], str(rank)), "w") as file:
    file.write(str(now))
"""

TIMEOUT = 120.0


def until_initialized(command: Sequence[str], program: str, ranks: int) -> float:
    """Return the seconds from the start of `command` until `init` has returned on the last of its ranks."""
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder:
        script = Path(folder, "program.py")
        script.write_text(program + NOTE, encoding="utf-8")
        started = time.monotonic()
        subprocess.run(
            [*command, str(script), folder], check=True, capture_output=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL
        )
        return max(float(Path(folder, str(rank)).read_text(encoding="utf-8")) for rank in range(ranks)) - started


def launch(ranks: int, rounds: int) -> Race:
    """Race `farandole run` against torchrun."""
    here = Path(sys.executable).parent

    def ours() -> float:
        command = [str(here / "farandole"), "run", "-np", str(ranks), sys.executable]
        return until_initialized(command, OURS, ranks)

    def theirs() -> float:
        command = [str(here / "torchrun"), "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
        return until_initialized(command, THEIRS, ranks)

    return race({"farandole run": ours, "torchrun": theirs}, rounds)


def free_port() -> int:
    """Return a port on which nothing listens now, for torchrun, which needs a port number."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def imports(rounds: int) -> Race:
    """Measure the seconds of imports in a new interpreter, without the interpreter's own start."""
    return race({f"import {name}": importing(name) for name in ("farandole", "farandole.torch", "torch")}, rounds)


def importing(name: str) -> Callable[[], float]:
    program = f"import time; t = time.perf_counter(); import {name}; print(time.perf_counter() - t)"

    def measure() -> float:
        done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=TIMEOUT)
        return float(done.stdout)

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    races = {
        f"start until init returned, {given.ranks} ranks": launch(given.ranks, given.rounds),
        "import": imports(given.rounds),
    }
    for title, each in races.items():
        sys.stdout.write(f"{title} (min / median / max)\n{each.report()}\n")
    sys.stdout.write(f"{record('launch', races, ('farandole', 'torch'))}\n")


if __name__ == "__main__":
    main()
