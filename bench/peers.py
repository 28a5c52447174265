"""Framework of the benchmarks: ranks below each launcher, one barrier for all contenders, turns, and results.

A benchmark is one script in two parts. Its `main` starts ranks of the same script with `run_ranks`. Each rank takes its
`BenchRank`, runs all contenders in turn with `take_turns`, and returns its times with `BenchRank.leave`. The contenders
run in the same processes, so that other load of the machine slows all of them equally."""

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

import collective_peers
import torch
import torch.distributed as dist
from race import Race

from farandole.config import Config
from farandole.core import default
from farandole.core.context import Context
from farandole.meeting.rendezvous import Rendezvous

JOB_FLAG = "--as-rank-of"
BARRIER_SECONDS = 120.0
LINE = 128  # bytes between two ranks' counters, so that no two are in one pair of cache lines

# Contender -> round -> (begin, end) of each operation, in nanoseconds of a clock that all processes share.
Times = dict[str, list[list[tuple[int, int]]]]


@dataclass(frozen=True, slots=True)
class Launcher:
    """A command that starts ranks, and the variable with each rank's number."""

    name: str
    rank_variable: str
    program: str = ""  # "": the ranks are started one by one
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def problem(self) -> str:
        """Return a sentence that says why this launcher cannot be used, or "" if it can."""
        if self.program and shutil.which(self.program) is None:
            return f"{self.name} is left out: there is no {self.program}; see docs/reference/benchmarks.md."
        if self.program and importlib.util.find_spec("mpi4py") is None:
            return f"{self.name} is left out: mpi4py is not installed."
        return ""


_OPENMPI = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
# .venv/bin/mpirun belongs to MPICH; mpirun.openmpi is Debian's name of Open MPI's.
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
        Launcher("Intel MPI", "PMI_RANK", str(collective_peers.LAUNCHER), environment=collective_peers.ENVIRONMENT),
    )
}


class FolderRendezvous(Rendezvous):
    """Rendezvous in a folder of the machine, which works across network namespaces and with any launcher."""

    def __init__(self, folder: Path, rank: int, size: int, secret: bytes) -> None:
        self._folder, self.rank, self.size, self.secret = folder, rank, size, secret
        self._round = 0

    def allgather(self, payload: bytes, *, timeout: timedelta) -> list[bytes]:
        """Exchange `payload` with all ranks; return the payloads in rank order. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout.total_seconds()
        files = [self._folder / f"{self._round}.{rank}" for rank in range(self.size)]
        self._round += 1
        draft = self._folder / f"{files[self.rank].name}.draft"  # each rank writes a file of its own
        draft.write_bytes(payload)
        draft.rename(files[self.rank])
        while missing := [file.name for file in files if not file.exists()]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._folder}: {', '.join(missing)} did not come")
            time.sleep(0.005)
        return [file.read_bytes() for file in files]


class Barrier:
    """Barrier of counters in shared memory that ranks poll: independent of the contenders; ranks leave it at once."""

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


class BenchRank:
    """A rank of a benchmark: its number, the job's options, its barrier, and access to the peers."""

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
        """Make a context of all ranks; with `hosts` each rank counts as a host of its own and uses sockets."""
        return Context(self._meeting(name), config, host=f"host{self.rank}" if hosts else None)

    def other_sums(self) -> dict[str, collective_peers.Sum]:
        """Connect the ranks by oneCCL and DeepSpeed's kernel, below the launcher that comes with them."""
        return collective_peers.connect(self._meeting("peers")) if self.launcher == "Intel MPI" else {}

    def _meeting(self, name: str) -> FolderRendezvous:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        return FolderRendezvous(folder, self.rank, self.size, self._secret)

    @contextmanager
    def gloo(self) -> Iterator[None]:
        """Initialize torch.distributed with gloo for this block."""
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
        """Import mpi4py.MPI, which initializes MPI; only ranks below an MPI launcher may call this."""
        module = importlib.import_module("mpi4py.MPI")
        assert module.COMM_WORLD.Get_rank() == self.rank and module.COMM_WORLD.Get_size() == self.size
        return module

    def leave(self, results: object) -> None:
        """Write the results for `run_ranks`."""
        draft = self._folder / f"results.{self.rank}.draft"
        draft.write_text(json.dumps(results), encoding="utf-8")
        draft.rename(self._folder / f"results.{self.rank}")


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do the operation. `refresh` rewrites its buffers, untimed; `right` returns whether the result is.

    This rank begins `late` seconds after the barrier."""

    run: Callable[[], object]
    refresh: Callable[[], object]
    right: Callable[[], bool] = field(default=lambda: True)
    context: Context | None = None
    late: float = 0


def bench_rank_of(command: Sequence[str]) -> BenchRank | None:
    """Return the bench of a rank that `run_ranks` has started, or None in the process of `main`."""
    return BenchRank(Path(command[2])) if len(command) == 3 and command[1] == JOB_FLAG else None


def arguments(text: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark; `text` is the description."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", dest="full", action="store_false", help="few sizes and operations (the default)")
    length.add_argument("--full", dest="full", action="store_true", help="all sizes, many operations")
    parser.set_defaults(full=False)
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which each contender has its turn")
    return parser


def within(context: Context | None) -> "nullcontext[Context | None]":
    """Make `context`, if any, the one that farandole's functions use in a block."""
    return nullcontext() if context is None else default.use(context)  # type: ignore[return-value]


