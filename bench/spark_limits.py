"""Seconds until users of Spark have a result or an error, each with a limit.

    python bench/spark_limits.py [--rounds 3]

Measured on two ranks of one Spark session (local[2]): the result of a function that does nothing; the time from a
rank's exception until the call raises it, and until all processes of the ranks have ended; the refusal of a job with
more ranks than slots, which takes Spark itself ten minutes; and a fit whose epochs are already finished. Writes
bench/results/*-spark-limits.json."""

import argparse
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from comparison import OURS, limit, table
from launch_spark import session
from pyspark.sql import SparkSession
from race import Race, race, record

from farandole.errors import RankFailed, SlotsError
from farandole.estimators.store import Store
from farandole.estimators.torch import TorchEstimator
from farandole.spark import HorovodRunner, run

RANKS = 2
MARK = "SPARK_LIMITS_MARK"
PATIENCE = 60.0  # seconds for the processes of a failed job to end


def nothing() -> int:
    """Return a number. A function of this program is pickled by value, so that ranks import no other modules."""
    return 42


def fail(path: str) -> None:
    """Write the time to `path` and fail on rank 1; the other rank and its child process continue."""
    import subprocess

    if os.environ["FARANDOLE_RANK"] == "1":
        Path(path).write_text(str(time.monotonic()))
        raise ArithmeticError("of rank 1")
    subprocess.Popen(["sleep", "600"])
    time.sleep(600)


def left(mark: str) -> bool:
    """Return whether any process has `mark` in its environment."""
    wanted = f"{MARK}={mark}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in environment.read_bytes():
                return True
        except OSError:
            continue  # the process has ended, or belongs to another user
    return False


def failure(folder: Path, *, until_gone: bool) -> float:
    """Return the seconds from a rank's exception until the call raises, or until all processes of the job are gone."""
    mark, noted = uuid.uuid4().hex, folder / uuid.uuid4().hex
    try:
        run(fail, (str(noted),), num_proc=RANKS, env={MARK: mark}, verbose=0)
    except RankFailed as error:
        assert error.rank == 1, error
    end = time.monotonic() + PATIENCE
    while until_gone and left(mark):
        assert time.monotonic() < end, f"a process of the job still runs {PATIENCE:g} s after the call raised"
        time.sleep(0.02)
    return time.monotonic() - float(noted.read_text())


def refusal() -> float:
    """Return the seconds until a job with too many ranks is refused."""
    began = time.monotonic()
    try:
        HorovodRunner(np=RANKS + 1).run(nothing)
    except SlotsError:
        return time.monotonic() - began
    raise AssertionError("not refused")


def value() -> float:
    """Return the seconds until `HorovodRunner.run` returns the function's value."""
    began = time.monotonic()
    assert HorovodRunner(np=RANKS).run(nothing) == 42
    return time.monotonic() - began


def finished_fit(spark: SparkSession, folder: Path) -> Callable[[], float]:
    """Fit once; return a function that fits again and returns the seconds."""
    torch.manual_seed(7)
    model = torch.nn.Linear(1, 1)
    estimator = TorchEstimator(
        num_proc=RANKS,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        input_shapes=[[-1, 1]],
        store=Store.create(str(folder)),
        run_id="finished",
        verbose=0,
    )
    rows = spark.createDataFrame([(0.5 * place, 1.0) for place in range(8)], "x double, y double")
    wanted = estimator.fit(rows).getModel().state_dict()

    def again() -> float:
        began = time.monotonic()
        got = estimator.fit(rows).getModel().state_dict()
        taken = time.monotonic() - began
        assert all(torch.equal(got[name], each) for name, each in wanted.items())
        return taken

    return again


def measure(spark: SparkSession, folder: Path, rounds: int) -> dict[str, tuple[Race, float]]:
    """Return each measurement with its limit in seconds."""
    contenders: Mapping[str, tuple[Callable[[], float], float]] = {
        "value of a function": (value, 5.0),
        "exception of a rank": (lambda: failure(folder, until_gone=False), 5.0),
        "no process after an exception": (lambda: failure(folder, until_gone=True), 5.0),
        "refusal of too many ranks": (refusal, 2.0),
        "fit without an epoch left": (finished_fit(spark, folder), 5.0),
    }
    return {name: (race({OURS: call}, rounds), seconds) for name, (call, seconds) in contenders.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder, session(RANKS) as spark:
        found = measure(spark, Path(folder), given.rounds)
    lines = [limit(name, measured, 1e6 * seconds) for name, (measured, seconds) in found.items()]
    sys.stdout.write(f"{table('limits on Spark, 2 ranks', lines)}\n")
    races = {f"{name}: seconds": measured for name, (measured, _) in found.items()}
    sys.stdout.write(f"{record('spark-limits', races, ('farandole', 'pyspark', 'torch'), lines)}\n")


if __name__ == "__main__":
    main()
