"""Time of an allreduce, compared with gloo, MPI, oneCCL, DeepSpeed's kernel and the limits of memory and network.

    python bench/allreduce.py [--full] [--rounds 5] [--np 2 3 4 8] [--only memory tcp shaped]

memory: ranks of one host, all sizes, types and collectives; without --full only a few sizes for more than two ranks.
tcp: each rank counts as a host of its own; they use loopback. shaped: two network namespaces joined by a veth pair that
is limited to 1 and to 10 Gbit/s; needs root. Before each timed operation every rank rewrites its whole buffer and waits
at a barrier. small.py has more for small ones. collective_peers.py installs Intel MPI, oneCCL and DeepSpeed's kernel.
Prints one table and writes bench/results/*-allreduce.json."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import peers
import small
import torch
import torch.distributed as dist
from comparison import KIB, MIB, OURS, Line, bytes_of, compare, limit, size_text, table
from namespaces import DEVICE, inside, join, namespaces, shape
from peers import LAUNCHERS, BenchRank, Contender, Launcher, Times
from race import Race, record, spread

import farandole.torch as hvd
from farandole.config import Config
from farandole.core import default
from farandole.core.context import Context

ADD, LIMIT = "a += b", "memory limit"
# An allreduce in place reads and writes its buffer at least once; a += b moves half as many bytes more.
LIMIT_SHARE = 2 / 3
FLOAT32 = "float32"
BESIDE = f"{OURS} {FLOAT32}"

# Targets for two ranks, by bytes: the least ratio of the peer's time to ours, and our greatest time in microseconds.
MEMORY_MUST: Mapping[int, Mapping[str, float]] = {
    4: {"gloo": 60, "Open MPI": 1, "MPICH": 3},
    KIB: {"Open MPI": 1},
    64 * KIB: {"gloo": 40, "Open MPI": 3, "MPICH": 4, "Intel MPI": 1.5},
    MIB: {"gloo": 12, "Open MPI": 2.5, "MPICH": 3},
    16 * MIB: {"gloo": 10, "Open MPI": 2, "MPICH": 2, LIMIT: 0.55},
    64 * MIB: {"gloo": 6, "Open MPI": 3, "MPICH": 3, LIMIT: 0.55},
    256 * MIB: {"gloo": 5, "Open MPI": 2.5, "MPICH": 2.5, LIMIT: 0.45},
}
MEMORY_LIMIT_US: Mapping[int, float] = {4: 1.5, KIB: 2.0}
REGISTERED, ORDINARY = "registered buffer", "ordinary buffer"
REGISTERED_MUST: Mapping[str, float] = {ORDINARY: 1.5}
HALF_MUST: Mapping[str, float] = {"gloo": 8, BESIDE: 1 / 1.2}
TCP_MUST: Mapping[int, Mapping[str, float]] = {
    4: {"gloo": 12, "Open MPI tcp": 1},
    64 * KIB: {"gloo": 8},
    MIB: {"gloo": 2.5, "Open MPI tcp": 1},
    64 * MIB: {"gloo": 2, "Open MPI tcp": 1.5},
}
# Targets by Gbit/s and bytes: the least share of the rate, and the least ratio of gloo's time to ours.
SHAPED_MUST: Mapping[int, Mapping[int, Mapping[str, float]]] = {
    1: {MIB: {"rate": 0.94}, 16 * MIB: {"rate": 0.94}, 64 * MIB: {"rate": 0.94}},
    10: {16 * MIB: {"rate": 0.85, "gloo": 1.05}, 64 * MIB: {"rate": 0.85, "gloo": 1.05}},
}


@dataclass(frozen=True, slots=True)
class Effort:
    """The sizes to measure, and limits of the number of operations."""

    memory: Sequence[int]
    half: Sequence[int]
    tcp: Sequence[int]
    shaped: Mapping[int, Sequence[int]]
    most: int  # operations of one contender in one round
    volume: int  # bytes that one contender reduces in one round, at most (but 3 operations)

    def repeats(self, size: int) -> int:
        return max(3, min(self.most, self.volume // size))


QUICK = Effort(
    (4, KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    (64 * KIB, 16 * MIB),
    (4, 64 * KIB, MIB, 64 * MIB),
    {1: (MIB, 16 * MIB), 10: (16 * MIB, 64 * MIB)},
    most=20,
    volume=32 * MIB,
)
# For more ranks than most machines have cores.
CROWD = Effort((4, 64 * KIB, 16 * MIB), (), (4, MIB), {}, most=10, volume=16 * MIB)
FULL = Effort(
    (4, 64, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    (4, 64 * KIB, MIB, 16 * MIB, 64 * MIB),
    (4, KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB),
    {1: (64 * KIB, MIB, 16 * MIB, 64 * MIB), 10: (64 * KIB, MIB, 16 * MIB, 64 * MIB)},
    most=300,
    volume=512 * MIB,
)


class Field:
    """The contenders of one job, for any collective, size and type."""

    def __init__(self, bench: BenchRank, context: Context) -> None:
        self.bench, self.context = bench, context
        self.mpi = bench.mpi() if bench.has_mpi else None
        self.other_sums = bench.other_sums()

    def allreduce(self, size: int, dtype: torch.dtype, *, adds: bool) -> dict[str, Contender]:
        """Return all contenders that sum `size` bytes of `dtype` in place, and `a += b` if `adds`."""
        bench, tensor = self.bench, torch.empty(size // dtype.itemsize, dtype=dtype)
        name = f"sum.{size}.{dtype}"

        def refresh() -> None:
            tensor.fill_(bench.rank + 1)

        def right() -> bool:
            return bool((tensor == bench.size * (bench.size + 1) // 2).all())

        found = {
            OURS: Contender(lambda: hvd.allreduce_(tensor, name=name, op=hvd.Sum), refresh, right, self.context),
            "gloo": Contender(lambda: dist.all_reduce(tensor), refresh, right),
        }
        if self.mpi is not None and dtype == torch.float32:
            in_place, array, world = self.mpi.IN_PLACE, tensor.numpy(), self.mpi.COMM_WORLD
            found[bench.launcher] = Contender(lambda: world.Allreduce(in_place, array), refresh, right)
            found |= {peer: Contender(make(tensor), refresh, right) for peer, make in self.other_sums.items()}
        if adds:
            found[ADD] = self._add(tensor, refresh)
        if dtype != torch.float32:
            beside = torch.empty(size // 4)
            found[BESIDE] = Contender(
                lambda: hvd.allreduce_(beside, name=f"{name}.beside", op=hvd.Sum),
                lambda: beside.fill_(1.0),
                context=self.context,
            )
        return found

    def registered(self, size: int) -> dict[str, Contender]:
        """Return contenders that sum `size` bytes in a buffer that the ranks share, and in an ordinary one."""
        rank, total = self.bench.rank, self.bench.size * (self.bench.size + 1) // 2

        def sums(tensor: torch.Tensor, name: str) -> Contender:
            return Contender(
                lambda: hvd.allreduce_(tensor, name=f"{name}.{size}", op=hvd.Sum),
                lambda: tensor.fill_(rank + 1),
                lambda: bool((tensor == total).all()),
                self.context,
            )

        with default.use(self.context):
            shared = hvd.empty_shared(size // 4)
        return {OURS: sums(shared, "shared"), ORDINARY: sums(torch.empty(size // 4), "ordinary")}

    def _add(self, tensor: torch.Tensor, refresh: Callable[[], None]) -> Contender:
        other = torch.ones_like(tensor)
        return Contender(lambda: tensor.add_(other), refresh)

    def others(self, size: int) -> dict[str, dict[str, Contender]]:
        """Return the contenders of the other collectives; `size` is the bytes of a rank's, or the root's, input."""
        bench, n = self.bench, self.bench.size
        tensor = torch.empty(size // 4 // n * n)
        whole, part = torch.empty(n * tensor.numel()), torch.empty(tensor.numel() // n)
        swapped = torch.empty_like(tensor)

        def refresh() -> None:
            tensor.fill_(bench.rank + 1)

        ours: dict[str, Callable[[], object]] = {
            "allgather": lambda: hvd.allgather(tensor, name="gather"),
            "alltoall": lambda: hvd.alltoall(tensor, name="swap"),
            "broadcast": lambda: hvd.broadcast_(tensor, 0, name="spread"),
            "reducescatter": lambda: hvd.reducescatter(tensor, name="scatter", op=hvd.Sum),
            "barrier": hvd.barrier,
        }
        gloo: dict[str, Callable[[], object]] = {
            "allgather": lambda: dist.all_gather_single(whole, tensor),
            "alltoall": lambda: dist.all_to_all_single(swapped, tensor),
            "broadcast": lambda: dist.broadcast(tensor, 0),
            "reducescatter": lambda: dist.reduce_scatter_tensor(part, tensor),
            "barrier": dist.barrier,
        }
        mpi: dict[str, Callable[[], object]] = {}
        if self.mpi is not None:
            world = self.mpi.COMM_WORLD
            sent, gathered, scattered, exchanged = tensor.numpy(), whole.numpy(), part.numpy(), swapped.numpy()
            mpi = {
                "allgather": lambda: world.Allgather(sent, gathered),
                "alltoall": lambda: world.Alltoall(sent, exchanged),
                "broadcast": lambda: world.Bcast(sent, 0),
                "reducescatter": lambda: world.Reduce_scatter_block(sent, scattered),
                "barrier": world.Barrier,
            }
        fields = {}
        for kind in ours:
            fields[kind] = {OURS: Contender(ours[kind], refresh, context=self.context)}
            fields[kind]["gloo"] = Contender(gloo[kind], refresh)
            if mpi:
                fields[kind][bench.launcher] = Contender(mpi[kind], refresh)
        return fields


def measure(bench: BenchRank) -> dict[str, Times]:
    """Measure as one rank all that the job's options name; return the times by title and contender."""
    wanted = bench.options
    rounds, over = int(str(wanted["rounds"])), str(wanted["over"])
    effort = FULL if wanted["full"] else QUICK if bench.size == 2 else CROWD
    gbit = int(str(wanted.get("gbit", 0)))
    config = Config.from_environment(interface=bench.interface) if bench.interface else Config.from_environment()
    results: dict[str, Times] = {}
    with bench.context(over, config, hosts=over != "memory") as context, bench.gloo():
        field = Field(bench, context)

        def turns(title: str, contenders: Mapping[str, Contender], size: int) -> None:
            results[title] = peers.take_turns(bench, contenders, rounds, effort.repeats(size))

        sizes = {"memory": effort.memory, "tcp": effort.tcp, "shaped": effort.shaped.get(gbit, ())}[over]
        for size in (each for each in sizes if fits(each, bench.size)):
            adds = over == "memory" and size >= 64 * KIB
            turns(title_of(size, FLOAT32), field.allreduce(size, torch.float32, adds=adds), size)
        if over == "memory":
            results |= small.measure(bench, context, field.allreduce, rounds, effort.most)
            for size in (each for each in effort.memory if MIB <= each <= 64 * MIB):
                turns(f"{REGISTERED} {size_text(size)}", field.registered(size), size)
            for dtype in (torch.float16, torch.bfloat16):
                for size in effort.half:
                    name = str(dtype).removeprefix("torch.")
                    turns(title_of(size, name), field.allreduce(size, dtype, adds=False), size)
            others = {} if effort is CROWD else field.others(16 * MIB)
            for kind, contenders in others.items():
                turns(kind if kind == "barrier" else f"{kind} 16 MiB", contenders, 16 * MIB)
    return results


