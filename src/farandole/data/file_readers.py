"""Readers with Petastorm's names and arguments: `make_reader` and `make_batch_reader`.

The arguments have Petastorm's meaning, but rows are distributed differently: every row comes exactly once per epoch
over all shards, in an order that changes with the epoch. docs/guide/data.md lists the differences.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from farandole.data.formats.cache import CachedSource
from farandole.data.formats.columns import SchemaField, columns_by_pattern
from farandole.data.formats.row_groups import rows_in
from farandole.data.formats.source import Source
from farandole.data.formats.sources import ParquetSource
from farandole.data.loading.agreement import from_first, place_in
from farandole.data.loading.loader import Loader
from farandole.data.loading.state import NO_VERSION
from farandole.data.reader_options import ReaderOptions
from farandole.data.readers import LEAST_BATCH, Reader, checked_options, reading_of, selected
from farandole.data.tables.versions import same_version
from farandole.data.unischema.decoding import DecodedPredicate, decodes_bytes
from farandole.data.unischema.schema import Unischema
from farandole.data.unischema.stored import FILE, read_schema
from farandole.errors import NoDataAvailableError
from farandole.masking import mask

log = logging.getLogger(__name__)

_DEFAULT_CACHE_LIMIT = 10 << 30
_DECODED_ROWS = 64  # of a batch whose arrays take more memory than what is stored


def make_reader(
    dataset_url: str | Sequence[str], schema_fields: Sequence[SchemaField] | None = None, **options: object
) -> Reader:
    """Return a reader of single rows, as named tuples; `options` are the fields of `ReaderOptions`.

    Raises `DataError` and `SourceError` for the data, `ConfigError` for options."""
    return _read_files(dataset_url, schema_fields, checked_options(**options), batched=False)


def make_batch_reader(
    dataset_url_or_urls: str | Sequence[str], schema_fields: Sequence[SchemaField] | None = None, **options: object
) -> Reader:
    """Return a reader of batches, as named tuples of arrays; `options` are the fields of `ReaderOptions`.

    A batch has about as many rows as a row group, the last batch of an epoch fewer. Raises as `make_reader` does."""
    return _read_files(dataset_url_or_urls, schema_fields, checked_options(**options), batched=True)


def _read_files(
    urls: str | Sequence[str], schema_fields: Sequence[SchemaField] | None, options: ReaderOptions, *, batched: bool
) -> Reader:
    files = ParquetSource(urls, options.storage_options, version=options.version, gather=options.gather)
    schema = None if batched else _schema_beside(files, urls, options)
    source = same_version(files, options.gather)
    if source.version != NO_VERSION and options.version is None and options.gather is None and options.cur_shard == 0:
        log.warning(
            "%d shards each open the newest version of %s, which may differ if it is written to: pass version=%d, or "
            "gather=hvd.allgather_object",
            options.shard_count,
            mask(str(urls)),
            source.version,
        )
    if options.cache_type == "local-disk":
        assert options.cache_location is not None, "checked with the options"
        source = CachedSource(source, options.cache_location, options.cache_size_limit or _DEFAULT_CACHE_LIMIT)
    if schema is not None and options.predicate is not None:
        options = replace(options, predicate=DecodedPredicate(schema, options.predicate))
    source = selected(source, options, batched=batched)
    columns = columns_by_pattern(source.schema, schema_fields, warn=not options.cur_shard)
    rows, shards = int(rows_in(source.row_groups).sum()), options.shard_count or 1
    if options.num_epochs is None and 0 < rows < shards:
        # Refused on every rank: a rank without rows would wait for a row forever, and the others for that rank.
        problem = f"{rows} rows for {shards} shards in epochs without end; take at most {rows} shards"
        raise NoDataAvailableError("", problem)
    loader = Loader(
        source,
        batch_size=_DECODED_ROWS if schema is not None and decodes_bytes(schema) else _batch_rows(source),
        policy="join",
        columns=columns,
        rank=options.cur_shard or 0,
        size=shards,
        reading=reading_of(options, batched=batched, schema=schema),
        gather=options.gather,
        alone=True,  # readers of different shards need their next batches at different times
    )
    return Reader(loader, options.num_epochs, batched=batched)


def _schema_beside(source: ParquetSource, urls: str | Sequence[str], options: ReaderOptions) -> Unischema | None:
    """Return the schema of a Petastorm data set, None for other files. With `gather`, the first shard reads it."""
    look = partial(source.beside, FILE)
    content = look() if options.gather is None else from_first(look, options.gather, place_in(options.gather)[0])
    return None if content is None else read_schema(content, mask(str(urls)))


def _batch_rows(source: Source) -> int:
    held = [group.rows for group in source.row_groups if group.rows]
    return max(LEAST_BATCH, sum(held) // max(1, len(held)))
