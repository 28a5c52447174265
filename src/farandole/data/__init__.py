"""Loaders and readers of rows: every row exactly once per epoch, the same number of steps on every rank.

Names are imported on first use: modules that read files load slowly, and ranks that get a DataFrame's rows do not need
them."""

from importlib import import_module
from typing import TYPE_CHECKING

from farandole.extras import importing as _importing

if TYPE_CHECKING:
    from farandole.data.file_readers import make_batch_reader as make_batch_reader
    from farandole.data.file_readers import make_reader as make_reader
    from farandole.data.formats.cache import CachedSource as CachedSource
    from farandole.data.formats.fields import FieldOptions as FieldOptions
    from farandole.data.formats.samples import FileSource as FileSource
    from farandole.data.formats.samples import files as files
    from farandole.data.formats.saved_dataset import SavedDataset as SavedDataset
    from farandole.data.formats.selection import SelectedSource as SelectedSource
    from farandole.data.formats.shard_source import ShardSource as ShardSource
    from farandole.data.formats.source import Source as Source
    from farandole.data.formats.sources import ArrowSource as ArrowSource
    from farandole.data.formats.sources import ParquetSource as ParquetSource
    from farandole.data.loading.agreement import Gather as Gather
    from farandole.data.loading.agreement import together as together
    from farandole.data.loading.arrivals import Growing as Growing
    from farandole.data.loading.batches import Batch as Batch
    from farandole.data.loading.feed_loader import FeedLoader as FeedLoader
    from farandole.data.loading.growing_loader import GrowingLoader as GrowingLoader
    from farandole.data.loading.loader import Loader as Loader
    from farandole.data.loading.meter import Metrics as Metrics
    from farandole.data.loading.order import Order as Order
    from farandole.data.loading.order import choose_lanes as choose_lanes
    from farandole.data.loading.order import permutation as permutation
    from farandole.data.loading.plans import GlobalPlan as GlobalPlan
    from farandole.data.loading.plans import LocalPlan as LocalPlan
    from farandole.data.loading.plans import Policy as Policy
    from farandole.data.loading.reading import Reading as Reading
    from farandole.data.loading.shard import ArrowShard as ArrowShard
    from farandole.data.loading.shard import Column as Column
    from farandole.data.loading.shard import ColumnFacts as ColumnFacts
    from farandole.data.loading.shard import Number as Number
    from farandole.data.loading.shard import RowColumn as RowColumn
    from farandole.data.loading.shard import ShardBatch as ShardBatch
    from farandole.data.loading.shard import ShardLoader as ShardLoader
    from farandole.data.loading.shard import agree_on_column as agree_on_column
    from farandole.data.loading.split import validation_mask as validation_mask
    from farandole.data.loading.values import Ragged as Ragged
    from farandole.data.loading.values import SparseRows as SparseRows
    from farandole.data.loading.values import Values as Values
    from farandole.data.reader_options import ReaderOptions as ReaderOptions
    from farandole.data.readers import Reader as Reader
    from farandole.data.readers import make_feed_reader as make_feed_reader
    from farandole.data.tables.delta import DeltaSource as DeltaSource
    from farandole.data.tables.iceberg import IcebergSource as IcebergSource
    from farandole.data.tables.stream_output import StreamSource as StreamSource

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
    "file_readers": "make_batch_reader make_reader",
    "readers": "Reader make_feed_reader",
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

__all__ = sorted(" ".join(_NAMES_BY_MODULE.values()).split())

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> object:  # PEP 562
        for module, names in _NAMES_BY_MODULE.items():
            if name in names.split():
                with _importing(__name__):
                    return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
