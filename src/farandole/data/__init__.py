"""Rows to ranks: every row exactly once per epoch, the same number of steps on every rank."""

from farandole.data.agreement import Gather, together
from farandole.data.cache import CachedSource
from farandole.data.deal import Deal, Policy
from farandole.data.feed_loader import FeedLoader
from farandole.data.fields import FieldOptions
from farandole.data.loader import Batch, Loader, Reading
from farandole.data.meter import Metrics
from farandole.data.order import Order, choose_lanes
from farandole.data.readers import Reader, ReaderOptions, make_batch_reader, make_feed_reader, make_reader
from farandole.data.selection import SelectedSource
from farandole.data.shard import ArrowShard, Column, ColumnFacts, Number, agree_on_column
from farandole.data.shard_loader import ShardBatch, ShardLoader
from farandole.data.shard_source import ShardSource
from farandole.data.sharding import StepsPlan
from farandole.data.shuffle import permutation
from farandole.data.sources import ArrowSource, ParquetSource, Source
from farandole.data.split import validation_mask
from farandole.data.values import Ragged, SparseRows, Values

__all__ = [
    "ArrowShard",
    "ArrowSource",
    "Batch",
    "CachedSource",
    "Column",
    "ColumnFacts",
    "Deal",
    "FeedLoader",
    "FieldOptions",
    "Gather",
    "Loader",
    "Metrics",
    "Number",
    "Order",
    "ParquetSource",
    "Policy",
    "Ragged",
    "Reader",
    "ReaderOptions",
    "Reading",
    "SelectedSource",
    "ShardBatch",
    "ShardLoader",
    "ShardSource",
    "Source",
    "SparseRows",
    "StepsPlan",
    "Values",
    "agree_on_column",
    "choose_lanes",
    "make_batch_reader",
    "make_feed_reader",
    "make_reader",
    "permutation",
    "together",
    "validation_mask",
]
