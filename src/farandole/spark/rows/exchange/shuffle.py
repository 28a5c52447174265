"""Query for a job's DataFrames, on the driver: the places of all shares, in one partition for each task of ranks."""

import functools
from collections.abc import Callable, Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from farandole.spark.rows.exchange.access import KeeperPlan
from farandole.spark.rows.exchange.dealer import SHARE_SCHEMA, DealPlan, deal_rows


def dealt(
    dataframes: Sequence[DataFrame],
    num_proc: int,
    keeper: KeeperPlan,
    *,
    repartitioned_to: Callable[[DataFrame], int | None],
    ranks_per_task: int = 1,
) -> DataFrame:
    """Return the places of all shares, with those for the ranks of task k in partition k; nothing runs yet.

    Spark reads the partitions of `dataframes` where and in the order it likes. If the last step of a DataFrame
    repartitions it to `num_proc` partitions, rank k gets partition k, as the user has arranged it; `repartitioned_to`
    is that of the `Application`."""
    tasks = num_proc // ranks_per_task
    keys = [key for key in keys_of_partitions(tasks) for _ in range(ranks_per_task)]
    shares = []
    for number, dataframe in enumerate(dataframes):
        arranged = repartitioned_to(dataframe) == num_proc
        shares.append(_shares(dataframe, DealPlan(keeper=keeper, number=number, keys=keys, arranged=arranged)))
    return functools.reduce(DataFrame.union, shares).repartition(tasks, "key")


def _shares(dataframe: DataFrame, plan: DealPlan) -> DataFrame:
    # As a column, because a task's own number counts the partitions of all DataFrames.
    rows = dataframe.select("*", F.spark_partition_id()) if plan.arranged else dataframe
    return rows.mapInArrow(functools.partial(deal_rows, plan), SHARE_SCHEMA)


def keys_of_partitions(partitions: int) -> list[int]:
    """Return for each partition an integer that Spark's `repartition` by a column sends there."""
    keys: dict[int, int] = {}
    number = 0
    while len(keys) < partitions:
        keys.setdefault(_murmur3(number) % partitions, number)
        number += 1
    return [keys[partition] for partition in range(partitions)]


def _murmur3(number: int) -> int:
    """Return Spark's hash of an integer for shuffles. It will not change, as bucketed tables on disk depend on it.

    MurmurHash3 (x86, 32 bit) by Austin Appleby, of four bytes, with 42 as the seed."""
    word = number * 0xCC9E2D51 & 0xFFFFFFFF
    word = ((word << 15 | word >> 17) & 0xFFFFFFFF) * 0x1B873593 & 0xFFFFFFFF
    word ^= 42
    word = ((word << 13 | word >> 19) & 0xFFFFFFFF) * 5 + 0xE6546B64 & 0xFFFFFFFF
    word ^= 4  # bytes
    word = (word ^ word >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    word = (word ^ word >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    word ^= word >> 16
    return word - (word >> 31 << 32)
