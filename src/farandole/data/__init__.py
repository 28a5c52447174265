"""Loaders and readers of rows: every row exactly once per epoch, the same number of steps on every rank.

Names are imported on first use: modules that read files load slowly, and ranks that get a DataFrame's rows do not need
them."""

from importlib import import_module
from typing import TYPE_CHECKING

from farandole.extras import importing as _importing

if TYPE_CHECKING:
    from farandole.data.formats.cache import CachedSource
    from farandole.data.formats.fields import FieldOptions
    from farandole.data.formats.samples import FileSource, files
    from farandole.data.formats.saved_dataset import SavedDataset
    from farandole.data.formats.selection import SelectedSource
    from farandole.data.formats.shard_source import ShardSource
    from farandole.data.formats.source import Source
    from farandole.data.formats.sources import ArrowSource, ParquetSource
    from farandole.data.loading.agreement import Gather, together
    from farandole.data.loading.arrivals import Growing
    from farandole.data.loading.batches import Batch
    from farandole.data.loading.feed_loader import FeedLoader
    from farandole.data.loading.growing_loader import GrowingLoader
    from farandole.data.loading.loader import Loader
    from farandole.data.loading.meter import Metrics
    from farandole.data.loading.order import Order, choose_lanes, permutation
    from farandole.data.loading.plans import GlobalPlan, LocalPlan, Policy
    from farandole.data.loading.reading import Reading
    from farandole.data.loading.shard import (
        ArrowShard,
        Column,
        ColumnFacts,
        Number,
        RowColumn,
        ShardBatch,
        ShardLoader,
        agree_on_column,
    )
    from farandole.data.loading.split import validation_mask
    from farandole.data.loading.values import Ragged, SparseRows, Values
    from farandole.data.reader_options import ReaderOptions
    from farandole.data.readers import Reader, make_batch_reader, make_feed_reader, make_reader
    from farandole.data.tables.delta import DeltaSource
    from farandole.data.tables.iceberg import IcebergSource
    from farandole.data.tables.stream_output import StreamSource

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
    "loading.agreement": "Gather together",
    "loading.arrivals": "Growing",
    "loading.batches": "Batch",
    "formats.cache": "CachedSource",
    "tables.delta": "DeltaSource",
    "loading.feed_loader": "FeedLoader",
    "formats.fields": "FieldOptions",
    "loading.growing_loader": "GrowingLoader",
    "tables.iceberg": "IcebergSource",
    "loading.loader": "Loader",
    "loading.meter": "Metrics",
    "loading.order": "Order choose_lanes permutation",
    "loading.plans": "GlobalPlan LocalPlan Policy",
    "reader_options": "ReaderOptions",
    "readers": "Reader make_batch_reader make_feed_reader make_reader",
    "loading.reading": "Reading",
    "formats.source": "Source",
    "formats.samples": "FileSource files",
    "formats.saved_dataset": "SavedDataset",
    "formats.selection": "SelectedSource",
    "loading.shard": "ArrowShard Column ColumnFacts Number RowColumn ShardBatch ShardLoader agree_on_column",
    "formats.shard_source": "ShardSource",
    "formats.sources": "ArrowSource ParquetSource",
    "loading.split": "validation_mask",
    "tables.stream_output": "StreamSource",
    "loading.values": "Ragged SparseRows Values",
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
