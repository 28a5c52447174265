"""Conversion of Arrow columns to NumPy arrays, planned once, and alike on all ranks, from schema and first rows."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from farandole.data.formats.decimals import nearest_floats
from farandole.data.formats.fills import checked_fill
from farandole.data.formats.images import decode_images, images_in, is_image
from farandole.data.formats.schemas import axes_of, is_binary, is_list, is_text, plain_type
from farandole.data.loading.values import Array, Ragged, SparseRows, Values, cells_of, check_exact
from farandole.errors import ConfigError, DataError

_VECTOR = ("type", "size", "indices", "values")  # fields of the struct that Spark writes for a pyspark.ml vector
_SPARSE = 0  # `type` of a sparse vector; 1 is dense


@dataclass(frozen=True, kw_only=True)
class FieldOptions:
    """Options of columns, by name.

    nulls: the value that replaces nulls. Nulls in a column without one are refused; a transform gets them as NaN, NaT
    or None instead, and must not leave them. vocabulary: a list of texts; each text becomes its index in the list, as
    int64. ragged: columns whose arrays may differ in length, even if the first rows have one length. dense: columns of
    vectors that become dense arrays, even if some are sparse. images: height and width to which a column's images are
    resized; `orient`: whether images are turned by their EXIF orientation.
    """

    nulls: Mapping[str, object] = field(default_factory=dict)
    vocabulary: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ragged: Sequence[str] = ()
    dense: Sequence[str] = ()
    images: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    orient: bool = True

    def check(self, columns: Sequence[str]) -> None:
        """Raise `ConfigError` for an option that names a column which is not read."""
        known = frozenset(columns)
        for setting in ("nulls", "vocabulary", "ragged", "dense", "images"):
            for name in getattr(self, setting):
                if name not in known:
                    raise ConfigError(setting, f"'{name}' is not among the columns that are read: {', '.join(columns)}")


@dataclass(frozen=True, kw_only=True)
class Field(ABC):
    """A column's name, and the conversion of its rows to `Values`. Can be pickled, and used from any thread."""

    name: str
    kind: str  # description for logs: "float32[64]"
    fill: object = None  # replaces nulls; None: nulls are refused
    lenient: bool = False  # for a transform, which gets nulls, and arrays of any length

    def values(self, column: pa.ChunkedArray) -> Values:
        """Convert rows. Values that need no conversion may share memory with `column`.

        Unless the field is `lenient`, raises `DataError` for nulls without a `fill`, and for rows whose shape differs
        from the planned one."""
        whole = _one_array(column)
        if pa.types.is_dictionary(whole.type):
            whole = whole.dictionary_decode()
        if isinstance(whole, pa.ExtensionArray):
            whole = whole.storage
        if whole.type != (plain := plain_type(whole.type)):
            whole = whole.cast(plain)
        if whole.null_count:
            if self.fill is None and self.lenient:
                return self._convert_nulls(whole)
            if self.fill is None:
                raise DataError(
                    self.name,
                    f"{whole.null_count} of {len(whole)} rows are null; fill or drop them before, or say what stands "
                    f"for them: nulls={{'{self.name}': ...}}",
                )
            whole = whole.fill_null(pa.scalar(self.fill, whole.type))
        return self._convert(whole)

    @abstractmethod
    def _convert(self, column: pa.Array) -> Values: ...

    def _convert_nulls(self, column: pa.Array) -> Values:
        """Convert rows of which some are null, and become None among objects."""
        cells = np.full(len(column), None)
        cells[column.is_valid().to_numpy(zero_copy_only=False)] = cells_of(self._convert(column.drop_null()))
        return cells

    def _items(self, items: pa.Array) -> Array:
        """Convert the items of arrays."""
        if items.null_count and not self.lenient:
            raise DataError(self.name, f"{items.null_count} items of its arrays are null; fill them before")
        return _numbers_or_nulls(self.name, items) if items.null_count else _numbers(items)


