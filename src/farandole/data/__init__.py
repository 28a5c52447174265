"""Loaders and readers of rows: every row exactly once per epoch, the same number of steps on every rank.

Names are imported on first use: modules that read files load slowly, and ranks that get a DataFrame's rows do not need
them."""

from importlib import import_module
from typing import TYPE_CHECKING

from farandole.extras import importing as _importing

if TYPE_CHECKING:
    from farandole.data.agreement import Gather, together
    from farandole.data.arrivals import Growing
    from farandole.data.batches import Batch
    from farandole.data.cache import CachedSource
    from farandole.data.delta import DeltaSource
    from farandole.data.feed_loader import FeedLoader
    from farandole.data.fields import FieldOptions
    from farandole.data.growing_loader import GrowingLoader
    from farandole.data.iceberg import IcebergSource
    from farandole.data.loader import Loader
    from farandole.data.meter import Metrics
    from farandole.data.order import Order, choose_lanes, permutation
    from farandole.data.plans import GlobalPlan, LocalPlan, Policy
    from farandole.data.reader_options import ReaderOptions
    from farandole.data.readers import Reader, make_batch_reader, make_feed_reader, make_reader
    from farandole.data.reading import Reading
    from farandole.data.row_groups import Source
    from farandole.data.samples import FileSource, files
    from farandole.data.saved_dataset import SavedDataset
    from farandole.data.selection import SelectedSource
    from farandole.data.shard import (
        ArrowShard,
        Column,
        ColumnFacts,
        Number,
        RowColumn,
        ShardBatch,
        ShardLoader,
        agree_on_column,
    )
    from farandole.data.shard_source import ShardSource
    from farandole.data.sources import ArrowSource, ParquetSource
    from farandole.data.split import validation_mask
    from farandole.data.stream_output import StreamSource
    from farandole.data.values import Ragged, SparseRows, Values

__all__ = [
    "ArrowShard",
    "ArrowSource",
    "Batch",
    "CachedSource",
    "Column",
    "ColumnFacts",
    "DeltaSource",
    "FeedLoader",
    "FieldOptions",
    "FileSource",
    "Gather",
    "GlobalPlan",
    "Growing",
    "GrowingLoader",
    "IcebergSource",
    "Loader",
    "LocalPlan",
    "Metrics",
    "Number",
    "Order",
    "ParquetSource",
    "Policy",
    "Ragged",
    "Reader",
    "ReaderOptions",
    "Reading",
    "RowColumn",
    "SavedDataset",
    "SelectedSource",
    "ShardBatch",
    "ShardLoader",
    "ShardSource",
    "Source",
    "SparseRows",
    "StreamSource",
    "Values",
    "agree_on_column",
    "choose_lanes",
    "files",
    "make_batch_reader",
    "make_feed_reader",
    "make_reader",
    "permutation",
    "together",
    "validation_mask",
]

# Modules, and the public names that each defines.
_NAMES_BY_MODULE = {
    "agreement": "Gather together",
    "arrivals": "Growing",
    "batches": "Batch",
    "cache": "CachedSource",
    "delta": "DeltaSource",
    "feed_loader": "FeedLoader",
    "fields": "FieldOptions",
    "growing_loader": "GrowingLoader",
    "iceberg": "IcebergSource",
    "loader": "Loader",
    "meter": "Metrics",
    "order": "Order choose_lanes permutation",
    "plans": "GlobalPlan LocalPlan Policy",
    "reader_options": "ReaderOptions",
    "readers": "Reader make_batch_reader make_feed_reader make_reader",
    "reading": "Reading",
    "row_groups": "Source",
    "samples": "FileSource files",
    "saved_dataset": "SavedDataset",
    "selection": "SelectedSource",
    "shard": "ArrowShard Column ColumnFacts Number RowColumn ShardBatch ShardLoader agree_on_column",
    "shard_source": "ShardSource",
    "sources": "ArrowSource ParquetSource",
    "split": "validation_mask",
    "stream_output": "StreamSource",
    "values": "Ragged SparseRows Values",
}

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> object:  # PEP 562
        for module, names in _NAMES_BY_MODULE.items():
            if name in names.split():
                with _importing(__name__):
                    return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
