"""Parts that all measurements share: ranks under each launcher, one barrier for all contenders, turns, one table.

A measurement is one script in two parts. Its `main` starts ranks of the same script with `run_ranks`; each of these
takes its `Seat`, lets all contenders run in turn with `take_turns`, and leaves its times behind. The contenders live in
the same processes, so what else the machine does falls on all of them alike."""

import argparse
import importlib.util
import json
import mmap
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from comparison import OURS
from race import Race

from farandole.config import Config
from farandole.core import default
from farandole.core.context import Context

__all__ = [
    "LAUNCHERS",
    "Contender",
    "Launcher",
    "Seat",
    "Times",
    "arguments",
    "races_of",
    "run_ranks",
    "seat_of",
    "take_turns",
    "usable",
    "within",
]

JOB_FLAG = "--as-rank-of"
BARRIER_SECONDS = 120.0
LINE = 128  # bytes between two ranks' counters: no two of them in one pair of cache lines

# Contender -> round -> (begin, end) of each operation in nanoseconds of the clock that all processes share.
Times = dict[str, list[list[tuple[int, int]]]]


@dataclass(frozen=True, slots=True)
class Launcher:
    """The command that starts ranks, and the variable in which each finds its number."""

    name: str
    rank_variable: str
    program: str = ""  # nothing: the ranks are started one by one
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def problem(self) -> str:
        """Why this launcher cannot be used here, in a sentence; empty when it can."""
        if self.program and shutil.which(self.program) is None:
            return f"{self.name} is left out: there is no {self.program}."
        if self.program and importlib.util.find_spec("mpi4py") is None:
            return f"{self.name} is left out: mpi4py is not installed."
        return ""


_OPENMPI = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
# .venv/bin/mpirun is MPICH's, so Open MPI's is called by the name that Debian gives it.
LAUNCHERS = {
    each.name: each
    for each in (
        Launcher("plain", "FARANDOLE_BENCH_RANK"),
        Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "mpirun.openmpi", _OPENMPI, {"MPI4PY_MPIABI": "openmpi"}),
        Launcher(
            "Open MPI tcp",
            "OMPI_COMM_WORLD_RANK",
            "mpirun.openmpi",
            (*_OPENMPI, "--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"),
            {"MPI4PY_MPIABI": "openmpi"},
        ),
        Launcher(
            "MPICH",
            "PMI_RANK",
            str(Path(sys.prefix, "bin", "mpiexec.hydra")),
            environment={"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(Path(sys.prefix, "lib"))},
        ),
    )
}


class FolderRendezvous:
    """Ranks meet in a folder of their machine; reaches across network namespaces and asks nothing of a launcher."""

    generation = 0
    address = None

    def __init__(self, folder: Path, rank: int, size: int, secret: bytes) -> None:
        self._folder, self.rank, self.size, self.secret = folder, rank, size, secret
        self._round = 0

    def allgather(self, payload: bytes, *, timeout: timedelta) -> list[bytes]:
        """Give `payload` to all ranks and return everybody's in rank order; raises `TimeoutError`."""
        deadline = time.monotonic() + timeout.total_seconds()
        files = [self._folder / f"{self._round}.{rank}" for rank in range(self.size)]
        self._round += 1
        draft = self._folder / f"{files[self.rank].name}.draft"  # no two ranks write the same
        draft.write_bytes(payload)
        draft.rename(files[self.rank])
        while missing := [file.name for file in files if not file.exists()]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._folder}: {', '.join(missing)} did not come")
            time.sleep(0.005)
        return [file.read_bytes() for file in files]

    def close(self) -> None:
        """Nothing is held."""


