"""Time of gradients as int8 on a link of 1 Gbit/s, compared with float32, float16, bfloat16 and PowerSGD.

    python bench/compression.py [--full] [--rounds 5]

Two ranks in two network namespaces, joined by a veth pair that is limited to 1 Gbit/s in each direction; needs root.
They reduce one tensor, and make training steps with `DistributedOptimizer`, by each compression in turn. `ours` is
int8. Prints one table and writes bench/results/*-compression.json."""

import sys
from collections.abc import Mapping

import peers
import torch
from allreduce import shaped_hosts, shaping_problem
from comparison import MIB, OURS, Line, compare, size_text, table
from namespaces import inside
from peers import LAUNCHERS, BenchRank, Contender, Times
from race import record, spread

import farandole.torch as hvd
from farandole.config import Config
from farandole.core.operations.compression import Compressor

GBIT = 1
FLOAT32, FLOAT16 = "float32", "float16"
WAYS: Mapping[str, Compressor[torch.Tensor]] = {
    OURS: hvd.Compression.int8,
    FLOAT32: hvd.Compression.none,
    FLOAT16: hvd.Compression.fp16,
    "bfloat16": hvd.Compression.bf16,
}
STEPS = {**WAYS, "PowerSGD, rank 4": hvd.PowerSGD(4)}
SIZES = (4 * MIB, 32 * MIB)
STEP = "a training step, 24 MiB of gradients"
# The least ratios of the other's time to that of int8, which sends 3.94 times fewer bytes than float32.
SUM_MUST: Mapping[str, float] = {FLOAT32: 3.7}
STEP_MUST: Mapping[str, float] = {FLOAT16: 1.7}


def reductions(bytes_: int) -> dict[str, Contender]:
    """Return an allreduce of `bytes_` of float32 for each compression."""
    tensor = torch.randn(bytes_ // 4)

    def by(name: str, compression: Compressor[torch.Tensor]) -> Contender:
        return Contender(lambda: hvd.allreduce(tensor, name=f"{name}.{bytes_}", compression=compression), lambda: None)

    return {name: by(name, compression) for name, compression in WAYS.items()}


def steps() -> dict[str, Contender]:
    """Return a training step for each compression, each of a model of its own."""
    rows = torch.randn(8, 1024)

    def by(compression: Compressor[torch.Tensor]) -> Contender:
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6)))
        sgd = torch.optim.SGD(net.parameters(), lr=1e-6)
        optimizer = hvd.DistributedOptimizer(sgd, net.named_parameters(), compression=compression)

        def run() -> None:
            net(rows).square().mean().backward()
            optimizer.step()

        return Contender(run, optimizer.zero_grad)

    return {name: by(compression) for name, compression in STEPS.items()}


def measure(bench: BenchRank) -> dict[str, Times]:
    """Measure as one rank; return the times by title and contender."""
    rounds = int(str(bench.options["rounds"]))
    context = bench.context("ours", Config.from_environment(interface=bench.interface), hosts=True)
    with context, peers.within(context):
        repeats = 5 if bench.options["full"] else 3
        results = {title_of(size): peers.take_turns(bench, reductions(size), rounds, repeats) for size in SIZES}
        results[STEP] = peers.take_turns(bench, steps(), rounds, repeats)
    return results


def title_of(size: int) -> str:
    return f"allreduce of {size_text(size)}"


def main() -> None:
    given = peers.arguments(__doc__).parse_args()
    problem = shaping_problem()
    if problem:
        sys.stdout.write(f"{problem}\n")
        return
    with shaped_hosts(GBIT) as (names, addresses):
        ranks = peers.run_ranks(
            __file__,
            2,
            LAUNCHERS["plain"],
            {"rounds": given.rounds, "full": given.full},
            prefixes=[inside(name) for name in names],
            interfaces=addresses,
        )
    races = peers.races_of(ranks)
    lines: list[Line] = []
    for title, race in races.items():
        lines += compare(title, race, STEP_MUST if title == STEP else SUM_MUST if "32 MiB" in title else {})
    sys.stdout.write(f"{table(f'int8 on {GBIT} Gbit/s, 2 hosts', lines)}\n")
    for title, race in races.items():
        rates = {name: spread([rate(title, each) for each in seconds]).median for name, seconds in race.seconds.items()}
        sys.stdout.write(f"{title}: {', '.join(f'{name} {value:.2f}' for name, value in rates.items())}\n")
    sys.stdout.write(f"{record('compression', races, ('farandole', 'torch'), lines)}\n")


def rate(title: str, seconds: float) -> float:
    """Return the float32 bytes that each of two ranks reduces in a second, as a multiple of the link's rate."""
    bytes_ = next((size for size in SIZES if title == title_of(size)), 24 * MIB)
    return bytes_ * 8 / (GBIT * 1e9) / seconds


if __name__ == "__main__":
    bench = peers.bench_rank_of(sys.argv)
    if bench is None:
        main()
    else:
        bench.leave(measure(bench))
