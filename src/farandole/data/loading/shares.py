"""Summaries of the rows that each rank holds, from which all ranks plan the same columns and steps."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from farandole.data.formats.columns import check_names
from farandole.data.formats.fields import FieldOptions
from farandole.data.formats.source import Source
from farandole.data.loading.order import choose_lanes
from farandole.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Summary of one rank's rows, for the other ranks."""

    rows: int
    nbytes: int
    lanes: int  # the number that `choose_lanes` returns for its row groups
    nulls: Mapping[str, int]
    sample: bytes  # a few rows as an Arrow stream: the shortest and longest arrays, a vector of each kind
    mark: str  # hash of the schema and of each row group's size and first row


def look_at_share(source: Source, columns: Sequence[str], options: FieldOptions, most_bytes: int) -> Share:
    """Summarize a rank's rows in one pass: nulls, lengths of arrays, and the first row of each row group.

    One row group of each lane takes at most `most_bytes`. Raises `DataError` for columns, `ConfigError` for options."""
    check_names(source.schema, columns)
    options.check(columns)
    nulls, digest = dict.fromkeys(columns, 0), hashlib.sha256()
    digest.update(source.schema.serialize())
    sampled = []
    groups = [group for group in source.row_groups if group.rows]
    for group in groups:
        table = source.read(group, columns)
        for name in columns:
            nulls[name] += table[name].null_count
        digest.update(repr((group.rows, table.slice(0, 1).to_pylist())).encode())
        sampled.append(_sample_rows(table))
    nbytes = source.nbytes(columns)
    return Share(
        rows=sum(group.rows for group in groups),
        nbytes=nbytes,
        lanes=choose_lanes([group.rows for group in groups], nbytes, most_bytes=most_bytes),
        nulls=nulls,
        sample=_join_samples(pa.schema([source.schema.field(name) for name in columns]), sampled),
        mark=digest.hexdigest(),
    )


def check_shares(shares: Sequence[Share], columns: Sequence[str], options: FieldOptions | None) -> None:
    """Raise `DataError` if no rank has rows, and for nulls without a value that replaces them in `options`.

    A transform gets nulls; then `options` is None."""
    rows = sum(share.rows for share in shares)
    if not rows:
        raise DataError("", f"there are no rows on any of {len(shares)} ranks")
    for name in columns if options is not None else ():
        nulls = sum(share.nulls[name] for share in shares)
        if nulls and options is not None and options.nulls.get(name) is None:
            raise DataError(
                name,
                f"{nulls} of {rows} rows are null; fill or drop them before, or say what stands for them: "
                f"nulls={{'{name}': ...}}",
            )


def _sample_rows(table: pa.Table) -> pa.Table:
    """Return the rows with the extreme values of nested columns; other columns get nulls.

    Reads only the lengths of arrays and the kinds of vectors. All ranks plan fields from all ranks' samples."""
    rows: set[int] = set()
    nested = [name for name in table.column_names if pa.types.is_nested(table.schema.field(name).type)]
    for name in nested:
        column = table[name].combine_chunks() if table[name].num_chunks != 1 else table[name].chunk(0)
        rows.update(_extremes(column))
    if not rows:
        return table.slice(0, 0)
    chosen = pa.concat_tables([table.slice(row, 1) for row in sorted(rows)])
    columns = [
        chosen[name] if name in nested else pa.nulls(len(rows), table.schema.field(name).type)
        for name in table.column_names
    ]
    return pa.table(columns, schema=_nullable(table.schema))


def _join_samples(schema: pa.Schema, samples: Sequence[pa.Table]) -> bytes:
    """Return the extreme rows of all samples as an Arrow stream, which has the columns even without rows."""
    nullable = _nullable(schema)
    whole = pa.concat_tables(
        [pa.Table.from_batches([], nullable), *(pa.table(each.columns, schema=nullable) for each in samples)]
    )
    whole = _sample_rows(whole.combine_chunks())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, whole.schema) as writer:
        writer.write_table(whole)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema])


def _extremes(column: pa.Array) -> list[int]:
    """Return the rows with the shortest and the longest array, or with a sparse and a dense vector."""
    # Imported here: pyarrow.compute takes longer to load than farandole, and only nested columns need it.
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        measures = pc.list_value_length(column)
    elif pa.types.is_struct(kind) and kind.num_fields and pa.types.is_integer(kind.field(0).type):
        measures = pc.struct_field(column, [0])  # a vector's kind, dense or sparse
    else:
        return []
    extremes = pc.min_max(measures).values()
    return [pc.index(measures, extreme).as_py() for extreme in extremes if extreme.is_valid]