class Barrier:
    """Counters in shared memory, watched without a pause: no contender's own barrier, and all ranks leave at once."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        with path.open("r+b") as file:
            self._counters = memoryview(mmap.mmap(file.fileno(), size * LINE)).cast("q")
        step = LINE // 8
        self._mine, self._others = rank * step, [other * step for other in range(size) if other != rank]
        self._count = 0
        self._crowded = size > len(os.sched_getaffinity(0))

    def __call__(self) -> None:
        counters = self._counters
        self._count += 1
        counters[self._mine] = self._count
        deadline = time.monotonic() + BARRIER_SECONDS
        for other in self._others:
            looks = 0
            while counters[other] < self._count:
                looks += 1
                if self._crowded or looks % 20_000 == 0:
                    os.sched_yield()
                if looks % 20_000 == 0 and time.monotonic() > deadline:
                    raise TimeoutError(f"rank {other * 8 // LINE} did not come to the barrier")


class Seat:
    """The inputs of a rank: its number, the others, and the peers it is measured against."""

    def __init__(self, folder: Path) -> None:
        job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        self.rank, self.size = int(os.environ[job["rank_variable"]]), int(job["size"])
        self.options: dict[str, object] = job["options"]
        self.launcher: str = job["launcher"]
        self.interface: str | None = job["interfaces"][self.rank] if job["interfaces"] else None
        self._folder, self._secret = folder, bytes.fromhex(job["secret"])
        self.barrier = Barrier(folder / "barrier", self.rank, self.size)
        torch.set_num_threads(1)

    def context(self, name: str, config: Config, *, hosts: bool = False) -> Context:
        """Make a context of all ranks; with `hosts` each is alone on its host and talks over sockets."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        meeting = FolderRendezvous(folder, self.rank, self.size, self._secret)
        return Context(meeting, config, host=f"host{self.rank}" if hosts else None)

    @contextmanager
    def gloo(self) -> Iterator[None]:
        """Let torch.distributed work over gloo in this block."""
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self._folder}/gloo",
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=120),
        )
        try:
            yield
        finally:
            dist.destroy_process_group()

    @property
    def has_mpi(self) -> bool:
        return self.launcher not in ("", "plain")

    def mpi(self) -> ModuleType:
        """Return mpi4py's MPI; its import starts MPI, so only ranks under an MPI launcher may ask."""
        module = importlib.import_module("mpi4py.MPI")
        assert module.COMM_WORLD.Get_rank() == self.rank and module.COMM_WORLD.Get_size() == self.size
        return module

    def leave(self, results: object) -> None:
        """Hand the results to whoever started the ranks."""
        draft = self._folder / f"results.{self.rank}.draft"
        draft.write_text(json.dumps(results), encoding="utf-8")
        draft.rename(self._folder / f"results.{self.rank}")


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do the operation: `refresh` rewrites its buffers, untimed, and `right` looks at what came out."""

    run: Callable[[], object]
    refresh: Callable[[], object]
    right: Callable[[], bool] = field(default=lambda: True)
    context: Context | None = None


def seat_of(command: Sequence[str]) -> Seat | None:
    """Return the seat of a rank that `run_ranks` has started, None in the process that was started by hand."""
    return Seat(Path(command[2])) if len(command) == 3 and command[1] == JOB_FLAG else None


def arguments(text: str) -> argparse.ArgumentParser:
    """Add the options that every measurement takes; without `--full` it is quick."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", dest="full", action="store_false", help="few sizes and operations (the default)")
    length.add_argument("--full", dest="full", action="store_true", help="all sizes, many operations")
    parser.set_defaults(full=False)
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which each contender has its turn")
    return parser


def within(context: Context | None) -> "nullcontext[Context | None]":
    """Let farandole's functions use `context` in a block."""
    return nullcontext() if context is None else default.use(context)  # type: ignore[return-value]


def take_turns(seat: Seat, contenders: Mapping[str, Contender], rounds: int, repeats: int) -> Times:
    """Let each contender run `repeats` operations per round, the order turning with the round.

    Before each operation every rank rewrites its buffers and meets the others. A first round, not counted, warms caches
    and checks the results; raises `ArithmeticError` for a wrong one."""
    names = list(contenders)
    times: Times = {name: [] for name in names}
    for name, contender in contenders.items():
        with within(contender.context):
            for _ in range(3):
                _operate(seat, contender, 1)
                if not contender.right():
                    raise ArithmeticError(f"rank {seat.rank}: {name} gave a wrong result")
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            with within(contenders[name].context):
                _operate(seat, contenders[name], 1)
                times[name].append(_operate(seat, contenders[name], repeats))
    return times


