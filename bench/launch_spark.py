"""Time of a Spark job whose ranks have nothing to do.

    python bench/launch_spark.py [--rounds 5] [--ranks 2] [--work torch]

HorovodRunner and pyspark's own TorchDistributor take turns in one Spark session (local[N], CPU). The time is from the
call of `run` until it returns rank 0's value. With `--work torch` both import torch and initialize the job, as a
training does first. The target is half of TorchDistributor's time at most. Writes bench/results/*-launch-spark.json."""

import argparse
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator

from comparison import OURS, compare, table
from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession
from race import Race, race, record

from farandole.spark import HorovodRunner

LOCALHOST = "127.0.0.1"
THEIRS = "TorchDistributor"


def nothing() -> int:
    """Return a value, as the function that both launchers run."""
    return 42


def ours_until_initialized() -> int:
    """Import torch and initialize farandole as a rank."""
    import torch

    import farandole.torch as hvd

    hvd.init()
    assert torch.ones(1).sum() == 1
    return 42


def theirs_until_initialized() -> int:
    """Import torch and initialize torch.distributed as a rank."""
    import torch
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    assert torch.ones(1).sum() == 1
    torch.distributed.destroy_process_group()
    return 42


@contextlib.contextmanager
def session(ranks: int) -> Iterator[SparkSession]:
    """Start the Spark session for both, without Spark's log."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(f"local[{ranks}]").appName("launch_spark")
    for name, value in {
        "spark.driver.host": LOCALHOST,
        "spark.driver.bindAddress": LOCALHOST,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "OFF",
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def timed(run: Callable[[], object]) -> float:
    """Return the seconds that `run` takes; it must return rank 0's value."""
    started = time.monotonic()
    value = run()
    taken = time.monotonic() - started
    assert value == 42, value
    return taken


def launch(ranks: int, rounds: int, work: str) -> Race:
    """Race HorovodRunner against TorchDistributor."""
    ours, theirs = (nothing, nothing) if work == "none" else (ours_until_initialized, theirs_until_initialized)
    distributor = TorchDistributor(num_processes=ranks, local_mode=False, use_gpu=False)
    return race(
        {
            OURS: lambda: timed(lambda: HorovodRunner(np=ranks).run(ours)),
            THEIRS: lambda: timed(lambda: distributor.run(theirs)),
        },
        rounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--work", choices=("none", "torch"), default="none")
    options = parser.parse_args()
    logging.getLogger("farandole.spark").setLevel(logging.INFO)  # log the announcement, do not print it
    with session(options.ranks):
        result = launch(options.ranks, options.rounds, options.work)
    name = f"np={options.ranks}, work={options.work}: seconds from run to rank 0's value"
    what = f"launch on Spark, {options.ranks} ranks, work={options.work}"
    lines = compare(what, result, {THEIRS: 2.0})
    print(table(name, lines))
    print(record("launch-spark", {name: result}, ["farandole", "pyspark", "torch"], lines))


if __name__ == "__main__":
    main()
