"""The few rows by which ranks agree on what columns become: the shortest and longest arrays, a vector of each kind."""

from collections.abc import Sequence

import pyarrow as pa

__all__ = ["join_samples", "sample_rows"]


def sample_rows(table: pa.Table) -> pa.Table:
    """Return rows that show how different the values of nested columns are; other columns hold nulls instead.

    Looks through the lengths of arrays, and nothing else. Fields are planned from such rows of all ranks alike."""
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


def join_samples(schema: pa.Schema, samples: Sequence[pa.Table]) -> bytes:
    """Put samples together and choose among their rows again; as an Arrow stream, which has columns without rows."""
    nullable = _nullable(schema)
    whole = pa.concat_tables(
        [pa.Table.from_batches([], nullable), *(pa.table(each.columns, schema=nullable) for each in samples)]
    )
    whole = sample_rows(whole.combine_chunks())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, whole.schema) as writer:
        writer.write_table(whole)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema])


def _extremes(column: pa.Array) -> list[int]:
    """The rows with the least and the greatest value of what tells rows of this column apart."""
    # Here, as pyarrow.compute takes longer to load than farandole, and only nested columns need it.
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        told = pc.list_value_length(column)
    elif pa.types.is_struct(kind) and kind.num_fields and pa.types.is_integer(kind.field(0).type):
        told = pc.struct_field(column, [0])  # a vector's kind, dense or sparse
    else:
        return []
    extremes = pc.min_max(told).values()
    return [pc.index(told, extreme).as_py() for extreme in extremes if extreme.is_valid]