def fits(size: int, ranks: int) -> bool:
    """Return whether all buffers of all ranks, of farandole and its peers, take less than half of the memory."""
    return 6 * size * ranks < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def title_of(size: int, dtype: str) -> str:
    return f"allreduce {size_text(size)} {dtype}"


def own_limit(race: Race) -> None:
    """Replace the times of a += b by the least times that memory allows for an allreduce."""
    if ADD in race.seconds:
        race.seconds[LIMIT] = [LIMIT_SHARE * value for value in race.seconds.pop(ADD)]


def memory(size: int, options: Mapping[str, object]) -> tuple[dict[str, Race], list[Line]]:
    """Measure ranks of one host, below each installed MPI; without MPI, only farandole and gloo."""
    names = ["Open MPI", "MPICH", "Intel MPI"] if size == 2 or options["full"] else ["Open MPI"]
    return under(names, size, {**options, "over": "memory"}, memory_lines)


def tcp(size: int, options: Mapping[str, object]) -> tuple[dict[str, Race], list[Line]]:
    """Measure ranks that communicate over loopback."""

    def lines(title: str, bytes_: int, race: Race, strict: bool) -> list[Line]:
        return compare(f"tcp: {title}", race, TCP_MUST.get(bytes_, {}) if strict else {})

    return under(["Open MPI tcp"], size, {**options, "over": "tcp"}, lines)


