"""The schema of a Petastorm data set, which its file `_common_metadata` holds as a pickle.

Only classes that schemas consist of are loaded: a pickle of others could run any program."""

import io
import json
import pickle
import posixpath
from collections import Counter, OrderedDict
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data.formats.file_systems import Files
from farandole.data.formats.sources import ParquetSource
from farandole.data.unischema import codecs
from farandole.data.unischema.schema import Unischema, UnischemaField
from farandole.errors import SourceError

FILE = "_common_metadata"
_SCHEMA, _ROW_GROUPS = b"dataset-toolkit.unischema.v1", b"dataset-toolkit.num_row_groups_per_file.v1"

_OURS = {
    ("petastorm.unischema", "Unischema"): Unischema,
    ("petastorm.unischema", "UnischemaField"): UnischemaField,
    ("petastorm.codecs", "CompressedImageCodec"): codecs.CompressedImageCodec,
    ("petastorm.codecs", "CompressedNdarrayCodec"): codecs.CompressedNdarrayCodec,
    ("petastorm.codecs", "NdarrayCodec"): codecs.NdarrayCodec,
    ("petastorm.codecs", "ScalarCodec"): codecs.ScalarCodec,
}
_PLACES = {kind: place for place, kind in _OURS.items()}
_PYTHONS = {
    ("collections", "OrderedDict"): OrderedDict,
    ("decimal", "Decimal"): Decimal,
    **{("builtins", kind.__name__): kind for kind in (bool, bytes, float, int, str)},
}
_SPARK = "pyspark.sql.types"
# NumPy's classes by name, also by the names that older versions had.
_NUMPYS = {
    **{kind.__name__: kind for kind in cast("set[type]", {np.dtype, *np.sctypeDict.values()})},
    "bool_": np.bool_,
    "str_": np.str_,
    "unicode_": np.str_,
    "bytes_": np.bytes_,
    "string_": np.bytes_,
}


def read_schema(content: bytes, where: str) -> Unischema | None:
    """Return the schema in the `content` of a `_common_metadata` at `where`; None if it has none.

    Raises `SourceError` for a schema that cannot be loaded, and names a class that is none of Petastorm's."""
    try:
        pickled = (pq.read_schema(pa.BufferReader(content)).metadata or {}).get(_SCHEMA)
    except pa.ArrowException as error:
        problem = f"its {FILE} cannot be read: {error}; remove it if the data set has no Unischema"
        raise SourceError(where, problem) from error
    if pickled is None:
        return None
    try:
        schema = _Unpickler(io.BytesIO(pickled)).load()
        if not isinstance(schema, Unischema) or not all(isinstance(each, UnischemaField) for each in schema):
            raise TypeError(f"it is a {type(schema).__name__} without fields")
    except Exception as error:  # a damaged pickle raises errors of any class
        remedy = "make_batch_reader reads its columns as they are stored"
        raise SourceError(where, f"its Unischema cannot be loaded: {error}; {remedy}") from error
    return schema


def write_schema(url: str, schema: Unischema) -> None:
    """Write the schema of the Parquet files in the folder `url`, and their numbers of row groups, as Petastorm does."""
    source, files = ParquetSource(url), Files.at(url)
    place = files.place(url).rstrip("/")
    groups = Counter(posixpath.relpath(group.file.path, place) for group in source.row_groups)
    pickled = io.BytesIO()
    _Pickler(pickled).dump(schema)
    metadata = {_SCHEMA: pickled.getvalue(), _ROW_GROUPS: json.dumps(groups).encode()}
    content = io.BytesIO()
    pq.write_metadata(source.schema.with_metadata(metadata), content)
    files.fs.pipe_file(f"{place}/{FILE}", content.getvalue())


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == _SPARK and name.isidentifier() and name.endswith("Type"):
            return _spark_type(name)
        if module in ("numpy", "numpy.dtypes") and name in _NUMPYS:
            return _NUMPYS[name]
        known = _OURS.get((module, name)) or _PYTHONS.get((module, name))
        if known is None:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return known


class _Pickler(pickle._Pickler):  # the one in Python, which lets a subclass choose how classes are named
    """Writes the places where Petastorm has its classes."""

    write: Callable[[bytes], object]
    memoize: Callable[[object], None]

    def save_global(self, obj: Any, name: str | None = None) -> None:
        stored = isinstance(obj, type) and issubclass(obj, codecs.StoredSparkType)
        place = (_SPARK, obj.kind) if stored else _PLACES.get(obj)
        if place is None:
            if isinstance(obj, type) and issubclass(obj, codecs.DataframeColumnCodec):
                raise pickle.PicklingError(f"readers do not know the codec {obj.__name__}; take one of Petastorm's")
            super().save_global(obj, name)  # type: ignore[misc]
            return
        self.write(pickle.GLOBAL + "\n".join([*place, ""]).encode())
        self.memoize(obj)


@lru_cache
def _spark_type(name: str) -> type[codecs.StoredSparkType]:
    return type(name, (codecs.StoredSparkType,), {"kind": name})
