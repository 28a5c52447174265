"""Cost of reducing a tape's gradients in TensorFlow's eager mode, in one request and one by one.

    python bench/eager.py [--full] [--rounds 5]

Two ranks, each with one thread for TensorFlow's operations. "exchange" is only the reduction of given gradients; "tape"
also has the backward pass that makes them. "one by one" waits for each gradient before the next one is requested, as an
eager tape without grouping does. Prints one table and writes bench/results/*-eager.json."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import peers
import tensorflow as tf
from comparison import KIB, OURS, Line, compare, size_text, table
from peers import BenchRank, Contender, Times
from race import record

import farandole.tensorflow as hvd
from farandole.config import Config
from farandole.core.context import Context

RANKS, ONE_BY_ONE = 2, "one by one"
SHAPES: Sequence[tuple[int, int]] = ((100, 4 * KIB), (100, 64 * KIB), (20, 1024 * KIB))
# The least ratio for the reduction alone, with small gradients.
MUST: Mapping[str, float] = {f"exchange of {SHAPES[0][0]} x {size_text(SHAPES[0][1])}": 6.0}


class Step:
    """Variables whose gradients are known, and the reduced gradients."""

    def __init__(self, bench: BenchRank, count: int, size: int) -> None:
        self._variables = [tf.Variable(tf.ones(size // 4)) for _ in range(count)]
        self._mine, self._mean = bench.rank + 1.0, (bench.size + 1) / 2
        self._tape: Any = None
        self._loss: Any = None
        self._reduced: Sequence[Any] = []

    def record(self) -> None:
        """Run the forward pass; its gradients are this rank's number plus one."""
        with tf.GradientTape(persistent=True) as self._tape:
            self._loss = tf.add_n([tf.reduce_sum(variable * self._mine) for variable in self._variables])

    def differentiate(self) -> None:
        """Compute the gradients, untimed, for a measurement of the reduction alone."""
        self.record()
        self._gradients = self._tape.gradient(self._loss, self._variables)

    def tape(self) -> None:
        self._reduced = hvd.DistributedGradientTape(self._tape).gradient(self._loss, self._variables)

    def tape_one_by_one(self) -> None:
        self._one_by_one(self._tape.gradient(self._loss, self._variables))

    def exchange(self) -> None:
        self._reduced = hvd.grouped_allreduce(self._gradients, name="gradients")

    def exchange_one_by_one(self) -> None:
        self._one_by_one(self._gradients)

    def _one_by_one(self, gradients: Sequence[Any]) -> None:
        self._reduced = [hvd.allreduce(gradient, name=f"gradient.{place}") for place, gradient in enumerate(gradients)]

    def right(self) -> bool:
        return all(bool(tf.reduce_all(value == self._mean)) for value in self._reduced)


def measure(bench: BenchRank) -> dict[str, Times]:
    """Measure as one rank; return the times by title and contender."""
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    rounds, repeats = int(str(bench.options["rounds"])), int(str(bench.options["repeats"]))
    results: dict[str, Times] = {}
    with bench.context("eager", Config.from_environment()) as context:
        for count, size in SHAPES:
            step = Step(bench, count, size)

            def contender(run: Any, refresh: Any, step: Step = step, context: Context = context) -> Contender:
                return Contender(run, refresh, step.right, context)

            ways = {
                "exchange": (step.exchange, step.exchange_one_by_one, step.differentiate),
                "tape": (step.tape, step.tape_one_by_one, step.record),
            }
            for title, (ours, theirs, refresh) in ways.items():
                contenders = {OURS: contender(ours, refresh), ONE_BY_ONE: contender(theirs, refresh)}
                results[f"{title} of {count} x {size_text(size)}"] = peers.take_turns(
                    bench, contenders, rounds, repeats
                )
    return results


def main() -> None:
    given = peers.arguments(__doc__).parse_args()
    options = {"rounds": given.rounds, "repeats": 100 if given.full else 20}
    races = peers.races_of(peers.run_ranks(__file__, RANKS, peers.LAUNCHERS["plain"], options))
    lines: list[Line] = []
    for title, race in races.items():
        lines += compare(title, race, {ONE_BY_ONE: MUST[title]} if title in MUST else {})
    sys.stdout.write(f"{table('gradients of an eager tape, 2 ranks', lines)}\n")
    sys.stdout.write(f"{record('eager', races, ('farandole', 'tensorflow-cpu'), lines)}\n")


if __name__ == "__main__":
    bench = peers.bench_rank_of(sys.argv)
    if bench is None:
        main()
    else:
        bench.leave(measure(bench))
