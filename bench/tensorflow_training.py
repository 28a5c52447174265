"""Steps per second of a Keras model with 2 ranks, compared with tf.distribute.MultiWorkerMirroredStrategy.

    python bench/tensorflow_training.py [--full] [--rounds 5] [--shape NAME]...

Each contender has two processes of its own, because their place in the cluster must be set before TensorFlow starts;
each operation uses one thread. The contenders take turns: while one trains, the other's processes wait for input. The
strategy reduces with its ring over gRPC. Each contender trains its own copy of the model from the same values with the
same batches, in a `tf.function`. At the end the parameters must be equal on both ranks, and close to those of the other
contender. Prints steps per second and one table; writes bench/results/*-tensorflow_training.json."""

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from comparison import OURS, Line, compare, table
from launch import free_port
from race import Race, race, record, spread

from farandole.launch.job import open_job

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

RANKS = 2
STRATEGY, APART = "MultiWorkerMirroredStrategy", "both ranks, no communication"
MUST: Mapping[str, float] = {STRATEGY: 1.3}
BATCHES = 4
PATIENCE = 120.0  # seconds until a process answers
ANSWER = "answer "  # prefix of the lines that are answers

Batch = tuple[np.ndarray, np.ndarray]
Gradients = list["tf.Tensor | tf.IndexedSlices"]
Step = Callable[["tf.Tensor", "tf.Tensor"], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, the rows of one batch, and the steps per timed operation."""

    model: Callable[[], "keras.Model"]
    rows: Callable[[np.random.Generator], Batch]
    steps: int  # per timed operation
    dense: bool = False  # convert gradients of embeddings to dense tensors


def convolutions() -> "keras.Model":
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input((28, 28, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(28, activation="relu"),
            layers.Dense(10),
        ]
    )


def layers_of(width: int, *units: int) -> "keras.Model":
    from keras import Input, Sequential, layers

    return Sequential([Input((width,)), *(layers.Dense(each, activation="relu") for each in units), layers.Dense(10)])


def embedding() -> "keras.Model":
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input((32,), dtype="int32"),
            layers.Embedding(100_000, 64),
            layers.GlobalAveragePooling1D(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def pictures(random: np.random.Generator, rows: int, *shape: int) -> Batch:
    return random.standard_normal((rows, *shape), dtype=np.float32), random.integers(10, size=rows, dtype=np.int32)


def words(random: np.random.Generator) -> Batch:
    return random.integers(100_000, size=(256, 32), dtype=np.int32), random.integers(10, size=256, dtype=np.int32)


SHAPES: Mapping[str, Shape] = {
    "cnn": Shape(convolutions, lambda random: pictures(random, 64, 28, 28, 1), 20),
    "mlp": Shape(lambda: layers_of(784, 2048, 2048, 1024), lambda random: pictures(random, 64, 784), 4),
    "many layers": Shape(lambda: layers_of(64, *[64] * 100), lambda random: pictures(random, 64, 64), 10),
    "embedding": Shape(embedding, words, 4, dense=True),
    "sparse embedding": Shape(embedding, words, 20),
}


# The process of a rank, which executes the requests on its standard input.


class Training:
    """One contender's copy of the model on one rank, and its steps."""

    def __init__(self, shape: Shape, rank: int, contender: str, strategy: "tf.distribute.Strategy | None") -> None:
        import keras
        import tensorflow as tf

        keras.utils.set_random_seed(1)
        with ExitStack() as stack:
            if strategy is not None:
                stack.enter_context(strategy.scope())
            self._model = shape.model()
            self._optimizer = keras.optimizers.SGD(0.01)
            self._optimizer.build(self._model.trainable_variables)
        self._step = self._compiled(shape, contender, strategy)
        random = np.random.default_rng(2 + rank)
        self._batches = [tuple(map(tf.constant, shape.rows(random))) for _ in range(BATCHES)]
        self._place = 0

    def _compiled(self, shape: Shape, contender: str, strategy: "tf.distribute.Strategy | None") -> Step:
        import tensorflow as tf

        # Keras sums the gradients of a strategy's replicas.
        share = 1.0 if strategy is None else 1.0 / RANKS

        def step(inputs: tf.Tensor, targets: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                logits = self._model(inputs, training=True)
                loss = share * tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits))
            if contender == OURS:
                import farandole.tensorflow as hvd

                tape = hvd.DistributedGradientTape(tape, sparse_as_dense=shape.dense)
            gradients: Gradients = tape.gradient(loss, self._model.trainable_variables)
            if shape.dense:
                gradients = [tf.convert_to_tensor(each) for each in gradients]
            self._optimizer.apply(gradients, self._model.trainable_variables)

        if strategy is None:
            return tf.function(step)
        return tf.function(lambda inputs, targets: strategy.run(step, (inputs, targets)))

    def run(self, steps: int) -> tuple[int, int]:
        """Train; return begin and end in nanoseconds of a clock that all processes share."""
        begin = time.perf_counter_ns()
        for _ in range(steps):
            self._step(*self._batches[self._place % BATCHES])
            self._place += 1
        # A tf.function may return before its work is done; reading a variable waits for it.
        last = self._model.trainable_variables[-1].numpy()
        end = time.perf_counter_ns()
        assert np.isfinite(last).all()
        return begin, end

    def save(self, path: str) -> None:
        np.save(path, np.concatenate([each.numpy().ravel() for each in self._model.trainable_variables]))


