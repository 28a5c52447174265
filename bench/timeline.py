"""Cost of writing a timeline, with 2 ranks.

    python bench/timeline.py [--full] [--rounds 11] [--what NAME]...

Training of the torch models of bench/training.py, and streams of nothing but 4 KiB allreduces, run with a timeline and
without one, in turns of about a second, in the same processes, with the same model and context. A turn ends when its
events are on disk. Prints the loss of speed in per cent and one table; writes bench/results/*-timeline.json."""

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import peers
import torch
from comparison import OURS, Line, compare, table
from peers import BenchRank, Contender, Times
from race import Race, record, spread
from training import SHAPES, Training, distributed

import farandole.torch as hvd
from farandole.config import Config
from farandole.core import default
from farandole.core.context import Context

RANKS = 2
WITHOUT = "no timeline"
LEAST = 0.98  # least share of the speed without a timeline
MLP, MANY, ONE_BY_ONE, BURSTS = "mlp", "many layers", "4 KiB one by one", "4 KiB, 200 at once"
COUNTS = {MLP: 10, MANY: 100, ONE_BY_ONE: 100_000, BURSTS: 500}  # operations of a turn
TENSORS = 200


def measure(bench: BenchRank) -> dict[str, Times]:
    """Measure as one rank; return the times by title and contender."""
    rounds, length = int(str(bench.options["rounds"])), int(str(bench.options["length"]))
    titles = bench.options["titles"]
    assert isinstance(titles, list)
    results: dict[str, Times] = {}
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder:
        path = Path(folder, "trace.json")
        with bench.context("ours", Config.from_environment()) as context:
            for title in titles:
                with default.use(context):
                    work = WORKS[title](bench)
                results[title] = peers.take_turns(
                    bench, contenders(context, work, COUNTS[title] * length, path), rounds, 1
                )
    return results


def contenders(context: Context, work: Callable[[], object], count: int, path: Path) -> dict[str, Contender]:
    """Return the contenders: the same work with a timeline and without."""

    def run() -> None:
        for _ in range(count):
            work()

    def run_traced() -> None:
        run()
        context.timeline.stop()

    return {
        OURS: Contender(run_traced, lambda: context.timeline.start(path), context=context),
        WITHOUT: Contender(run, lambda: None, context=context),
    }


def train(title: str) -> Callable[[BenchRank], Callable[[], object]]:
    return lambda bench: Training(SHAPES[title], bench.rank, distributed).step


def one_by_one(bench: BenchRank) -> Callable[[], object]:
    tensor = torch.ones(1024)
    return lambda: hvd.allreduce_(tensor, name="stream")


def bursts(bench: BenchRank) -> Callable[[], object]:
    named = [(torch.ones(1024), f"burst.{number}") for number in range(TENSORS)]

    def burst() -> None:
        handles = [hvd.allreduce_async_(tensor, name=name) for tensor, name in named]
        for handle in handles:
            hvd.synchronize(handle)

    return burst


WORKS: Mapping[str, Callable[[BenchRank], Callable[[], object]]] = {
    MLP: train(MLP),
    MANY: train(MANY),
    ONE_BY_ONE: one_by_one,
    BURSTS: bursts,
}


def losses(races: Mapping[str, Race]) -> str:
    """Return the loss of speed by the timeline as text: minimum, median and maximum of the rounds."""
    lines = ["loss of speed in % (min / median / max)"]
    for title, race in races.items():
        lines.append(f"  {title:<24}{spread([100 * (1 - ratio) for ratio in race.ratios(OURS)[WITHOUT]])}")
    return "\n".join(lines)


def main() -> None:
    parser = peers.arguments(__doc__)
    parser.add_argument("--what", action="append", choices=WORKS, help="only this; may be given several times")
    parser.set_defaults(rounds=11)
    given = parser.parse_args()
    titles = given.what or list(WORKS)
    options = {"rounds": given.rounds, "length": 3 if given.full else 1, "titles": titles}
    races = peers.races_of(peers.run_ranks(__file__, RANKS, peers.LAUNCHERS["plain"], options))
    lines: list[Line] = [line for title in titles for line in compare(title, races[title], {WITHOUT: LEAST})]
    sys.stdout.write(f"{losses(races)}\n{table('a timeline being written, 2 ranks', lines)}\n")
    sys.stdout.write(f"{record('timeline', races, ('farandole', 'torch'), lines)}\n")


if __name__ == "__main__":
    bench = peers.bench_rank_of(sys.argv)
    if bench is None:
        main()
    else:
        bench.leave(measure(bench))
