"""Collectives and training with CUDA tensors, compared with torch.distributed.

    python bench/gpu.py [--full] [--rounds 5] [--part NAME]... [--dry]

There are three parts. "staged": two ranks on one GPU, an allreduce through host memory, compared with gloo on the same
tensors. "nccl": an allreduce with NCCL, compared with torch's NCCL backend; one rank for each GPU, so one GPU shows the
overhead of the call. "resnet": ResNet-50 on synthetic pictures with bf16 autocast, with DistributedOptimizer and with
DDP over NCCL: the time of a step, and the host's time for a step. All contenders take turns. A measurement ends when
the GPU has the result, except that of the host's time. Prints one table and writes bench/results/*-gpu.json.

`--dry` runs everything on the CPU with small tensors and gloo instead of NCCL. It shows that the program works; its
times mean nothing."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

import peers
import torch
import torch.distributed as dist
from comparison import KIB, MIB, OURS, Line, compare, size_text, table
from peers import BenchRank, Contender, Times
from race import record
from resnet import resnet50
from torch.nn.parallel import DistributedDataParallel

import farandole.torch as hvd
from farandole.config import Config
from farandole.core.default import use

GLOO, NCCL, DDP = "gloo", "torch's NCCL", "DDP over NCCL"
SIZES: Sequence[int] = (64 * KIB, 4 * MIB, 64 * MIB)
STEP, HOST = "a step of ResNet-50", "the host's time of a step of ResNet-50"
OVERHEAD = 1 / 1.1  # ours may take 1.1 times as long
MUST: Mapping[str, Mapping[str, float]] = {
    f"staged allreduce of {size_text(SIZES[-1])}": {GLOO: 5.0},
    **{f"allreduce of {size_text(size)}": {NCCL: OVERHEAD} for size in SIZES},
    STEP: {DDP: 1.0},
    HOST: {DDP: 1.0},
}


class OwnDevice:
    """The device of a rank, and the number of rounds and repeats."""

    def __init__(self, bench: BenchRank, gpu: int) -> None:
        self.is_dry = bool(bench.options["dry"])
        self.device = torch.device("cpu") if self.is_dry else torch.device("cuda", gpu)
        self.rounds, self.repeats = int(str(bench.options["rounds"])), int(str(bench.options["repeats"]))
        if not self.is_dry:
            torch.cuda.set_device(self.device)

    def wait(self) -> None:
        """Block until the device has done all submitted work."""
        if not self.is_dry:
            torch.cuda.synchronize()

    def repeats_of(self, size: int) -> int:
        """Return how often to repeat an operation on `size` bytes."""
        return self.repeats if size < MIB else max(5, self.repeats // 10)


def operation(bench: BenchRank, own: OwnDevice, size: int, reduce: Callable[[torch.Tensor], object]) -> Contender:
    tensor = torch.empty(KIB if own.is_dry else size // 4, device=own.device)

    def run() -> None:
        reduce(tensor)
        own.wait()

    def refresh() -> None:
        tensor.fill_(1.5)
        own.wait()

    return Contender(run, refresh, lambda: bool((tensor == 1.5 * bench.size).all()))


def ours(tensor: torch.Tensor) -> torch.Tensor:
    return hvd.allreduce_(tensor, op=hvd.Sum, name="x")


def staged(bench: BenchRank) -> dict[str, Times]:
    """Measure allreduces of ranks that share a GPU."""
    own = OwnDevice(bench, 0)
    results: dict[str, Times] = {}
    with bench.context("staged", Config()) as context, use(context):
        for size in SIZES:
            contenders = {
                OURS: operation(bench, own, size, ours),
                GLOO: operation(bench, own, size, dist.all_reduce),
            }
            title = f"staged allreduce of {size_text(size)}"
            results[title] = peers.take_turns(bench, contenders, own.rounds, own.repeats_of(size))
    return results


def nccl_group(own: OwnDevice) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend="gloo" if own.is_dry else "nccl")
    return group


def demanded() -> Config:
    """Return a configuration that requires NCCL; without it farandole could use host memory silently."""
    return Config(gpu_allreduce="nccl", gpu_broadcast="nccl")


def by_nccl(bench: BenchRank) -> dict[str, Times]:
    """Measure allreduces of ranks with one GPU each."""
    own = OwnDevice(bench, bench.rank)
    group = nccl_group(own)
    results: dict[str, Times] = {}
    with bench.context("nccl", demanded()) as context, use(context):
        for size in SIZES:
            contenders = {
                OURS: operation(bench, own, size, ours),
                NCCL: operation(bench, own, size, lambda tensor: dist.all_reduce(tensor, group=group)),
            }
            title = f"allreduce of {size_text(size)}"
            results[title] = peers.take_turns(bench, contenders, own.rounds, own.repeats_of(size))
    return results


class Training:
    """ResNet-50 and its pictures on the device."""

    def __init__(self, own: OwnDevice, wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
        torch.manual_seed(1)
        rows, side = (2, 32) if own.is_dry else (64, 224)
        self._own = own
        net = resnet50().to(own.device, memory_format=torch.channels_last)
        self.model = wrap(net)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        pictures = torch.randn(rows, 3, side, side, device=own.device)
        self._pictures = pictures.contiguous(memory_format=torch.channels_last)
        self._classes = torch.randint(1000, (rows,), device=own.device)

    def start(self) -> None:
        """Submit a step to the device without waiting for it."""
        self.optimizer.zero_grad()
        with torch.autocast(self._own.device.type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(self.model(self._pictures), self._classes)
        loss.backward()
        self.optimizer.step()

    def step(self) -> None:
        self.start()
        self._own.wait()


def resnet(bench: BenchRank) -> dict[str, Times]:
    """Measure training of ranks with one GPU each: the step, and the host's time for it."""
    own = OwnDevice(bench, bench.rank)
    group = nccl_group(own)
    mine = Training(own, lambda net: net)
    gpus = None if own.is_dry else [bench.rank]
    theirs = Training(own, lambda net: DistributedDataParallel(net, device_ids=gpus, process_group=group))
    repeats = max(3, own.repeats // 10)
    with bench.context("resnet", demanded()) as context, use(context):
        mine.optimizer = hvd.DistributedOptimizer(mine.optimizer, mine.model.named_parameters())
        trainings = {OURS: mine, DDP: theirs}
        whole = {name: Contender(each.step, own.wait) for name, each in trainings.items()}
        host = {name: Contender(each.start, own.wait) for name, each in trainings.items()}
        return {
            STEP: peers.take_turns(bench, whole, own.rounds, repeats),
            HOST: peers.take_turns(bench, host, own.rounds, repeats),
        }


PARTS: Mapping[str, Callable[[BenchRank], dict[str, Times]]] = {"staged": staged, "nccl": by_nccl, "resnet": resnet}


def measure(bench: BenchRank) -> dict[str, Times]:
    """Measure the part that the options name, as one rank."""
    with bench.gloo():
        return PARTS[str(bench.options["part"])](bench)


def arguments() -> argparse.ArgumentParser:
    parser = peers.arguments(__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; may be given several times")
    parser.add_argument("--dry", action="store_true", help="on the CPU, to try the program; measures nothing")
    return parser


def main() -> None:
    given = arguments().parse_args()
    gpus = 1 if given.dry else torch.cuda.device_count()
    if not gpus:
        sys.stdout.write("gpu is left out: it needs a GPU, and PyTorch's CUDA build (make setup TORCH=cuda).\n")
        return
    repeats = 3 if given.dry else 400 if given.full else 100
    options = {"rounds": 1 if given.dry else given.rounds, "repeats": repeats, "dry": given.dry}
    races = {}
    for part in given.part or PARTS:
        size = 2 if part == "staged" else gpus
        ranks = peers.run_ranks(__file__, size, peers.LAUNCHERS["plain"], {**options, "part": part})
        races |= peers.races_of(ranks)
    musts: Mapping[str, Mapping[str, float]] = {} if given.dry else MUST
    lines: list[Line] = [line for title, race in races.items() for line in compare(title, race, musts.get(title, {}))]
    if given.dry:
        sys.stdout.write(f"{table('a trial on the CPU, which measures nothing', lines)}\n")
        return
    sys.stdout.write(f"{table(f'CUDA tensors, {gpus} x {torch.cuda.get_device_name()}', lines)}\n")
    sys.stdout.write(f"{record('gpu', races, ('farandole', 'torch'), lines)}\n")


if __name__ == "__main__":
    bench = peers.bench_rank_of(sys.argv)
    if bench is None:
        main()
    else:
        bench.leave(measure(bench))