def be_rank(kind: str, rank: int) -> None:
    """Execute the requests on standard input, one per line, and print an answer for each, until the input ends."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    strategy = ring() if kind == STRATEGY else None
    if kind == OURS:
        import farandole.tensorflow as hvd

        hvd.init()
    trainings: dict[str, Training] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        contender, answer = asked["contender"], None
        if "make" in asked:
            trainings[contender] = Training(SHAPES[asked["make"]], rank, contender, strategy)
        elif "run" in asked:
            answer = trainings[contender].run(asked["run"])
        else:
            trainings.pop(contender).save(f"{asked['save']}.{rank}.npy")
        sys.stdout.write(f"{ANSWER}{json.dumps(answer)}\n")
        sys.stdout.flush()


def ring() -> "tf.distribute.Strategy":
    import tensorflow as tf

    distribute = tf.distribute.experimental
    options = distribute.CommunicationOptions(implementation=distribute.CommunicationImplementation.RING)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


# The benchmark's process, which sends the requests.


class Ranks:
    """The two processes of farandole or of the strategy."""

    def __init__(self, kind: str, environments: Sequence[Mapping[str, str]], errors: Path) -> None:
        self._errors = errors
        with errors.open("wb") as file:
            self._processes = [
                subprocess.Popen(
                    [sys.executable, __file__, "--as", kind, str(rank)],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    bufsize=0,  # bytes in a buffer would be invisible to the selector
                )
                for rank, environment in enumerate(environments)
            ]

    def ask(self, **what: object) -> list[object]:
        """Send both the same request; return the answers by rank. Raises `RuntimeError` if one does not answer."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(what).encode() + b"\n")
            process.stdin.flush()
        deadline = time.monotonic() + PATIENCE
        return [self._answer(process, deadline) for process in self._processes]

    def _answer(self, process: "subprocess.Popen[bytes]", deadline: float) -> object:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                line = process.stdout.readline().decode()
                if line.startswith(ANSWER):
                    return json.loads(line.removeprefix(ANSWER))
                if not line:
                    break
        end = self._errors.read_text(encoding="utf-8", errors="replace")[-4000:]
        raise RuntimeError(f"a rank has ended, or said nothing for {PATIENCE:g} s:\n{end}")

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()


@contextmanager
def all_ranks() -> Iterator[dict[str, Ranks]]:
    """Start the processes and yield them by contender; kill them at the end of the block."""
    base = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": ""}
    workers = [f"127.0.0.1:{free_port()}" for _ in range(RANKS)]
    clusters = [
        {**base, "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})}
        for rank in range(RANKS)
    ]
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder, open_job(RANKS, base) as job:
        ours = Ranks(OURS, [place.env for place in job.places], Path(folder, "ours"))
        theirs = Ranks(STRATEGY, clusters, Path(folder, "theirs"))
        try:
            yield {OURS: ours, STRATEGY: theirs, APART: ours}
        finally:
            ours.end()
            theirs.end()


def measure(title: str, ranks: Mapping[str, Ranks], rounds: int, longer: int) -> Race:
    """Train all contenders in turns; return the seconds of one step."""
    steps = SHAPES[title].steps * longer

    def turn(contender: str) -> float:
        ranks[contender].ask(contender=contender, run=1)  # synchronizes the ranks
        times = np.array(ranks[contender].ask(contender=contender, run=steps))
        return float(times[:, 1].max() - times[:, 0].min()) / steps / 1e9

    for contender, group in ranks.items():
        group.ask(contender=contender, make=title)
        group.ask(contender=contender, run=2)
    found = race({contender: lambda contender=contender: turn(contender) for contender in ranks}, rounds)
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder:
        for contender, group in ranks.items():
            group.ask(contender=contender, save=str(Path(folder, contender)))
        compare_parameters(title, {each: saved(Path(folder, each)) for each in (OURS, STRATEGY)})
    return found


def saved(path: Path) -> list[np.ndarray]:
    return [np.load(f"{path}.{rank}.npy") for rank in range(RANKS)]


def compare_parameters(title: str, values: Mapping[str, Sequence[np.ndarray]]) -> None:
    """Raise `AssertionError` unless ranks have equal parameters, and contenders close ones."""
    for name, (one, other) in values.items():
        assert np.array_equal(one, other), f"{title}: {name} has other parameters on another rank"
        alike = np.allclose(one, values[OURS][0], rtol=1e-3, atol=1e-4)
        assert alike, f"{title}: {name} has come to other parameters than {OURS}"


def speeds(races: Mapping[str, Race]) -> str:
    """Return the steps per second of each contender as text: minimum, median and maximum of the rounds."""
    lines = ["steps per second (min / median / max)"]
    for title, found in races.items():
        for name, seconds in found.seconds.items():
            lines.append(f"  {title:<18}{name:<32}{spread([1 / each for each in seconds])}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="more steps in each turn")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which each contender has its turn")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="only this model; may be given several times")
    given = parser.parse_args()
    if find_spec("tensorflow") is None:
        sys.exit("tensorflow_training is left out: TensorFlow is not installed.")
    # Without this handler the ranks would still run after SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with all_ranks() as ranks:
        races = {title: measure(title, ranks, given.rounds, 10 if given.full else 3) for title in given.shape or SHAPES}
    lines: list[Line] = [line for title, race in races.items() for line in compare(title, race, MUST)]
    sys.stdout.write(f"{speeds(races)}\n{table('a step of training in TensorFlow, 2 ranks', lines)}\n")
    sys.stdout.write(f"{record('tensorflow_training', races, ('farandole', 'tensorflow', 'keras'), lines)}\n")


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "--as":
        be_rank(sys.argv[2], int(sys.argv[3]))
    else:
        main()
