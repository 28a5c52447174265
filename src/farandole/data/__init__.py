"""Rows to ranks: every row exactly once per epoch, the same number of steps on every rank."""

from farandole.data.loader import Batch, Loader
from farandole.data.shard import ArrowShard, Column, ColumnFacts, Number, agree_on_column
from farandole.data.sharding import StepsPlan
from farandole.data.shuffle import permutation
from farandole.data.split import validation_mask

__all__ = [
    "ArrowShard",
    "Batch",
    "Column",
    "ColumnFacts",
    "Loader",
    "Number",
    "StepsPlan",
    "agree_on_column",
    "permutation",
    "validation_mask",
]
