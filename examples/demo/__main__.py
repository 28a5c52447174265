"""Train scikit-learn's digits on two Spark tasks: by a Horovod training function, then by a Spark ML estimator.

    make demo                                  or  python -m examples.demo [--quick] [--out FOLDER]

Needs Java 17 or newer. Spark runs in local mode with two slots (local[2]).
"""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from pyspark.sql import DataFrame, SparkSession
from sklearn.datasets import load_digits
from torch import Tensor, nn

import farandole.torch as hvd
from farandole.integrations.tensorboard import EventFile
from farandole.spark import HorovodRunner
from farandole.spark.driver.progress import Progress
from farandole.spark.store import Store
from farandole.spark.torch import TorchEstimator, TorchModel

RANKS = 2
BATCH_SIZE = 32
LEARNING_RATE = 0.05  # of one rank


class Net(nn.Module):
    """A small convolutional network for images of 8x8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def accuracy(output: Tensor, label: Tensor) -> Tensor:
    return (output.argmax(1) == label).float().mean()


def images_and_labels(*, held_out: bool) -> tuple[Tensor, Tensor]:
    """Return every fifth digit if `held_out`, else the others, as images [rows, 1, 8, 8] and labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    chosen = (torch.arange(len(labels)) % 5 == 0) == held_out
    return images[chosen], labels[chosen]


# 1. A training function as programs for Horovod have it. It runs once on each rank.


def train(folder: str, epochs: int) -> dict[str, float]:
    hvd.init()
    torch.manual_seed(1)
    images, labels = images_and_labels(held_out=False)
    # Each rank trains on its share of the rows, in as many steps as the others.
    steps = len(labels) // hvd.size() // BATCH_SIZE
    images, labels = images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]
    print(f"{len(labels)} rows, {steps} steps per epoch")

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    events = EventFile(Path(folder, "logs")) if hvd.rank() == 0 else None
    progress = Progress(epochs=epochs, steps=steps)
    started = time.perf_counter()
    for epoch in range(epochs):
        order = torch.randperm(len(labels))
        for step in range(steps):
            rows = order[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            progress.step(rows=len(rows), loss=loss.item())
            if events is not None:
                events.scalars({"train/loss": loss.item()}, epoch * steps + step)
        if hvd.rank() == 0:
            state = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, Path(folder, "checkpoint.pt"))
    seconds = time.perf_counter() - started

    if events is not None:
        events.close()
    images, labels = images_and_labels(held_out=True)
    with torch.no_grad():
        held_out = accuracy(model(images), labels).item()
    hvd.shutdown()
    return {"accuracy": held_out, "steps_per_s": epochs * steps / seconds}


# 2. The same training by a Spark ML estimator, which takes a DataFrame and returns one with predictions.


def make_dataframe(spark: SparkSession) -> DataFrame:
    rows = [
        (image.flatten().tolist(), label, held_out)
        for held_out in (False, True)
        for image, label in zip(*(each.numpy() for each in images_and_labels(held_out=held_out)), strict=True)
    ]
    rows = [(pixels, int(label), held_out) for pixels, label, held_out in rows]
    return spark.createDataFrame(rows, "pixels array<float>, label bigint, held_out boolean")


def fit(digits: DataFrame, folder: str, epochs: int) -> TorchModel:
    torch.manual_seed(1)
    model = Net()
    estimator = TorchEstimator(
        num_proc=RANKS,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9),
        loss=F.cross_entropy,
        metrics=[accuracy],
        feature_cols=["pixels"],
        label_cols=["label"],
        input_shapes=[[-1, 1, 8, 8]],
        validation=0.1,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        random_seed=1,
        store=Store.create(folder),
        run_id="estimator",
    )
    return estimator.fit(digits.where("not held_out"))


def score(predicted: DataFrame) -> float:
    """Return the share of rows whose largest output is that of the label."""
    guess = "array_position(label__output, array_max(label__output)) - 1"
    return predicted.selectExpr(f"avg(int({guess} = label))").first()[0]


@contextmanager
def spark_session(log: Path) -> Iterator[SparkSession]:
    """Start Spark in this process with two slots; its JVM and workers write to `log`."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(f"local[{RANKS}]").appName("farandole demo")
    builder = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
    builder = builder.config("spark.log.level", "ERROR").config("spark.sql.shuffle.partitions", RANKS)
    own_stderr = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)  # the JVM inherits this stderr
        try:
            spark = builder.getOrCreate()
        finally:
            os.dup2(own_stderr, 2)
            os.close(own_stderr)
    try:
        yield spark
    finally:
        spark.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="Train digits on two Spark tasks.")
    parser.add_argument("--quick", action="store_true", help="fewer epochs")
    parser.add_argument("--out", type=Path, help="folder for what is written (default: a new one in build/demo)")
    options = parser.parse_args()
    epochs = 8 if options.quick else 15
    out = (options.out or Path("build/demo", time.strftime("%Y%m%d-%H%M%S"))).resolve()
    runner_folder = out / "runner"
    runner_folder.mkdir(parents=True, exist_ok=True)
    timeline = out / "timeline.json"

    print("Starting Spark ...")
    with spark_session(out / "spark.log") as spark:
        print(f"\n1. HorovodRunner(np={RANKS}).run(train)\n")
        os.environ["FARANDOLE_TIMELINE"] = str(timeline)
        runner = HorovodRunner(np=RANKS, driver_log_verbosity="all")
        trained = runner.run(train, folder=str(runner_folder), epochs=epochs)
        del os.environ["FARANDOLE_TIMELINE"]

        print(f"\n2. TorchEstimator(num_proc={RANKS}).fit(digits)\n")
        digits = make_dataframe(spark)
        model = fit(digits, str(out), epochs)
        predicted = model.transform(digits.where("held_out"))
        predicted.selectExpr("label", "transform(label__output, x -> round(x, 1)) as label__output").show(3, False)
        predicted_accuracy = score(predicted)
        history = model.history
        estimator_speed = sum(each["steps"] for each in history) / sum(each["seconds"] for each in history)

    run = out / "runs" / "estimator"
    print(f"""
                 held-out accuracy    steps/s
HorovodRunner    {trained["accuracy"]:17.4f} {trained["steps_per_s"]:10.0f}
TorchEstimator   {predicted_accuracy:17.4f} {estimator_speed:10.0f}

checkpoints      {runner_folder / "checkpoint.pt"}
                 {run / "checkpoint"}
TensorBoard      tensorboard --logdir {shlex.quote(str(out))}
timeline         {timeline}  (open it in https://ui.perfetto.dev)
Spark's log      {out / "spark.log"}""")
    if min(trained["accuracy"], predicted_accuracy) <= 0.95:
        sys.exit("The held-out accuracy is below 0.95: something is wrong.")


if __name__ == "__main__":
    main()