@dataclass(frozen=True, kw_only=True)
class Numbers(Field):
    """Numbers, booleans, times, dates."""

    def _convert(self, column: pa.Array) -> Values:
        return _numbers(column)

    def _convert_nulls(self, column: pa.Array) -> Values:
        return _numbers_or_nulls(self.name, column)


@dataclass(frozen=True, kw_only=True)
class Objects(Field):
    """Texts and bytes, as arrays of Python objects."""

    def _convert(self, column: pa.Array) -> Values:
        found: Array = column.to_numpy(zero_copy_only=False)
        return found


@dataclass(frozen=True, kw_only=True)
class Codes(Field):
    """Texts, as their indices in a list of words."""

    words: tuple[str, ...]

    def _convert(self, column: pa.Array) -> Values:
        # Imported here: pyarrow.compute takes longer to load than farandole, and columns of numbers do not need it.
        import pyarrow.compute as pc

        places = pc.index_in(column, value_set=pa.array(self.words, column.type))
        if places.null_count:
            unknown = column.filter(places.is_null())[0].as_py()
            raise DataError(self.name, f"{unknown!r} is not in its vocabulary of {len(self.words)} words")
        codes: NDArray[np.int64] = places.to_numpy().astype(np.int64)
        return codes


@dataclass(frozen=True, kw_only=True)
class Arrays(Field):
    """Arrays of numbers of one shape, as an array (rows, *shape)."""

    shape: tuple[int, ...]
    flat: bool = False  # each row is one flat list of all items, as in Arrow's fixed-shape tensors

    def _convert(self, column: pa.Array) -> Values:
        flat = column
        for length in [math.prod(self.shape)] if self.flat else self.shape:
            if flat.null_count:  # `flatten` leaves them out
                raise DataError(self.name, f"{flat.null_count} arrays within its arrays are null; fill them before")
            if pa.types.is_fixed_size_list(flat.type):
                flat = flat.flatten()
                continue
            lengths = np.diff(_view(flat.offsets))
            if len(lengths) and (lengths.min() != length or lengths.max() != length):
                if self.lenient and self.shape == (length,):
                    return _ragged(column, self._items)
                raise DataError(
                    self.name,
                    f"arrays of {_spell_range(lengths)} items where the first rows have {length}; pad or "
                    f"cut them, or read them as they are: ragged=['{self.name}']",
                )
            flat = flat.flatten()
        return self._items(flat).reshape(len(column), *self.shape)


@dataclass(frozen=True, kw_only=True)
class RaggedArrays(Field):
    """Arrays of numbers of different lengths."""

    def _convert(self, column: pa.Array) -> Values:
        return _ragged(column, self._items)


@dataclass(frozen=True, kw_only=True)
class Images(Field):
    """Images of one size, as an array (rows, height, width, 3)."""

    shape: tuple[int, int]
    resize: bool
    orient: bool

    def _convert(self, column: pa.Array) -> Values:
        return decode_images(column, self.name, self.shape, resize=self.resize, orient=self.orient)


@dataclass(frozen=True, kw_only=True)
class Vectors(Field):
    """Vectors of pyspark.ml of one width, which may be dense and sparse in one column."""

    width: int
    sparse: bool

    def _convert(self, column: pa.Array) -> Values:
        kinds, sizes, indices, values = (part for part in column.flatten())
        items = np.asarray(_numbers(values.flatten()), np.float64)
        held = np.diff(_view(values.offsets))
        thin = _view(kinds) == _SPARSE
        # Dense vectors have a null size. Drop the validity bitmap: their sizes are not used.
        sizes = pa.Array.from_buffers(sizes.type, len(sizes), [None, sizes.buffers()[1]], offset=sizes.offset)
        widths = np.where(thin, _view(sizes), held)
        if len(widths) and (widths.min() != self.width or widths.max() != self.width):
            raise DataError(self.name, f"vectors of {_spell_range(widths)} where the first has {self.width}")
        if not thin.any() and not self.sparse:
            return items.reshape(len(column), self.width)
        places = np.empty(len(items), np.int64)
        places[np.repeat(thin, held)] = _view(indices.flatten())
        places[np.repeat(~thin, held)] = np.tile(np.arange(self.width), int((~thin).sum()))
        rows = SparseRows(items, places, np.concatenate([[0], np.cumsum(held)]), self.width)
        return rows if self.sparse else rows.dense()


