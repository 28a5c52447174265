"""Time of fitting an estimator to a DataFrame, end to end.

    python bench/spark_fit.py [--rows 200000] [--columns 37] [--rounds 3] [--ranks 2] [--batch 1024] [--full]

Two ways take turns, each with one epoch of a small network on the ranks of a Spark job (local[ranks]).
`TorchEstimator.fit` reads a DataFrame that Spark has in memory. The other way is that of Horovod's estimators: Spark
writes the rows to Parquet files in the store, and `fit_on_parquet` of the same estimator trains on these files. Times
are from the call to the fitted model. `--full` takes a million rows. Writes bench/results/*-spark-fit.json."""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from comparison import OURS, compare, table
from feed import make_frame, session
from pyspark.sql import DataFrame, SparkSession
from race import Race, race, record

from farandole.estimators.store import Store
from farandole.estimators.torch import TorchEstimator, TorchModel

DETOUR = "parquet, then fit"
FULL = 1_000_000


class Network(torch.nn.Module):
    """A small network with one input per column."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(columns, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, *columns: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = self.layers(torch.stack([column.reshape(-1) for column in columns], 1) / 1000)
        return given


def estimator(frame: DataFrame, given: argparse.Namespace, folder: Path) -> TorchEstimator:
    """Return a new estimator, the same for both ways."""
    torch.manual_seed(7)
    model = Network(given.columns - 1)
    return TorchEstimator(
        num_proc=given.ranks,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-9),
        loss=torch.nn.functional.mse_loss,
        feature_cols=[name for name in frame.columns if name != "label"],
        label_cols=["label"],
        batch_size=given.batch,
        epochs=1,
        random_seed=7,
        verbose=0,
        store=Store.create(str(folder)),
    )


def checked(fitted: TorchModel, given: argparse.Namespace) -> None:
    """Raise `AssertionError` unless the epoch had steps for all rows."""
    steps = -(-given.rows // given.ranks // given.batch)
    assert fitted.history[-1]["steps"] == steps, fitted.history


def fitted_directly(frame: DataFrame, given: argparse.Namespace, folder: Path) -> float:
    """Return the seconds of a fit to the DataFrame."""
    began = time.monotonic()
    fitted = estimator(frame, given, folder).fit(frame)
    taken = time.monotonic() - began
    checked(fitted, given)
    return taken


def fitted_by_way_of_parquet(frame: DataFrame, given: argparse.Namespace, folder: Path) -> float:
    """Return the seconds to write the rows to Parquet files and to fit to these."""
    began = time.monotonic()
    made = estimator(frame, given, folder)
    store = made.getStore()
    assert store is not None
    frame.write.mode("overwrite").parquet(store.url(store.get_train_data_path()))
    fitted = made.fit_on_parquet()
    taken = time.monotonic() - began
    checked(fitted, given)
    return taken


def measure(spark: SparkSession, given: argparse.Namespace, folder: Path) -> Race:
    frame = make_frame(spark, given.rows, given.columns)
    return race(
        {
            OURS: lambda: fitted_directly(frame, given, folder),
            DETOUR: lambda: fitted_by_way_of_parquet(frame, given, folder),
        },
        given.rounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--columns", type=int, default=37)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--full", action="store_true", help="a million rows")
    given = parser.parse_args()
    given.rows = FULL if given.full else given.rows
    folder = Path(tempfile.mkdtemp(prefix="farandole-bench-"))
    try:
        with session(given.ranks) as spark:
            found = measure(spark, given, folder)
    finally:
        shutil.rmtree(folder)
    what = f"{given.rows} rows x {given.columns} columns, {given.ranks} ranks"
    lines = compare(f"fit of {what}", found, {DETOUR: 1.0})
    sys.stdout.write(f"{table(what, lines)}\n")
    races = {f"{what}: seconds to the fitted model": found}
    sys.stdout.write(f"{record('spark-fit', races, ('farandole', 'pyarrow', 'pyspark', 'torch'), lines)}\n")


if __name__ == "__main__":
    main()
