"""Cost of negotiation in a step of 200 tensors, with cached requests and without.

    python bench/negotiation.py [--full] [--rounds 5]

Two ranks submit 200 tensors of 4 B one by one, in opposite orders, and wait. Only 800 B move, so nearly all of the time
is negotiation. In later steps ranks send numbers instead of full requests; "spelled out each step" is the same without
that cache. Both run over shared memory and over loopback. Then bench/native_negotiation.cc runs the pure parts of the
engine with 8 to 4096 simulated ranks: in repeated steps, messages and bytes of one rank must not grow with the number
of ranks. Prints tables and writes bench/results/*-negotiation.json."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import peers
import torch
from comparison import OURS, Line, compare, table
from peers import LAUNCHERS, BenchRank, Contender, Times
from race import Race, record

import farandole.torch as hvd
from farandole.config import Config
from farandole.core.context import Context

TENSORS = 200
SPELLED_OUT = "spelled out each step"
SIMULATION = Path(__file__).parents[1] / "build" / "bench" / "bench" / "native_negotiation"
SIZES = (8, 64, 512, 4096)  # numbers of ranks, 8 on each host


def step_of(bench: BenchRank, cache: int) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """Return a function that submits all tensors of a step and waits for them, and the tensors."""
    values = [torch.empty(1) for _ in range(TENSORS)]
    named = [(value, f"{cache}.{place}") for place, value in enumerate(values)]
    if bench.rank % 2:
        named.reverse()

    def step() -> None:
        handles = [hvd.allreduce_async_(value, name=name, op=hvd.Sum) for value, name in named]
        for handle in handles:
            hvd.synchronize(handle)

    return step, values


def measure(bench: BenchRank) -> dict[str, Times]:
    """Measure as one rank; return the times by title and contender."""
    rounds, repeats = int(str(bench.options["rounds"])), int(str(bench.options["repeats"]))
    results: dict[str, Times] = {}
    for hosts in (False, True):
        with ExitStack() as stack:
            contenders: dict[str, Contender] = {}
            for name, cache in ((OURS, Config().cache_capacity), (SPELLED_OUT, 0)):
                place = f"{'tcp' if hosts else 'memory'}-{cache}"
                config = Config.from_environment(cache_capacity=cache)
                context = stack.enter_context(bench.context(place, config, hosts=hosts))
                contenders[name] = contender(bench, *step_of(bench, cache), context)
            title = f"{'tcp: ' if hosts else ''}step of {TENSORS} x 4 B"
            results[title] = peers.take_turns(bench, contenders, rounds, repeats)
    return results


def contender(bench: BenchRank, step: Callable[[], None], values: list[torch.Tensor], context: Context) -> Contender:
    def refresh() -> None:
        for value in values:
            value.fill_(bench.rank + 1)

    def right() -> bool:
        return all(value.item() == bench.size * (bench.size + 1) // 2 for value in values)

    return Contender(step, refresh, right, context)


@dataclass(frozen=True, slots=True)
class Simulated:
    """One row of the simulation: traffic of the busiest rank in a step, means of all ranks, coordinator's time."""

    ranks: int
    step: str
    messages: int
    bytes_up: int
    bytes_down: int
    coordinator_ms: float
    mean_messages: float
    mean_bytes: float


def simulate() -> tuple[str, list[Simulated]]:
    """Run the simulation; return its printed table and its rows."""
    sizes = ",".join(str(ranks) for ranks in SIZES)
    done = subprocess.run(
        [str(SIMULATION), str(TENSORS), sizes], check=True, capture_output=True, text=True, timeout=300
    )
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    return done.stdout, [
        Simulated(int(ranks), step, int(messages), int(up), int(down), float(took), float(mean), float(mean_bytes))
        for ranks, step, messages, up, down, took, _, mean, mean_bytes in rows
    ]


def verdict(simulated: list[Simulated]) -> str:
    """Return a sentence that says whether traffic of the busiest rank in a repeated step grows with the ranks.

    A rank communicates with at most 7 ranks of its host, 8 hosts and its parent; with 512 ranks one has all these."""
    later: Mapping[int, Simulated] = {row.ranks: row for row in simulated if row.step == "later"}
    few, many = later[SIZES[-2]], later[SIZES[-1]]
    grows = (few.messages, few.bytes_up, few.bytes_down) != (many.messages, many.bytes_up, many.bytes_down)
    answer = "MISSED" if grows else "met"
    return (
        f"messages and bytes of the busiest rank in a repeated step, {few.ranks} and {many.ranks} ranks alike: {answer}"
    )


def races_of_simulation(simulated: list[Simulated]) -> dict[str, Race]:
    """Return the simulation's times as races, to be recorded like other times."""
    return {
        f"simulated, {row.ranks} ranks, {row.step} step, {row.messages} messages, {row.bytes_up} B up, "
        f"{row.bytes_down} B down": Race({"coordinator": [row.coordinator_ms / 1e3]})
        for row in simulated
    }


def main() -> None:
    given = peers.arguments(__doc__).parse_args()
    options = {"rounds": given.rounds, "repeats": 200 if given.full else 30}
    races = peers.races_of(peers.run_ranks(__file__, 2, LAUNCHERS["plain"], options))
    lines: list[Line] = [line for title, race in races.items() for line in compare(title, race, {})]
    sys.stdout.write(f"{table('agreement, 2 ranks', lines)}\n")
    if SIMULATION.exists():
        text, simulated = simulate()
        sys.stdout.write(f"simulated ranks\n{text}{verdict(simulated)}\n")
        races |= races_of_simulation(simulated)
    else:
        sys.stdout.write("The simulation is left out: it has not been built, tools/bench.sh does that.\n")
    sys.stdout.write(f"{record('negotiation', races, ('farandole', 'torch'), lines)}\n")


if __name__ == "__main__":
    bench = peers.bench_rank_of(sys.argv)
    if bench is None:
        main()
    else:
        bench.leave(measure(bench))