def is_vector(kind: pa.DataType) -> bool:
    """Return whether `kind` is the type of a column of pyspark.ml vectors."""
    return bool(pa.types.is_struct(kind)) and tuple(child.name for child in kind) == _VECTOR


def plan_fields(
    schema: pa.Schema, columns: Sequence[str], first_rows: pa.Table, options: FieldOptions, *, transforms: bool = False
) -> list[Field]:
    """Choose a field for each column, a lenient one if `transforms`; `first_rows` must be the same on all ranks.

    The first rows decide the lengths of arrays whose type declares none. Raises `DataError` naming a column that no
    tensor can hold, `ConfigError` for an option that names no column.
    """
    options.check(columns)
    fields = [_plan(name, schema.field(name).type, first_rows[name], options) for name in columns]
    return [replace(field, lenient=not isinstance(field, Codes)) for field in fields] if transforms else fields


def is_held(kind: pa.DataType) -> bool:
    """Return whether some tensor holds the values of a type."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if is_list(kind):
        while is_list(kind):
            kind = kind.value_type
        return _is_number(kind)
    plain = _is_number(kind) or is_text(kind) or is_binary(kind) or pa.types.is_fixed_size_binary(kind)
    return plain or _is_tensor(kind) or is_vector(kind) or is_image(kind)


def lengths_in_rows(kind: pa.DataType) -> bool:
    """Return whether a type of arrays does not declare all their lengths, so that only rows show them."""
    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_nested(kind))


def _plan(name: str, kind: pa.DataType, seen: pa.ChunkedArray, options: FieldOptions) -> Field:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    fill = options.nulls.get(name)
    if fill is not None:
        fill = checked_fill(name, kind, fill)
    if _is_number(kind):
        return Numbers(name=name, kind=str(kind), fill=fill)
    if is_text(kind) and name in options.vocabulary:
        words = tuple(options.vocabulary[name])
        return Codes(name=name, kind=f"int64, one of {len(words)} words", fill=fill, words=words)
    if is_text(kind) or is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return Objects(name=name, kind=str(kind), fill=fill)
    if _is_tensor(kind):
        shape = tuple(kind.shape)
        return Arrays(name=name, kind=f"{kind.value_type}{list(shape)}", fill=fill, shape=shape, flat=True)
    known = _one_array(seen.drop_null())
    if is_vector(kind):
        return _plan_vectors(name, known, fill, sparse=name not in options.dense)
    if is_image(kind):
        return _plan_images(name, known, fill, options)
    if is_list(kind):
        return _plan_arrays(name, kind, known, fill, ragged=name in options.ragged)
    raise DataError(name, f"no tensor holds {kind}; cast it, or leave it out of the columns that are read")


def _plan_vectors(name: str, known: pa.Array, fill: object, *, sparse: bool) -> Field:
    if not len(known):
        raise DataError(name, "the first row group has no vector that would show their width")
    kinds, sizes, _, values = known.flatten()
    any_sparse = sparse and bool((_view(kinds) == _SPARSE).any())
    width = sizes[0].as_py() if kinds[0].as_py() == _SPARSE else len(values[0])
    kind = f"{'sparse ' if any_sparse else ''}float64[{width}]"
    return Vectors(name=name, kind=kind, fill=fill, width=width, sparse=any_sparse)


def _plan_images(name: str, known: pa.Array, fill: object, options: FieldOptions) -> Field:
    size = options.images.get(name)
    if size is None and not len(known):
        raise DataError(name, "the first row group has no image that would show their size")
    height, width, *_ = size or next(images_in(known[:1], name, None, orient=options.orient)).shape
    kind, shape = f"uint8[{height}, {width}, 3]", (height, width)
    return Images(name=name, kind=kind, fill=fill, shape=shape, resize=size is not None, orient=options.orient)


def _plan_arrays(name: str, kind: pa.DataType, known: pa.Array, fill: object, *, ragged: bool) -> Field:
    shape: list[int] = []
    alike = not ragged
    while is_list(kind):
        if pa.types.is_fixed_size_list(kind):
            shape.append(kind.list_size)
        else:
            lengths = np.unique(np.diff(_view(known.offsets)))
            alike = alike and len(lengths) == 1
            shape.append(int(lengths[0]) if len(lengths) else 0)
        kind, known = kind.value_type, known.flatten()
    if not _is_number(kind):
        raise DataError(name, f"no tensor holds arrays of {kind}; cast them, or leave the column out")
    if alike:
        return Arrays(name=name, kind=f"{kind}{shape}", fill=fill, shape=tuple(shape))
    if len(shape) > 1:
        raise DataError(name, "no tensor holds nested arrays of different lengths; flatten or pad them")
    return RaggedArrays(name=name, kind=f"{kind}[different lengths]", fill=fill)


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)


def _spell_range(numbers: Array) -> str:
    least, most = numbers.min(), numbers.max()
    return f"{least}" if least == most else f"{least} to {most}"


def _is_tensor(kind: pa.DataType) -> bool:
    """Return whether a type is one of tensors of one shape whose axes are in order."""
    if not isinstance(kind, pa.FixedShapeTensorType):
        return False
    return _is_number(kind.value_type) and axes_of(kind) == sorted(axes_of(kind))


def _is_number(kind: pa.DataType) -> bool:
    tests = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_temporal)
    return any(test(kind) for test in tests) and not pa.types.is_interval(kind)


def _numbers(column: pa.Array) -> Array:
    if pa.types.is_decimal(column.type):
        return nearest_floats(column)
    if pa.types.is_time(column.type):
        column = column.cast(pa.int64() if pa.types.is_time64(column.type) else pa.int32())
    if pa.types.is_date64(column.type):
        column = column.cast(pa.timestamp("ms"))
    plain = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    found: Array = _view(column) if plain else column.to_numpy(zero_copy_only=False)
    if found.flags.writeable or not column.buffers()[1].is_mutable:
        return found
    # Arrow makes all views read-only, but this memory came from a decoder and has no other user.
    whole = np.frombuffer(column.buffers()[1], found.dtype)
    return whole[column.offset : column.offset + len(column)]


def _view(column: pa.Array) -> Array:
    """Return a view of integers or floats without nulls.

    Uses DLPack: Arrow's `to_numpy` imports pandas, which takes longer than everything else that a rank needs to get a
    DataFrame's rows."""
    view: Array = np.from_dlpack(column)
    return view


def _ragged(column: pa.Array, convert: Callable[[pa.Array], Array]) -> Ragged:
    offsets = _view(column.offsets).astype(np.int64)
    return Ragged(convert(column.flatten()), offsets - offsets[0])


def _numbers_or_nulls(name: str, column: pa.Array) -> Array:
    """Return numbers with NaN, times with NaT, or booleans with None for nulls; integers become float64."""
    if pa.types.is_floating(column.type):
        return _numbers(column.fill_null(pa.scalar(math.nan, column.type)))
    there = _numbers(column.drop_null())
    if there.dtype.kind == "b":
        found = np.full(len(column), None)
    elif there.dtype.kind in "mM":
        found = np.full(len(column), "nat", there.dtype)
    else:
        found = np.full(len(column), math.nan)
        check_exact(name, there)
    found[column.is_valid().to_numpy(zero_copy_only=False)] = there
    return found