Judge = Callable[[str, int, Race, bool], list[Line]]
FAILED: list[str] = []


def ranks_or_none(size: int, launcher: Launcher, options: Mapping[str, object], **more: Any) -> list[dict[str, Times]]:
    """Run the ranks. If they fail, print why and return []; `main` shows the other results and fails at the end."""
    try:
        return peers.run_ranks(__file__, size, launcher, options, **more)
    except RuntimeError as error:
        FAILED.append(f"{options['over']}, {size} ranks, {launcher.name}")
        sys.stderr.write(f"{error}\n")
        return []


def under(
    names: Sequence[str], size: int, options: Mapping[str, object], judge: Judge
) -> tuple[dict[str, Race], list[Line]]:
    launchers = peers.usable(names)
    races: dict[str, Race] = {}
    lines: list[Line] = []
    for launcher in launchers:
        sys.stderr.write(f"{options['over']}, {size} ranks, {launcher.name} ...\n")
        for title, race in peers.races_of(ranks_or_none(size, launcher, options)).items():
            own_limit(race)
            races[f"{options['over']}, {size} ranks, {launcher.name}: {title}"] = race
            for line in judge(f"{title}, np={size}", bytes_of(title), race, size == 2):
                shared = len(launchers) > 1 and line.against != launcher.name
                lines.append(replace(line, against=f"{line.against} ({launcher.name} run)") if shared else line)
    places = {what: place for place, what in enumerate(dict.fromkeys(line.what for line in lines))}
    return races, sorted(lines, key=lambda line: places[line.what])


