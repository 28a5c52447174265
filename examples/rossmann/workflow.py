"""The forecast as Flyte workflows, with Horovod's imports: in one Spark task, and as a Spark task and a task on ranks.

    python examples/rossmann/workflow.py --out build/rossmann-flyte --epochs 2

Needs `pip install 'farandole[flyte,keras,tensorflow,plots]'` and Java 17 or newer.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))  # `rossmann` is a package beside the other examples

import farandole.compat  # noqa: E402

farandole.compat.install()

import flytekit  # noqa: E402
from flytekit import Resources, task, workflow  # noqa: E402
from flytekit.types.directory import FlyteDirectory  # noqa: E402
from flytekit.types.file import FlyteFile  # noqa: E402
from flytekitplugins.spark import Spark  # noqa: E402

from farandole.integrations.flyte import Farandole  # noqa: E402

SPARK_CONF = {
    "spark.driver.memory": "2000M",
    "spark.driver.cores": "1",
    "spark.executor.memory": "2000M",
    "spark.executor.cores": "1",
    "spark.executor.instances": "2",
    "spark.sql.shuffle.partitions": "16",
}
RANKS = 2


@dataclass
class Hyperparameters:
    """Settings of the workflows; batch size and learning rate are those of one rank."""

    batch_size: int = 100
    learning_rate: float = 0.001
    num_proc: int = RANKS
    epochs: int = 8
    validation_days: int = 42
    local_checkpoint_file: str = "model.keras"
    local_submission_csv: str = "submission.csv"


class Features(NamedTuple):
    """Engineered rows as Parquet, in one folder for training and one for validation, and their encoding."""

    rows: FlyteDirectory
    encoding: str


class Trained(NamedTuple):
    """A Keras model, and its error on the validation rows."""

    model: FlyteFile
    rmspe: float


@task
def make_data(rows: int) -> FlyteDirectory:
    """Generate the competition's files."""
    from rossmann.generate import write_files

    folder = Path(flytekit.current_context().working_directory) / "data"
    write_files(folder, rows=rows)
    return FlyteDirectory(str(folder))


@task(task_config=Spark(spark_conf=SPARK_CONF), requests=Resources(mem="1Gi"), retries=1)
def horovod_spark_task(data_dir: FlyteDirectory, hp: Hyperparameters, work_dir: FlyteDirectory) -> FlyteDirectory:
    """Engineer features, train on ranks of the same Spark application, and predict; everything in one task."""
    import horovod.keras as hvd
    import horovod.spark.keras as hvd_keras
    import keras
    from horovod.spark.common.backend import SparkBackend
    from horovod.spark.common.store import Store

    from rossmann import features, forecast, model, report, tables

    spark = flytekit.current_context().spark_session
    out = Path(flytekit.current_context().working_directory) / "out"
    out.mkdir(parents=True)
    forecast.ship(spark, out.parent / "rossmann.zip")
    engineered = features.engineer(tables.read(spark, url_of(data_dir)), validation_days=hp.validation_days).cache()
    encoding = features.Encoding.fit(engineered)
    rows = encoding.apply(engineered).cache()
    with open(out / "stdout.txt", "w") as stdout, open(out / "stderr.txt", "w") as stderr:
        backend = SparkBackend(num_proc=hp.num_proc, stdout=stdout, stderr=stderr, prefix_output_with_timestamp=True)
        estimator = hvd_keras.KerasEstimator(
            backend=backend,
            model=build(encoding),
            optimizer=keras.optimizers.Adam(hp.learning_rate),
            loss="mse",
            metrics=[model.RMSPE()],
            feature_cols=[*features.CODES, features.MEASURES],
            label_cols=[features.LABEL],
            validation="Validation",
            batch_size=hp.batch_size,
            epochs=hp.epochs,
            random_seed=1,
            verbose=2,
            store=Store.create(url_of(work_dir)),
            callbacks=[hvd.callbacks.LearningRateWarmupCallback(initial_lr=hp.learning_rate, warmup_epochs=1)],
            checkpoint_callback=hvd.callbacks.BestModelCheckpoint(monitor="val_rmspe", mode="min"),
        )
        fitted = estimator.fit(rows.where("Id IS NULL"))
    fitted.getModel().save(out / hp.local_checkpoint_file)
    predicted = report.predict(fitted, rows)
    held_out = predicted[predicted["Id"].isna()]
    report.write_submission(predicted, out / hp.local_submission_csv)
    error = report.rmspe(held_out["Sales"], held_out["Predicted"])
    (out / "rmspe.json").write_text(json.dumps({"rmspe": error, **report.baselines(rows, held_out)}))
    return FlyteDirectory(str(out))