def take_turns(bench: BenchRank, contenders: Mapping[str, Contender], rounds: int, repeats: int) -> Times:
    """Run `repeats` operations of each contender per round; the order rotates from round to round.

    Before each operation every rank rewrites its buffers and waits at the barrier. Three operations before the rounds
    warm caches and check the results. Raises `ArithmeticError` for a wrong result."""
    names = list(contenders)
    times: Times = {name: [] for name in names}
    for name, contender in contenders.items():
        with within(contender.context):
            for _ in range(3):
                _operate(bench, contender, 1)
                if not contender.right():
                    raise ArithmeticError(f"rank {bench.rank}: {name} gave a wrong result")
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            with within(contenders[name].context):
                _operate(bench, contenders[name], 1)
                times[name].append(_operate(bench, contenders[name], repeats))
    return times


def _operate(bench: BenchRank, contender: Contender, repeats: int) -> list[tuple[int, int]]:
    run, refresh, barrier, clock = contender.run, contender.refresh, bench.barrier, time.perf_counter_ns
    taken, late = [], contender.late
    for _ in range(repeats):
        refresh()
        barrier()
        if late > 0:
            time.sleep(late)
        begin = clock()
        run()
        taken.append((begin, clock()))
    return taken


def usable(names: Sequence[str]) -> list[Launcher]:
    """Return the usable launchers, and print why the others are not. Without any, return the one named "plain"."""
    found = []
    for name in names:
        problem = LAUNCHERS[name].problem()
        if problem:
            sys.stderr.write(f"{problem}\n")
        else:
            found.append(LAUNCHERS[name])
    return found or [LAUNCHERS["plain"]]


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep so many processes computing."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


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
    """Run `script` as `size` ranks; return their results in rank order.

    Ranks that are started one by one have `prefixes` before their commands. `interfaces` are the network interfaces of
    the ranks, by address or device. Raises `RuntimeError` with the end of the ranks' output if one fails."""
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
    # Without this handler SIGTERM would end the benchmark only; its ranks have sessions of their own.
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
            # SIGTERM first: an MPI launcher then ends its ranks.
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def races_of(ranks: Sequence[Mapping[str, Times]]) -> dict[str, Race]:
    """Join the ranks' times: an operation lasts from the last begin to the last end; a round's time is the median."""
    return {title: _race([rank[title] for rank in ranks]) for title in ranks[0]} if ranks else {}


def _race(ranks: Sequence[Times]) -> Race:
    seconds = {
        name: [_round_seconds([rank[name][number] for rank in ranks]) for number in range(len(rounds))]
        for name, rounds in ranks[0].items()
    }
    return Race(seconds)


def _round_seconds(ranks: Sequence[Sequence[tuple[int, int]]]) -> float:
    operations = zip(*ranks, strict=True)
    lasted: list[int] = [max(end for _, end in each) - max(begin for begin, _ in each) for each in operations]
    return float(statistics.median(lasted)) / 1e9
