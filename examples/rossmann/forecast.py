"""Forecast the daily sales of drug stores: features in Spark, a Keras network on several ranks, a submission file.

    python examples/rossmann/forecast.py                      # on generated data
    python examples/rossmann/forecast.py --folder FOLDER      # on Kaggle's files, if FOLDER has them

Needs `pip install 'farandole[spark,keras,tensorflow,plots]'` and Java 17 or newer.
"""

import argparse
import os
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))  # `rossmann` is a package beside the other examples

from pyspark.sql import SparkSession  # noqa: E402

from farandole.spark.store import Store  # noqa: E402
from rossmann import features, generate, report, tables, training  # noqa: E402

WAYS = ("estimator", "runner")


@dataclass(frozen=True)
class Result:
    """Errors on the validation rows: by the way of training, and by the name of the baseline."""

    ways: dict[str, float]
    baselines: dict[str, float]


def forecast(
    spark: SparkSession,
    folder: str,
    out: Path,
    settings: training.Settings,
    *,
    ways: Sequence[str] = WAYS,
    validation_days: int = 42,
) -> Result:
    """Train on the files in `folder`, a path or URL, and write predictions and pictures of each way below `out`."""
    out.mkdir(parents=True, exist_ok=True)
    ship(spark, out / "rossmann.zip")
    engineered = features.engineer(tables.read(spark, folder), validation_days=validation_days).cache()
    encoding = features.Encoding.fit(engineered)
    rows = encoding.apply(engineered).cache()
    trains = rows.where("Id IS NULL")
    errors, simple = {}, {}
    for way in ways:
        print(f"\nTraining by {way}")
        place = out / way
        place.mkdir(exist_ok=True)
        if way == "estimator":
            fitted = training.fit_by_estimator(trains, encoding, settings, Store.create(str(out / "store")))
        else:
            fitted = training.fit_by_runner(trains, encoding, settings)
        fitted.getModel().save(place / "model.keras")
        fitted.history.plot().savefig(place / "history.png")
        predicted = report.predict(fitted, rows)
        held_out = predicted[predicted["Id"].isna()]
        report.write_submission(predicted, place / "submission.csv")
        report.plot_predictions(held_out, place / "predictions.png")
        errors[way] = report.rmspe(held_out["Sales"], held_out["Predicted"])
        simple = simple or report.baselines(rows, held_out)
    rows.unpersist()
    engineered.unpersist()
    return Result(errors, simple)


def ship(spark: SparkSession, archive: Path) -> None:
    """Write this package to `archive`, and let ranks and predicting tasks import it from there."""
    with zipfile.ZipFile(archive, "w") as files:
        for module in HERE.glob("*.py"):
            files.write(module, f"rossmann/{module.name}")
    spark.sparkContext.addPyFile(str(archive))


@contextmanager
def local_spark(slots: int) -> Iterator[SparkSession]:
    """Yield the session of `spark-submit`, or one on this machine with `slots` tasks at once; stop it at the end."""
    builder = SparkSession.builder.appName("Rossmann")
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # spark-submit sets it
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        builder = builder.master(f"local[{slots}]").config("spark.ui.enabled", "false")
        builder = builder.config("spark.sql.shuffle.partitions", slots).config("spark.log.level", "ERROR")
        builder = builder.config("spark.ui.showConsoleProgress", "false")
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description="Forecast the sales of drug stores.")
    parser.add_argument("--folder", type=Path, default=Path("build/rossmann"), help="files; made without train.csv")
    parser.add_argument("--rows", type=int, default=10_000, help="of train.csv, if it is made")
    parser.add_argument("--out", type=Path, help="folder for models, submissions and pictures (default: FOLDER/out)")
    parser.add_argument("--way", choices=[*WAYS, "both"], default="both")
    parser.add_argument("--ranks", type=int, default=training.Settings.ranks)
    parser.add_argument("--epochs", type=int, default=training.Settings.epochs)
    parser.add_argument("--batch-size", type=int, default=training.Settings.batch_size)
    parser.add_argument("--learning-rate", type=float, default=training.Settings.learning_rate)
    options = parser.parse_args()
    folder = options.folder.resolve()
    out = (options.out or folder / "out").resolve()
    settings = training.Settings(
        ranks=options.ranks, epochs=options.epochs, batch_size=options.batch_size, learning_rate=options.learning_rate
    )
    started = time.perf_counter()
    if not (folder / "train.csv").exists():
        print(f"Generating about {options.rows} rows in {folder}")
        generate.write_files(folder, rows=options.rows)
    with local_spark(options.ranks) as spark:
        ways = WAYS if options.way == "both" else (options.way,)
        result = forecast(spark, folder.as_uri(), out, settings, ways=ways)
    print(f"\nRMSPE of the last six weeks ({time.perf_counter() - started:.0f} s in all)")
    for name, error in {**result.baselines, **result.ways}.items():
        print(f"{name:26} {error:.4f}")
    print(f"\nSubmissions and pictures: {out}")


if __name__ == "__main__":
    main()
