"""Data services of TensorFlow: a job of workers and a training job, by Horovod's names.

One program counts rows, the other trains on digits, both below horovodrun and in Spark."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("sklearn")

from system.launched import farandole

pytestmark = [pytest.mark.native, pytest.mark.timeout(300)]

# They take minutes: each starts TensorFlow in six to ten processes.
every_way = pytest.mark.skipif(
    not os.environ.get("FARANDOLE_TEST_DATA_SERVICE"),
    reason="set FARANDOLE_TEST_DATA_SERVICE=1 for all ways of reading",
)

COMPAT = (sys.executable, "-m", "farandole.compat")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}

READ = """
import sys
import tensorflow as tf
import horovod.tensorflow as hvd
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service

hvd.init()
config = TfDataServiceConfig.read(sys.argv[1], wait_for_file_creation=True)
way, name = sys.argv[2], "job" if sys.argv[2] != "all" else None
dataset = tf.data.Dataset.range(40)
dataset = (dataset.repeat() if way == "turns" else dataset).batch(4)

def seen(dataset):
    return sorted(row for batch in (dataset.take(5) if way == "turns" else dataset) for row in batch.numpy().tolist())

def send(dataset):
    return dataset.send_to_data_service(
        config, hvd.rank(), hvd.size(), reuse_dataset=way != "all", round_robin=way == "turns"
    )

if config.dispatcher_side == "compute":
    rows = seen(send(dataset))
    if way == "shared":  # another one, which is not what is left of the first
        other = sum(hvd.allgather_object(seen(send(tf.data.Dataset.range(40, 60).batch(4)))), [])
        assert sorted(other) == list(range(40, 60)), other
else:
    with tf_data_service(config, hvd.rank()) as address:
        rows = seen(dataset.apply(tf.data.experimental.service.distribute("distributed_epoch", address, job_name=name)))
everything = hvd.allgather_object(rows)
if way == "all":
    assert everything == [list(range(40))] * hvd.size(), everything
elif way == "shared":
    assert sorted(sum(everything, [])) == list(range(40)), everything
else:
    assert [len(each) for each in everything] == [20] * hvd.size(), everything
hvd.barrier()
if hvd.rank() == 0:
    config.compute_client(verbose=2).shutdown()
"""

TRAIN = """
import sys
import horovod.tensorflow.keras as hvd
import tensorflow as tf
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service
from sklearn.datasets import load_digits

def learn(served):
    layers = [tf.keras.layers.Flatten(), tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dense(10)]
    model = tf.keras.Sequential([tf.keras.Input((8, 8)), *layers])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.005)), loss)
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    losses = model.fit(served, steps_per_epoch=15, epochs=3, verbose=0, callbacks=[start]).history["loss"]
    assert losses[-1] < 0.8 * losses[0], losses

def train(config, reuse, robin):
    hvd.init()
    digits = load_digits()
    x, y = (digits.images / 16).astype("float32"), digits.target.astype("int64")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(2000).batch(64)
    if config.dispatcher_side == "compute":
        learn(dataset.send_to_data_service(config, hvd.rank(), hvd.size(), reuse_dataset=reuse, round_robin=robin))
        return
    places = {"consumer_index": hvd.rank(), "num_consumers": hvd.size()} if robin else {}
    with tf_data_service(config, hvd.rank()) as address:
        learn(dataset.apply(tf.data.experimental.service.distribute(
            "distributed_epoch", address, job_name="job" if reuse else None, **places
        )))

if __name__ == "__main__":
    config = TfDataServiceConfig.read(sys.argv[1], wait_for_file_creation=True)
    given = (config, "reuse" in sys.argv, "robin" in sys.argv)
    if "spark" in sys.argv:
        from horovod.spark import run
        from pyspark.sql import SparkSession
        SparkSession.builder.master("local[2]").getOrCreate()
        run(train, given, num_proc=2, stdout=sys.stdout, stderr=sys.stderr)
    else:
        from horovod import run
        run(train, given, np=2)
    config.compute_client(verbose=2).shutdown()
"""


SPARK = {**QUIET, "PYSPARK_SUBMIT_ARGS": "--master local[2] pyspark-shell"}


def python(*words: str) -> None:
    """Run a program of Horovod to its end, which must be one without an error."""
    command = [*COMPAT, *words]
    done = subprocess.run(
        command, env={**os.environ, **SPARK}, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def ranks(*words: str) -> None:
    """Run a program of Horovod as two ranks."""
    done = farandole("run", "-np", "2", *COMPAT, *words, framework="tensorflow", env=QUIET, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def beside(start: Callable[..., None], *words: str) -> Iterator[None]:
    """Run a job of workers beside the block; it must end after it, and without an error."""
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            start("-m", *words)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join(260)
    assert not failures, failures


WORKER = "horovod.tensorflow.data.compute_worker"


def read(folder: Path, way: str, *options: str) -> None:
    file, program = folder / "service.json", folder / "read.py"
    program.write_text(READ)
    with beside(ranks, WORKER, str(file), *options):
        ranks(str(program), str(file), way)
    assert not file.exists()


@pytest.mark.slow
def test_ranks_share_a_pass(tmp_path: Path) -> None:
    read(tmp_path, "shared")


@every_way
@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("all", ("--dispatchers", "2")),
        ("turns", ()),
        ("all", ("--dispatcher-side", "training")),
        ("shared", ("--dispatcher-side", "training")),
        ("all", ("--dispatcher-side", "training", "--dispatchers", "2")),
    ],
)
def test_ways_to_read(way: str, options: tuple[str, ...], tmp_path: Path) -> None:
    read(tmp_path, way, *options)


@every_way
@pytest.mark.slow
@pytest.mark.parametrize("reading", [(), ("reuse",), ("reuse", "robin")])
@pytest.mark.parametrize("side", ["compute", "training"])
def test_training(side: str, reading: tuple[str, ...], tmp_path: Path) -> None:
    file, program = tmp_path / "service.json", tmp_path / "train.py"
    program.write_text(TRAIN)
    with beside(ranks, WORKER, str(file), "--dispatcher-side", side):
        python(str(program), str(file), *reading)


@every_way
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("side", ["compute", "training"])
def test_service_and_training_on_spark(side: str, tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    file, program = tmp_path / "service.json", tmp_path / "train.py"
    program.write_text(TRAIN)
    with beside(python, "horovod.spark.tensorflow.compute_worker", str(file), "--dispatcher-side", side):
        python(str(program), str(file), "spark")