@task(task_config=Spark(spark_conf=SPARK_CONF))
def engineer_features(data_dir: FlyteDirectory, hp: Hyperparameters) -> Features:
    """Engineer features and write them once, to the place of the task's outputs in Flyte's store."""
    from rossmann import features, tables

    spark = flytekit.current_context().spark_session
    engineered = features.engineer(tables.read(spark, url_of(data_dir)), validation_days=hp.validation_days).cache()
    encoding = features.Encoding.fit(engineered)
    rows = encoding.apply(engineered).where("Id IS NULL")
    columns = [*features.CODES, features.MEASURES, features.LABEL]
    # Spark writes to the final place, so that Flyte uploads nothing afterwards.
    folder = FlyteDirectory.new_remote()
    for name, chosen in (("train", "NOT Validation"), ("validation", "Validation")):
        rows.where(chosen).select(*columns).write.parquet(f"{url_of(folder)}/{name}")
    return Features(folder, json.dumps(asdict(encoding)))


@task(task_config=Farandole(num_workers=RANKS, requests=Resources(cpu="1", mem="1Gi")), retries=1)
def train_on_ranks(rows: FlyteDirectory, encoding: str, hp: Hyperparameters) -> Trained:
    """Train on the Parquet files in the store: each rank reads the row groups of its share, without a download."""
    import horovod.keras as hvd
    import keras
    import tensorflow as tf

    from farandole.data import Loader, ParquetSource
    from farandole.tensorflow.data import make_dataset
    from rossmann import features
    from rossmann.model import RMSPE

    hvd.init()
    inputs = [*features.CODES, features.MEASURES]

    def dataset(name: str) -> Any:
        loader = Loader(
            ParquetSource(f"{url_of(rows)}/{name}"), columns=[*inputs, features.LABEL], batch_size=hp.batch_size,
            policy="pad", seed=1, rank=hvd.rank(), size=hvd.size(), gather=hvd.allgather_object,
        )  # fmt: skip
        batches = make_dataset(loader, weights="weight").map(
            lambda batch: (tuple(batch[each] for each in inputs), batch[features.LABEL][:, None], batch["weight"])
        )
        return batches.apply(tf.data.experimental.assert_cardinality(len(loader)))

    keras.utils.set_random_seed(1)
    network = build(features.Encoding(**json.loads(encoding)))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(hp.learning_rate))
    network.compile(optimizer=optimizer, loss="mse", weighted_metrics=[RMSPE()], jit_compile=False)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    fitted = network.fit(
        dataset("train"),
        validation_data=dataset("validation"),
        epochs=hp.epochs,
        shuffle=False,  # the loader does it
        callbacks=callbacks,
        verbose=0,
    )
    file = Path(flytekit.current_context().working_directory) / hp.local_checkpoint_file
    if hvd.rank() == 0:
        network.save(file)
    hvd.shutdown()
    return Trained(FlyteFile(str(file)), fitted.history["val_rmspe"][-1])


def build(encoding: Any) -> Any:
    """Return the network for the encoded columns."""
    from rossmann import features, model

    return model.build(
        encoding.cardinalities, label_scale=tuple(encoding.scales[features.LABEL]), hidden=(256, 128), dropout=0.05
    )


def url_of(directory: FlyteDirectory) -> str:
    """Return the URL of the directory, without downloading it."""
    return str(directory.remote_source or directory.path)


@workflow
def in_one_task(hp: Hyperparameters, work_dir: FlyteDirectory, rows: int = 10_000) -> FlyteDirectory:
    return horovod_spark_task(data_dir=make_data(rows=rows), hp=hp, work_dir=work_dir)


@workflow
def in_two_tasks(hp: Hyperparameters, rows: int = 10_000) -> Trained:
    engineered = engineer_features(data_dir=make_data(rows=rows), hp=hp)
    return train_on_ranks(rows=engineered.rows, encoding=engineered.encoding, hp=hp)


def main() -> None:
    """Run both workflows on this machine."""
    parser = argparse.ArgumentParser(description="Forecast the sales of drug stores by Flyte.")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=Hyperparameters.epochs)
    parser.add_argument("--out", type=Path, default=Path("build/rossmann-flyte"))
    parser.add_argument("--way", choices=["one", "two", "both"], default="both")
    options = parser.parse_args()
    hp = Hyperparameters(epochs=options.epochs)
    (options.out / "work").mkdir(parents=True, exist_ok=True)
    if options.way != "two":
        made = in_one_task(hp=hp, work_dir=FlyteDirectory(str(options.out / "work")), rows=options.rows)
        folder = Path(made.path)
        print(f"one task: {json.loads((folder / 'rmspe.json').read_text())}; {folder}")
    if options.way != "one":
        trained = in_two_tasks(hp=hp, rows=options.rows)
        print(f"two tasks: RMSPE {trained.rmspe:.4f}; {trained.model.path}")


if __name__ == "__main__":
    main()
