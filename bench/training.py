"""Steps per second of data-parallel training with 2 ranks, compared with torch's DistributedDataParallel.

    python bench/training.py [--full] [--rounds 5] [--shape NAME]... [--loaded]

The models are a small convolutional net, big linear layers, many small layers, and an embedding with a dense or a
sparse gradient. Each contender trains its own copy from the same values with the same rows, in the same processes, with
one thread of torch per rank. At the end its parameters must be equal on all ranks, and close to those of the other
contenders. Some more steps are traced to show how much of the communication was within the backward pass. With --loaded
as many foreign processes as there are ranks compute all the time. Prints steps per second and one table; writes
bench/results/*-training.json, or *-training-loaded.json."""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import peers
import torch
import torch.distributed as dist
from comparison import OURS, Line, compare, table
from peers import BenchRank, Contender, Times
from race import Race, record, spread
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farandole.torch as hvd
from farandole.config import Config
from farandole.core import default
from farandole.core.monitoring.timeline import timeline_path
from farandole.torch.distributed import register

RANKS = 2
DDP, DDP_VIEWS, DDP_OURS = "DDP/gloo", "DDP/gloo, gradients as views", "DDP/farandole"
APART, ALONE = "both ranks, no communication", "one process alone"
COMMUNICATION, WITHIN = "communication", "of it within backward"
MUST: Mapping[str, float] = {DDP: 1.15, DDP_VIEWS: 1.15}
TRACED = 20  # steps
BATCHES = 4

