"""Time of an allreduce over the fabric "mpi", compared with mpi4py's own call in the same processes.

    python bench/mpi.py [--rounds 5] [--ranks 2] [--most 67108864]

One job runs below Open MPI's mpirun and one below MPICH's mpiexec, with mpi4py and farandole in each process. The two
reduce the same float32 buffer in place, in turns. A time is that of the slowest rank, divided by the number of
operations in a row. Prints the times and their ratios (the target is at least 0.9); writes bench/results/*-mpi.json."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from race import Race, race, record, spread

from farandole.config import Config

SIZES = [4, 64, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 64 << 20]  # bytes
MUST = 0.9  # least ratio of mpi4py's time to ours
OURS, THEIRS = "farandole", "mpi4py"
TIMEOUT = 600.0
OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")


def launchers() -> Mapping[str, tuple[tuple[str, ...], dict[str, str]]]:
    """Return the command and environment variables of each installed launcher whose MPI library mpi4py supports."""
    found: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {}
    if shutil.which(OPEN_MPI[0]) is not None:
        found["Open MPI"] = OPEN_MPI, {"MPI4PY_MPIABI": "openmpi"}
    hydra = shutil.which("mpiexec.hydra", path=f"{Path(sys.prefix, 'bin')}:{os.environ['PATH']}")
    folder = Path(hydra or sys.prefix).parent.parent / "lib"
    if hydra is not None and (folder / "libmpi.so.12").exists():
        found["MPICH"] = (hydra,), {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(folder)}
    for name in ("Open MPI", "MPICH"):
        if name not in found:
            sys.stdout.write(f"{name} is left out: its launcher or its library is missing (see the extra 'bench').\n")
    return found


def as_rank(rounds: int, most: int, file: Path) -> None:
    """Measure as one process of mpirun; rank 0 writes the times to `file`."""
    from mpi4py import MPI

    import farandole.numpy as hvd

    hvd.init(config=Config.from_environment(fabric="mpi"))
    world = MPI.COMM_WORLD
    found: dict[str, dict[str, list[float]]] = {}
    for size in [each for each in SIZES if each <= most]:
        buffer = np.zeros(size // 4, np.float32)
        count = max(3, min(2000, (8 << 20) // size))

        def timed(action: Callable[[], object], count: int = count) -> float:
            world.Barrier()
            started = time.perf_counter()
            for _ in range(count):
                action()
            return float(world.allreduce((time.perf_counter() - started) / count, op=MPI.MAX))

        def ours(buffer: np.ndarray = buffer) -> object:
            return hvd.allreduce_(buffer, op=hvd.Sum, name="buffer")

        def theirs(buffer: np.ndarray = buffer) -> object:
            return world.Allreduce(MPI.IN_PLACE, buffer, op=MPI.SUM)

        done = race({OURS: lambda: timed(ours), THEIRS: lambda: timed(theirs)}, rounds)
        found[str(size)] = done.seconds
    if hvd.rank() == 0:
        file.write_text(json.dumps(found), encoding="utf-8")
    hvd.shutdown()


def measure(
    launcher: str, command: Sequence[str], variables: Mapping[str, str], ranks: int, rounds: int, most: int
) -> dict[str, Race]:
    """Run the ranks below `launcher`; return a race for each size. Raises `RuntimeError` if the job fails."""
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder:
        file = Path(folder, "times")
        words = ["--rounds", str(rounds), "--most", str(most), "--as-rank", str(file)]
        done = subprocess.run(
            [*command, "-n", str(ranks), sys.executable, __file__, *words],
            env={"OMP_NUM_THREADS": "1", **os.environ, **variables},  # idle threads of BLAS would spin on the cores
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{launcher} ended with {done.returncode}: {done.stderr[-2000:]}")
        times = json.loads(file.read_text(encoding="utf-8"))
    return {f"{launcher}, {ranks} ranks, {size} B": Race(seconds) for size, seconds in times.items()}


def main() -> None:
    """Measure below each launcher, or as one rank with `--as-rank`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--most", type=int, default=SIZES[-1], help="largest buffer, in bytes")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank is not None:
        as_rank(given.rounds, given.most, given.as_rank)
        return
    if find_spec("mpi4py") is None:
        sys.stdout.write("mpi is left out: mpi4py is not installed (see the extra 'bench').\n")
        return
    races: dict[str, Race] = {}
    for launcher, (command, variables) in launchers().items():
        races.update(measure(launcher, command, variables, given.ranks, given.rounds, given.most))
    for title, each in races.items():
        us = {name: spread(values).median * 1e6 for name, values in each.seconds.items()}
        ratio = spread(each.ratios(OURS)[THEIRS])
        verdict = "" if ratio.median >= MUST else f"  below {MUST}"
        sys.stdout.write(f"{title:<36} {us[OURS]:>10.1f} us {us[THEIRS]:>10.1f} us   theirs : ours {ratio}{verdict}\n")
    sys.stdout.write(f"{record('mpi', races, ('farandole', 'mpi4py', 'numpy'))}\n")


if __name__ == "__main__":
    main()