def _operate(seat: Seat, contender: Contender, repeats: int) -> list[tuple[int, int]]:
    run, refresh, barrier, clock = contender.run, contender.refresh, seat.barrier, time.perf_counter_ns
    taken = []
    for _ in range(repeats):
        refresh()
        barrier()
        begin = clock()
        run()
        taken.append((begin, clock()))
    return taken


def usable(names: Sequence[str]) -> list[Launcher]:
    """Return those launchers that can be used, saying why others cannot; ranks start one by one if none can."""
    found = []
    for name in names:
        problem = LAUNCHERS[name].problem()
        if problem:
            sys.stderr.write(f"{problem}\n")
        else:
            found.append(LAUNCHERS[name])
    return found or [LAUNCHERS["plain"]]


def run_ranks(
    script: str,
    size: int,
    launcher: Launcher,
    options: Mapping[str, object],
    *,
    prefixes: Sequence[Sequence[str]] = (),
    interfaces: Sequence[str] = (),
    timeout: timedelta = timedelta(minutes=30),
) -> list[dict[str, Times]]:
    """Run `script` as `size` ranks and return what each left behind, in rank order.

    `prefixes` are put before the commands of ranks started one by one, and `interfaces` name the address and the device
    of each. Raises `RuntimeError` with the end of what the ranks wrote when one fails."""
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as name:
        folder = Path(name)
        (folder / "barrier").write_bytes(bytes(size * LINE))
        job = {
            "size": size,
            "launcher": launcher.name,
            "rank_variable": launcher.rank_variable,
            "interfaces": list(interfaces),
            "secret": secrets.token_hex(32),
            "options": dict(options),
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, script, JOB_FLAG, name]
        if launcher.program:
            commands = [[launcher.program, *launcher.arguments, "-n", str(size), *command]]
        else:
            commands = [[*(prefixes[rank] if prefixes else ()), *command] for rank in range(size)]
        _run_all(commands, launcher, folder, timeout)
        return [json.loads((folder / f"results.{rank}").read_text(encoding="utf-8")) for rank in range(size)]


def _run_all(commands: Sequence[Sequence[str]], launcher: Launcher, folder: Path, timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    output = folder / "output"
    # Else the ranks, which have sessions of their own, would outlive a measurement that is told to end.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with output.open("wb") as file:
        processes = [
            subprocess.Popen(
                command,
                env={
                    "GLOO_SOCKET_IFNAME": "lo",
                    **os.environ,
                    **launcher.environment,
                    "FARANDOLE_BENCH_RANK": str(rank),
                },
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            for rank, command in enumerate(commands)
        ]
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes) or time.monotonic() > deadline:
                    break
                time.sleep(0.02)
        finally:
            _end(processes)
            signal.signal(signal.SIGTERM, before)
    if any(process.returncode != 0 for process in processes):
        end = output.read_text(encoding="utf-8", errors="replace")[-4000:]
        raise RuntimeError(f"ranks under {launcher.name} failed or took longer than {timeout}:\n{end}")


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            # A launcher passes the gentle signal on; ranks of our own that hang get the other one.
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def races_of(ranks: Sequence[Mapping[str, Times]]) -> dict[str, Race]:
    """Join the ranks' times: an operation lasts from the last begin to the last end; a round counts as its median."""
    return {title: _race([rank[title] for rank in ranks]) for title in ranks[0]} if ranks else {}


def _race(ranks: Sequence[Times]) -> Race:
    seconds = {
        name: [_round_seconds([rank[name][number] for rank in ranks]) for number in range(len(rounds))]
        for name, rounds in ranks[0].items()
    }
    ratios = {
        f"{name} : {OURS}": [their / our for their, our in zip(theirs, seconds[OURS], strict=True)]
        for name, theirs in seconds.items()
        if name != OURS and OURS in seconds
    }
    return Race(seconds, ratios)


def _round_seconds(ranks: Sequence[Sequence[tuple[int, int]]]) -> float:
    operations = zip(*ranks, strict=True)
    lasted: list[int] = [max(end for _, end in each) - max(begin for begin, _ in each) for each in operations]
    return float(statistics.median(lasted)) / 1e9