Span = tuple[int, int]  # begin and end in nanoseconds
Wrap = Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, the rows of one batch, and the steps per timed operation."""

    model: Callable[[], nn.Module]
    rows: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    steps: int  # per timed operation
    sparse: bool = False  # whether gradients of embeddings are sparse


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 7 * 7, 28), nn.ReLU(), nn.Linear(28, 10),
    )  # fmt: skip


def big_layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(),
        nn.Linear(1024, 10),
    )  # fmt: skip


def many_layers() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(100) for layer in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 10))


def embedding(sparse: bool) -> nn.Module:
    return nn.Sequential(
        nn.EmbeddingBag(100_000, 64, mode="mean", sparse=sparse), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def pictures(size: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, *shape), torch.randint(10, (size,))


def words() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(100_000, (256, 32)), torch.randint(10, (256,))


SHAPES: Mapping[str, Shape] = {
    "cnn": Shape(convolutions, lambda: pictures(64, 1, 28, 28), 20),
    "mlp": Shape(big_layers, lambda: pictures(64, 784), 4),
    "many layers": Shape(many_layers, lambda: pictures(64, 64), 10),
    "embedding": Shape(lambda: embedding(False), words, 4),
    "sparse embedding": Shape(lambda: embedding(True), words, 20, sparse=True),
}


class Training:
    """A contender's copy of the model, and its steps."""

    def __init__(self, shape: Shape, rank: int, wrap: Wrap) -> None:
        torch.manual_seed(1)
        self._model, self._optimizer = wrap(model := shape.model())
        self._parameters = list(model.parameters())
        torch.manual_seed(2 + rank)
        self._batches = [shape.rows() for _ in range(BATCHES)]
        self._steps = shape.steps
        self._place = 0
        self.backward: list[Span] = []

    def run(self) -> None:
        for _ in range(self._steps):
            self.step()

    def step(self) -> None:
        inputs, targets = self._batches[self._place % BATCHES]
        self._place += 1
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self._model(inputs), targets)
        begin = time.perf_counter_ns()
        loss.backward()
        self.backward.append((begin, time.perf_counter_ns()))
        self._optimizer.step()

    def values(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self._parameters])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def alone(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, sgd(model)


def distributed(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, hvd.DistributedOptimizer(sgd(model), model.named_parameters())


def ddp(
    model: nn.Module, *, views: bool = False, group: dist.ProcessGroup | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=views), sgd(model)


def measure(bench: BenchRank) -> dict[str, Times]:
    """Measure as one rank; return the times by title and contender."""
    rounds, repeats = int(str(bench.options["rounds"])), int(str(bench.options["repeats"]))
    titles = bench.options["shapes"]
    assert isinstance(titles, list)
    results: dict[str, Times] = {}
    with ExitStack() as stack:
        stack.enter_context(bench.gloo())
        register()
        group = dist.new_group(backend="farandole")
        context = stack.enter_context(bench.context("ours", Config.from_environment()))
        for title in titles:
            shape = SHAPES[title]
            trainings: dict[str, Training] = {
                DDP: Training(shape, bench.rank, ddp),
                DDP_VIEWS: Training(shape, bench.rank, partial(ddp, views=True)),
            }
            if not shape.sparse:  # only gloo reduces sparse tensors in torch.distributed
                trainings[DDP_OURS] = Training(shape, bench.rank, partial(ddp, group=group))
            with default.use(context):
                trainings = {OURS: Training(shape, bench.rank, distributed), **trainings}
            contenders = {name: Contender(each.run, _nothing) for name, each in trainings.items()}
            contenders[OURS] = Contender(trainings[OURS].run, _nothing, context=context)
            contenders[APART] = Contender(Training(shape, bench.rank, alone).run, _nothing)
            lonely = Training(shape, bench.rank, alone).run
            contenders[ALONE] = Contender(lonely if bench.rank == 0 else _nothing, _nothing)
            results[title] = peers.take_turns(bench, contenders, rounds, repeats)
            compare_parameters(title, {name: each.values() for name, each in trainings.items()})
            results[f"{title}: {COMMUNICATION}"] = trace(bench, title)
    return results


def _nothing() -> None:
    """Do nothing: for contenders without preparation, and ranks that do not take part."""


def compare_parameters(title: str, values: Mapping[str, torch.Tensor]) -> None:
    """Raise `AssertionError` unless ranks have equal parameters, and contenders close ones."""
    for name, mine in values.items():
        theirs = mine.clone()
        dist.broadcast(theirs, 0)
        assert torch.equal(mine, theirs), f"{title}: {name} has other parameters on another rank"
        alike = torch.allclose(mine, values[OURS], rtol=1e-3, atol=1e-5)
        assert alike, f"{title}: {name} has come to other parameters than {OURS}"


def trace(bench: BenchRank, title: str) -> Times:
    """Train with a timeline; return the time of communication and its part within the backward pass, for each step."""
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder:
        path = str(Path(folder, "trace.json"))
        with bench.context(f"{title} traced", Config.from_environment(timeline=path)) as context, default.use(context):
            training = Training(SHAPES[title], bench.rank, distributed)
            for _ in range(TRACED):
                training.step()
        events = json.loads(timeline_path(path, bench.rank).read_text(encoding="utf-8"))
    spans = joined(
        (int(1e3 * each["ts"]), int(1e3 * (each["ts"] + each["dur"])))
        for each in events
        if each["ph"] == "X" and each["name"] not in ("negotiate", "queue")
    )
    found: Times = {OURS: [], WITHIN: []}
    starts = [begin for begin, _ in training.backward] + [spans[-1][1] + 1]
    for place, backward in enumerate(training.backward):
        mine = [span for span in spans if starts[place] <= span[0] < starts[place + 1]]
        # Only rank 0's times count; the other ranks' are similar.
        found[OURS].append([(0, sum(end - begin for begin, end in mine) if bench.rank == 0 else 0)])
        found[WITHIN].append([(0, sum(common(span, backward) for span in mine) if bench.rank == 0 else 0)])
    return {name: steps[1:] for name, steps in found.items()}  # without the first step, which allocates buffers


def joined(spans: Iterable[Span]) -> list[Span]:
    """Return the spans sorted, with overlapping ones joined: fused operations share their time."""
    whole: list[Span] = []
    for begin, end in sorted(spans):
        if whole and begin <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(end, whole[-1][1]))
        else:
            whole.append((begin, end))
    return whole


def common(one: Span, other: Span) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def per_step(title: str, race: Race) -> Race:
    """Return the race with seconds per step instead of per timed operation."""
    steps = SHAPES[title].steps
    return Race({name: [each / steps for each in values] for name, values in race.seconds.items()})


def speeds(races: Mapping[str, Race]) -> str:
    """Return the steps per second of each contender as text: minimum, median and maximum of the rounds."""
    lines = ["steps per second (min / median / max)"]
    for title, race in races.items():
        for name, seconds in race.seconds.items():
            lines.append(f"  {title:<18}{name:<32}{spread([1 / each for each in seconds])}")
    return "\n".join(lines)


def main() -> None:
    parser = peers.arguments(__doc__)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="only this model; may be given several times")
    parser.add_argument("--loaded", action="store_true", help="beside foreign processes that compute")
    given = parser.parse_args()
    titles: Sequence[str] = given.shape or list(SHAPES)
    options = {"rounds": given.rounds, "repeats": 10 if given.full else 3, "shapes": titles}
    with peers.busy(RANKS if given.loaded else 0):
        found = peers.races_of(peers.run_ranks(__file__, RANKS, peers.LAUNCHERS["plain"], options))
    races = {title: per_step(title, found[title]) for title in titles}
    lines: list[Line] = [line for title, race in races.items() for line in compare(title, race, MUST)]
    shares: list[Line] = []  # of a time, which no other contender has
    for title in titles:
        shares += compare(f"{title}: {COMMUNICATION}", found[f"{title}: {COMMUNICATION}"], {})
    what, name = "a step of training, 2 ranks", "training"
    if given.loaded:
        what, name = f"{what} beside {RANKS} foreign processes", "training-loaded"
    sys.stdout.write(f"{speeds(races)}\n{table(what, [*lines, *shares])}\n")
    sys.stdout.write(f"{record(name, found | races, ('farandole', 'torch'), lines)}\n")


if __name__ == "__main__":
    bench = peers.bench_rank_of(sys.argv)
    if bench is None:
        main()
    else:
        bench.leave(measure(bench))
