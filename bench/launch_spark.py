"""Time of a Spark job whose ranks have nothing to do.

    python bench/launch_spark.py [--rounds 5] [--ranks 2] [--work torch] [--until begin]

HorovodRunner and pyspark's own TorchDistributor take turns in one Spark session (local[N], CPU). The time is from the
call of `run` until it returns rank 0's value, or with `--until begin` until rank 0's function begins: a task of ours
lasts for a second at least, the interval in which Spark polls its all-gather. With `--work torch` both import torch and
initialize the job, as a training does first. The target is half of TorchDistributor's time at most. Writes
bench/results/*-launch-spark.json."""

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


def nothing() -> float:
    """Return the time, as the function that both launchers run."""
    return time.time()


def ours_until_initialized() -> float:
    """Import torch and initialize farandole as a rank; return the time before."""
    begun = time.time()
    import torch

    import farandole.torch as hvd

    hvd.init()
    assert torch.ones(1).sum() == 1
    return begun


def theirs_until_initialized() -> float:
    """Import torch and initialize torch.distributed as a rank; return the time before."""
    begun = time.time()
    import torch
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    assert torch.ones(1).sum() == 1
    torch.distributed.destroy_process_group()
    return begun


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


def timed(run: Callable[[], float], until: str) -> float:
    """Return the seconds until rank 0's function begins, whose time `run` returns, or until `run` returns."""
    started = time.time()
    begun = run()
    returned = time.time()
    assert started < begun < returned, begun
    return (begun if until == "begin" else returned) - started


def launch(ranks: int, rounds: int, work: str, until: str) -> Race:
    """Race HorovodRunner against TorchDistributor."""
    ours, theirs = (nothing, nothing) if work == "none" else (ours_until_initialized, theirs_until_initialized)
    distributor = TorchDistributor(num_processes=ranks, local_mode=False, use_gpu=False)
    return race(
        {
            OURS: lambda: timed(lambda: HorovodRunner(np=ranks).run(ours), until),
            THEIRS: lambda: timed(lambda: distributor.run(theirs), until),
        },
        rounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--work", choices=("none", "torch"), default="none")
    parser.add_argument("--until", choices=("begin", "return"), default="return")
    options = parser.parse_args()
    logging.getLogger("farandole.spark").setLevel(logging.INFO)  # log the announcement, do not print it
    with session(options.ranks):
        result = launch(options.ranks, options.rounds, options.work, options.until)
    end = "the begin of rank 0's function" if options.until == "begin" else "rank 0's value"
    name = f"np={options.ranks}, work={options.work}: seconds from run to {end}"
    what = f"launch on Spark, {options.ranks} ranks, work={options.work}, until {options.until}"
    lines = compare(what, result, {THEIRS: 2.0})
    print(table(name, lines))
    print(record("launch-spark", {name: result}, ["farandole", "pyspark", "torch"], lines))


if __name__ == "__main__":
    main()