def memory_lines(title: str, size: int, race: Race, strict: bool) -> list[Line]:
    if strict and (title.startswith(small.BOUND) or small.BACK_TO_BACK in title):
        return small.lines_of(title, race)
    if strict and title.startswith(REGISTERED):
        return compare(title, race, REGISTERED_MUST)
    if not strict or not title.startswith("allreduce"):
        return compare(title, race, {})
    if FLOAT32 not in title:
        return compare(title, race, HALF_MUST if size == 16 * MIB else {})
    lines = compare(title, race, MEMORY_MUST.get(size, {}))
    return [*lines, limit(title, race, MEMORY_LIMIT_US[size])] if size in MEMORY_LIMIT_US else lines


def shaped(gbit: int, options: Mapping[str, object]) -> tuple[dict[str, Race], list[Line]]:
    """Measure two ranks in two network namespaces, with `gbit` Gbit/s in each direction."""
    launcher = replace(LAUNCHERS["plain"], environment={"GLOO_SOCKET_IFNAME": DEVICE})
    with shaped_hosts(gbit) as (names, addresses):
        ranks = ranks_or_none(
            2,
            launcher,
            {**options, "over": "shaped", "gbit": gbit},
            prefixes=[inside(name) for name in names],
            interfaces=addresses,
        )
    races: dict[str, Race] = {}
    lines: list[Line] = []
    for title, race in peers.races_of(ranks).items():
        size, what = bytes_of(title), f"{gbit} Gbit/s: {title}"
        must = SHAPED_MUST[gbit].get(size, {})
        races[f"shaped, {what}"] = race
        lines += compare(what, race, must)
        # Each of two ranks sends exactly as many bytes as the buffer has.
        least = size * 8 / (gbit * 1e9)
        shares = spread([least / value for value in race.seconds[OURS]])
        ours = spread([1e6 * value for value in race.seconds[OURS]])
        lines.append(Line(what, "rate", ours, spread([1e6 * least]), shares, must.get("rate")))
    return races, lines


@contextmanager
def shaped_hosts(gbit: int) -> Iterator[tuple[Sequence[str], list[str]]]:
    """Make two hosts joined by a cable of `gbit` Gbit/s in each direction; yield their names and addresses."""
    with namespaces(2) as names:
        addresses = join(names)
        for name in names:
            shape(DEVICE, gbit, "-n", name)
        yield names, addresses


def shaping_problem() -> str:
    """Return a sentence that says why no shaped network can be made here, or "" if one can."""
    try:
        with shaped_hosts(1):
            return ""
    except FileNotFoundError as error:
        return f"The shaped network is left out: there is no {error.filename}."
    except subprocess.CalledProcessError as error:
        return f"The shaped network is left out: '{' '.join(error.cmd)}' failed: {str(error.stderr).strip()}."


def main() -> None:
    parser = peers.arguments(__doc__)
    parser.add_argument("--np", type=int, nargs="+", default=[2, 3, 4, 8], metavar="N", help="numbers of ranks")
    parser.add_argument("--only", nargs="+", choices=("memory", "tcp", "shaped"), default=["memory", "tcp", "shaped"])
    given = parser.parse_args()
    options = {"full": given.full, "rounds": given.rounds}
    races: dict[str, Race] = {}
    lines: list[Line] = []

    def add(found: tuple[dict[str, Race], list[Line]]) -> None:
        races.update(found[0])
        lines.extend(found[1])

    for size in given.np:
        if "memory" in given.only:
            add(memory(size, options))
        if "tcp" in given.only and (size == 2 or given.full):
            add(tcp(size, options))
    if "shaped" in given.only:
        problem = shaping_problem()
        if problem:
            sys.stdout.write(f"{problem}\n")
        else:
            for gbit in SHAPED_MUST:
                add(shaped(gbit, options))
    sys.stdout.write(f"{table('allreduce and its kin, fresh buffers', lines)}\n")
    sys.stdout.write(f"{record('allreduce', races, ('farandole', 'torch', 'mpi4py', 'mpich'), lines)}\n")
    if FAILED:
        sys.exit(f"failed: {'; '.join(FAILED)}")


if __name__ == "__main__":
    bench = peers.bench_rank_of(sys.argv)
    if bench is None:
        main()
    else:
        bench.leave(measure(bench))
