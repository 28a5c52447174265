"""The driver's part: a job's DataFrames as the names of shares, in one partition for each rank."""

import functools
from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from farandole.spark.chosen import application_of
from farandole.spark.exchange.access import KeeperPlan
from farandole.spark.exchange.dealer import SHARE_SCHEMA, DealPlan, deal_rows

__all__ = ["dealt"]


def dealt(dataframes: Sequence[DataFrame], num_proc: int, keeper: KeeperPlan, ranks_per_task: int = 1) -> DataFrame:
    """Return the names of all shares, those of the ranks of task k in partition k; nothing runs yet.

    Partitions are read where and as Spark likes. Where the last step of a DataFrame was to repartition it to
    `num_proc`, partition k is rank k's, as the user has arranged it."""
    tasks = num_proc // ranks_per_task
    keys = [key for key in keys_of_partitions(tasks) for _ in range(ranks_per_task)]
    shares = [_shares(dataframe, keys, keeper=keeper, number=number) for number, dataframe in enumerate(dataframes)]
    return functools.reduce(DataFrame.union, shares).repartition(tasks, "key")


def _shares(dataframe: DataFrame, keys: Sequence[int], *, keeper: KeeperPlan, number: int) -> DataFrame:
    arranged = application_of(dataframe.sparkSession).repartitioned_to(dataframe) == len(keys)
    plan = DealPlan(keeper=keeper, number=number, keys=keys, arranged=arranged)
    # As a column: a task's own number counts the partitions of all DataFrames.
    rows = dataframe.select("*", F.spark_partition_id()) if arranged else dataframe
    return rows.mapInArrow(functools.partial(deal_rows, plan), SHARE_SCHEMA)


def keys_of_partitions(partitions: int) -> list[int]:
    """Find for each partition an integer that Spark's `repartition` by a column puts there."""
    keys: dict[int, int] = {}
    number = 0
    while len(keys) < partitions:
        keys.setdefault(_murmur3(number) % partitions, number)
        number += 1
    return [keys[partition] for partition in range(partitions)]


def _murmur3(number: int) -> int:
    """Hash as Spark does for shuffles, and for bucketed tables on disk, which is why that stays as it is.

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
