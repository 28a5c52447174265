"""Common schema of several files, and conversion of tables to it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from farandole.data.formats.row_groups import File
from farandole.errors import DataError


@dataclass(frozen=True, slots=True)
class CommonSchema:
    """The columns of several files: each column's type holds its values of all files.

    `problems` has the columns that cannot be read from all files, each with the reason; their types in `schema` are
    those of the first file that has them."""

    schema: pa.Schema
    problems: Mapping[str, str]

    def check(self, columns: Iterable[str]) -> None:
        """Raise `DataError` for the first column that cannot be read from all files."""
        for name in columns if self.problems else ():
            if name in self.problems:
                raise DataError(name, self.problems[name])


def one_schema(files: Sequence[File], schemas: Sequence[pa.Schema]) -> CommonSchema:
    """Return the common schema of all files.

    A column of type null gets its type from other files; integers get the width that holds all of them. Texts and bytes
    are large if they are in one file; views of them, and dictionaries of different types, become plain values."""
    fields: dict[str, pa.Field] = {}
    of: dict[str, File] = {}  # the file that a column's type is from
    problems: dict[str, str] = {}
    before: pa.Schema | None = None
    for file, schema in zip(files, schemas, strict=True):
        if before is not None and schema.equals(before):
            continue  # as most are
        held: set[str] = set()
        for field in schema:
            name = field.name
            if name in held:
                problems.setdefault(name, f"is in {file.path} more than once; give each column a name of its own")
            elif name not in fields:
                fields[name], of[name] = field.with_type(plain_type(field.type)), file
                if before is not None:
                    problems.setdefault(name, f"is in {file.path}, but not in {files[0].path}")
            elif field.type != (known := fields[name].type):
                kind = _common(known, plain_type(field.type))
                if kind is None:
                    problems.setdefault(name, f"is {known} in {of[name].path}, but {field.type} in {file.path}")
                elif kind != known:
                    fields[name], of[name] = fields[name].with_type(kind), file
            held.add(name)
        for name in fields.keys() - held:
            problems.setdefault(name, f"is in {of[name].path}, but not in {file.path}")
        before = schema
    return CommonSchema(pa.schema(fields.values(), schemas[0].metadata), problems)


def with_types(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table with its columns converted to their types in `schema`, that of a `CommonSchema`."""
    for place, field in enumerate(table.schema):
        kind = schema.field(field.name).type
        if field.type == kind:
            continue
        column = table.column(place)
        if pa.types.is_null(field.type):
            column = pa.nulls(table.num_rows, kind)
        elif isinstance(kind, pa.BaseExtensionType):
            column = pa.chunked_array(
                [pa.ExtensionArray.from_storage(kind, each.storage) for each in column.chunks], kind
            )
        else:
            column = column.cast(kind)
        table = table.set_column(place, field.with_type(kind), column)
    return table


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is one of texts."""
    return any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def is_binary(kind: pa.DataType) -> bool:
    """Return whether a type is one of bytes of any length."""
    return any(test(kind) for test in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view))


def is_list(kind: pa.DataType) -> bool:
    """Return whether a type is one of lists, of any length or of one."""
    return any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


def axes_of(kind: pa.FixedShapeTensorType) -> list[int]:
    """Return the order of a tensor's axes in memory."""
    return list(range(len(kind.shape)) if kind.permutation is None else kind.permutation)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the plain type for a view of texts or bytes, which some of Arrow's functions lack; else `kind`."""
    if pa.types.is_string_view(kind):
        return pa.string()
    return pa.binary() if pa.types.is_binary_view(kind) else kind


def _common(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the smallest type that holds the values of both types; None if there is none."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_dictionary(one) or pa.types.is_dictionary(other):
        return _common(
            *(plain_type(kind.value_type) if pa.types.is_dictionary(kind) else kind for kind in (one, other))
        )
    if isinstance(one, pa.FixedShapeTensorType) and isinstance(other, pa.FixedShapeTensorType):
        # Types that differ only in the names of dimensions hold the same values.
        same = (one.value_type, one.shape, axes_of(one)) == (other.value_type, other.shape, axes_of(other))
        return one if same else None
    for family, large in ((is_text, pa.large_string()), (is_binary, pa.large_binary())):
        if family(one) and family(other):
            return large
    if pa.types.is_integer(one) and pa.types.is_integer(other):
        return _wider(one, other)
    return _common_list(one, other)


def _common_list(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    plain: Callable[[pa.DataType], bool] = pa.types.is_list
    large: Callable[[pa.DataType], bool] = pa.types.is_large_list
    fixed: Callable[[pa.DataType], bool] = pa.types.is_fixed_size_list
    if fixed(one) and fixed(other) and one.list_size == other.list_size:
        item = _common(plain_type(one.value_type), plain_type(other.value_type))
        return None if item is None else pa.list_(item, one.list_size)
    if all(plain(kind) or large(kind) for kind in (one, other)):
        item = _common(plain_type(one.value_type), plain_type(other.value_type))
        make = pa.large_list if large(one) or large(other) else pa.list_
        return None if item is None else make(item)
    return None


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the smallest integer type that holds the integers of both types; None if there is none."""
    if pa.types.is_signed_integer(one) == pa.types.is_signed_integer(other):
        return max(one, other, key=lambda kind: kind.bit_width)
    signed, unsigned = (one, other) if pa.types.is_signed_integer(one) else (other, one)
    bits = max(signed.bit_width, 2 * unsigned.bit_width)
    return {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}.get(bits)
