"""Speed of farandole as a back end of torch.distributed, compared with gloo.

    python bench/torch_backend.py [--full] [--rounds 5]

Two ranks, each with one thread of torch, run `dist.all_reduce` of three sizes and steps of DistributedDataParallel and
fully_shard. One rank more than there are cores runs `dist.all_reduce`, alone, and beside a process that computes for
each core. The ranks have a process group of each back end in the same processes, and the back ends take turns. Prints
tables and writes bench/results/*-torch_backend.json."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import peers
import torch
import torch.distributed as dist
from comparison import KIB, MIB, OURS, Line, compare, size_text, table
from peers import BenchRank, Contender, Times
from race import Race, record
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
GLOO = "gloo"
SIZES: Sequence[int] = (4 * KIB, 1 * MIB, 25 * MIB)  # the last is the size of DDP's buckets
CROWDED_SIZES: Sequence[int] = (256 * KIB, 4 * MIB, 16 * MIB)
MUST: Mapping[str, float] = {GLOO: 1.0}


def all_reduce(group: dist.ProcessGroup, size: int) -> Contender:
    tensor = torch.empty(size // 4)

    def refresh() -> None:
        tensor.fill_(1.5)

    return Contender(
        lambda: dist.all_reduce(tensor, group=group), refresh, lambda: bool((tensor == 1.5 * group.size()).all())
    )


def ddp(model: torch.nn.Module, group: dist.ProcessGroup) -> torch.nn.Module:
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=4)


def fsdp(model: torch.nn.Module, group: dist.ProcessGroup) -> torch.nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


STEPS: Mapping[str, Callable[[torch.nn.Module, dist.ProcessGroup], torch.nn.Module]] = {
    "a step of DDP": ddp,
    "a step of fully_shard": fsdp,
}


def step(wrap: Callable[[torch.nn.Module, dist.ProcessGroup], torch.nn.Module], group: dist.ProcessGroup) -> Contender:
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(784, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 1024))
    model = wrap(layers, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.randn(64, 784)

    def run() -> None:
        model(rows).square().mean().backward()
        optimizer.step()

    return Contender(run, optimizer.zero_grad)


def measure(bench: BenchRank) -> dict[str, Times]:
    """Measure as one rank; return the times by title and contender."""
    rounds, repeats = int(str(bench.options["rounds"])), int(str(bench.options["repeats"]))
    with bench.gloo():
        gloo = dist.group.WORLD
        assert gloo is not None
        groups = {OURS: dist.new_group(backend="farandole"), GLOO: gloo}
        results: dict[str, Times] = {}
        for size in CROWDED_SIZES if bench.options["crowded"] else SIZES:
            contenders = {name: all_reduce(group, size) for name, group in groups.items()}
            results[f"all_reduce of {size_text(size)}"] = peers.take_turns(
                bench, contenders, rounds, repeats if size < MIB else max(5, repeats // 10)
            )
        for title, wrap in () if bench.options["crowded"] else STEPS.items():
            contenders = {name: step(wrap, group) for name, group in groups.items()}
            results[title] = peers.take_turns(bench, contenders, rounds, max(5, repeats // 10))
    return results


def main() -> None:
    given = peers.arguments(__doc__).parse_args()
    cores = os.cpu_count() or 1
    all_races: dict[str, Race] = {}
    all_lines: list[Line] = []
    for crowded, ranks, others in ((False, RANKS, 0), (True, cores + 1, 0), (True, cores + 1, cores)):
        options = {"rounds": given.rounds, "repeats": 400 if given.full else 100, "crowded": crowded}
        with peers.busy(others):
            races = peers.races_of(peers.run_ranks(__file__, ranks, peers.LAUNCHERS["plain"], options))
        beside = f", beside {others} processes that compute" if others else ""
        title = f"below torch.distributed, {ranks} ranks on {cores} cores{beside}"
        lines = [line for what, race in races.items() for line in compare(what, race, MUST)]
        sys.stdout.write(f"{table(title, lines)}\n\n")
        all_races |= {f"{what}, {ranks} ranks{beside}": race for what, race in races.items()}
        all_lines += [replace(line, what=f"{line.what}, {ranks} ranks{beside}") for line in lines]
    sys.stdout.write(f"{record('torch_backend', all_races, ('farandole', 'torch'), all_lines)}\n")


if __name__ == "__main__":
    bench = peers.bench_rank_of(sys.argv)
    if bench is None:
        main()
    else:
        bench.leave(measure(bench))
