"""Data sets with a Unischema: read as Petastorm reads them, and written as it writes them."""

import base64
import io
import json
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from farandole.compat.predicates import in_lambda
from farandole.data import make_batch_reader, make_reader
from farandole.data.transform import TransformSpec
from farandole.data.unischema.codecs import (
    CompressedImageCodec,
    CompressedNdarrayCodec,
    DataframeColumnCodec,
    NdarrayCodec,
    ScalarCodec,
)
from farandole.data.unischema.schema import Unischema, UnischemaField, dict_to_spark_row
from farandole.data.unischema.stored import FILE, read_schema, write_schema
from farandole.errors import DataError, SourceError

# What Petastorm 0.13.1 pickles for the fields that `test_the_schema_of_petastorm_itself` names.
OF_PETASTORM = base64.b64decode("""
gASVoQIAAAAAAACME3BldGFzdG9ybS51bmlzY2hlbWGUjAlVbmlzY2hlbWGUk5QpgZR9lCiMBV9uYW1llIwFSGVsbG+UjAdfZmllbGRzlIwLY29s
bGVjdGlvbnOUjAtPcmRlcmVkRGljdJSTlClSlCiMAmlklGgAjA5VbmlzY2hlbWFGaWVsZJSTlChoDIwFbnVtcHmUjAVpbnQzMpSTlCmMEHBldGFz
dG9ybS5jb2RlY3OUjAtTY2FsYXJDb2RlY5STlCmBlH2UjAtfc3BhcmtfdHlwZZSMEXB5c3Bhcmsuc3FsLnR5cGVzlIwLSW50ZWdlclR5cGWUk5Qp
gZRzYol0lIGUjANhcnKUaA4oaB5oD4wFdWludDiUk5QoTkuASx5OdJRoEowMTmRhcnJheUNvZGVjlJOUKYGUiXSUgZSMBWltYWdllGgOKGgnaCBL
BEsDSwOHlGgSjBRDb21wcmVzc2VkSW1hZ2VDb2RlY5STlCmBlH2UKIwMX2ltYWdlX2NvZGVjlIwELnBuZ5SMCF9xdWFsaXR5lEtQdWKJdJSBlIwB
c5RoDihoMmgPjARzdHJflJOUKWgUKYGUfZRoF2gYjApTdHJpbmdUeXBllJOUKYGUfZSMCWNvbGxhdGlvbpSMC1VURjhfQklOQVJZlHNic2KIdJSB
lIwBZJRoDihoP4wHZGVjaW1hbJSMB0RlY2ltYWyUk5QpaBQpgZR9lGgXaBiMC0RlY2ltYWxUeXBllJOUKYGUfZQojAlwcmVjaXNpb26USwqMBXNj
YWxllEsJjBBoYXNQcmVjaXNpb25JbmZvlIh1YnNiiHSUgZSMBG5vbmWUaA4oaE5oD4wHZmxvYXQzMpSTlClOiXSUgZR1aAxoHWgeaCZoJ2gxaDJo
Pmg/aE1oTmhSdWIu
""")
KEY = b"dataset-toolkit.unischema.v1"


def stored(schema: bytes, key: bytes = KEY) -> bytes:
    """Return a `_common_metadata` with a pickled schema."""
    content = io.BytesIO()
    pq.write_metadata(pa.schema([], {key: schema}), content)
    return content.getvalue()


def field(
    name: str, dtype: Any, shape: tuple[int | None, ...], codec: Any = None, nullable: bool = False
) -> UnischemaField:
    return UnischemaField(name, dtype, shape, codec, nullable)


def saved(array: np.ndarray[Any, Any]) -> bytes:
    target = io.BytesIO()
    np.save(target, array)
    return target.getvalue()


def write(folder: Path, fields: Sequence[UnischemaField], columns: Mapping[str, pa.Array]) -> str:
    """Write a data set of two row groups; return its path."""
    folder.mkdir()
    pq.write_table(pa.table(dict(columns)), folder / "a.parquet", row_group_size=3)
    write_schema(str(folder), Unischema("Rows", fields))
    return str(folder)


def rows_of(path: str, **options: Any) -> list[Any]:
    with make_reader(path, **options) as reader:
        return sorted(reader, key=lambda row: row.id)


def test_the_schema_of_petastorm_itself() -> None:
    schema = read_schema(stored(OF_PETASTORM), "here")
    assert schema is not None
    assert [(each.name, each.numpy_dtype, each.shape, each.nullable) for each in schema] == [
        ("id", np.int32, (), False),
        ("arr", np.uint8, (None, 128, 30, None), False),
        ("image", np.uint8, (4, 3, 3), False),
        ("s", np.str_, (), True),
        ("d", Decimal, (), True),
        ("none", np.float32, (), False),
    ]
    assert isinstance(schema.arr.codec, NdarrayCodec)
    assert isinstance(schema.image.codec, CompressedImageCodec) and schema.image.codec.image_codec == "png"
    assert read_schema(stored(OF_PETASTORM, b"another"), "here") is None


@pytest.mark.parametrize(
    "pickled, problem",
    [
        (pickle.dumps(os.system), "it refers to posix.system"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "it refers to builtins.eval"),
        (b"cpyspark.sql.types\nos.path\n.", "it refers to pyspark.sql.types.os.path"),
        (pickle.dumps(3), "it is a int without fields"),
        (OF_PETASTORM[:-9], "its Unischema cannot be loaded: pickle data was truncated; make_batch_reader"),
    ],
    ids=["function", "builtin", "path", "number", "cut"],
)
def test_other_pickles_are_refused(pickled: bytes, problem: str) -> None:
    with pytest.raises(SourceError, match=f"here: .*{problem}"):
        read_schema(stored(pickled), "here")


def test_a_file_that_is_no_parquet_is_named() -> None:
    with pytest.raises(SourceError, match=r"here: its _common_metadata cannot be read: .*; remove it if"):
        read_schema(b"nothing", "here")


def test_arrays_images_and_numbers_come_decoded(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(5)
    matrices = [random.normal(size=(2, 3)).astype(np.float32) for _ in range(5)]
    lists = [np.arange(number, dtype=np.int64) for number in range(5)]
    tables = [random.integers(0, 9, (1 + number, number), np.uint16) for number in range(5)]
    pictures = [random.integers(0, 255, (4, 5, 3), np.uint8) for _ in range(5)]
    grays = [random.integers(0, 65535, (4, 5), np.uint16) for _ in range(5)]

    def png(array: np.ndarray[Any, Any]) -> bytes:
        target = io.BytesIO()
        image.fromarray(array).save(target, "PNG")
        return target.getvalue()

    def packed(array: np.ndarray[Any, Any]) -> bytes:
        target = io.BytesIO()
        np.savez_compressed(target, arr=array)
        return target.getvalue()

    fields = [
        field("id", np.int16, (), ScalarCodec("unused")),  # type: ignore[arg-type]
        field("matrix", np.float32, (2, 3), NdarrayCodec()),
        field("list", np.int64, (None,), CompressedNdarrayCodec()),
        field("table", np.uint16, (None, None), NdarrayCodec()),
        field("picture", np.uint8, (4, 5, 3), CompressedImageCodec("png")),
        field("gray", np.uint16, (4, 5), CompressedImageCodec("png")),
        field("text", np.str_, ()),
    ]
    columns = {
        "id": pa.array(range(5), pa.int32()),
        "matrix": pa.array(map(saved, matrices)),
        "list": pa.array(map(packed, lists)),
        "table": pa.array(map(saved, tables)),
        "picture": pa.array(map(png, pictures)),
        "gray": pa.array(map(png, grays)),
        "text": pa.array([f"row {number}" for number in range(5)]),
    }
    path = write(tmp_path / "rows", fields, columns)
    for pool in ("dummy", "thread", "process"):
        rows = rows_of(path, reader_pool_type=pool, workers_count=2)
        assert [row.id.dtype for row in rows] == [np.int16] * 5 and [row.id for row in rows] == [*range(5)]
        for number, row in enumerate(rows):
            expected = [matrices[number], lists[number], tables[number], pictures[number], grays[number]]
            for found, wanted in zip([row.matrix, row.list, row.table, row.picture, row.gray], expected, strict=True):
                assert found.dtype == wanted.dtype and found.shape == wanted.shape and np.array_equal(found, wanted)
            assert row.text == f"row {number}"
    with make_batch_reader(path) as reader:  # as they are stored, as in Petastorm
        assert {type(cell) for batch in reader for cell in batch.matrix} == {bytes}


def test_predicates_and_transforms_get_decoded_values(tmp_path: Path) -> None:
    arrays = [np.full(2, number, np.int64) for number in range(6)]
    fields = [field("id", np.int64, ()), field("pair", np.int64, (2,), NdarrayCodec())]
    path = write(tmp_path / "rows", fields, {"id": pa.array(range(6)), "pair": pa.array(map(saved, arrays))})
    even = rows_of(path, predicate=in_lambda(["pair"], lambda pair: pair.sum() % 4 == 0))
    assert [row.id for row in even] == [0, 2, 4]
    spec = TransformSpec(lambda row: row | {"pair": row["pair"] * 2})
    assert [row.pair.tolist() for row in rows_of(path, transform_spec=spec)] == [[2 * n, 2 * n] for n in range(6)]


def test_nullable_fields_are_none_and_others_are_refused(tmp_path: Path) -> None:
    def columns() -> dict[str, pa.Array]:
        arrays = [None if number == 1 else saved(np.ones(2)) for number in range(4)]
        return {"id": pa.array(range(4)), "pair": pa.array(arrays), "age": pa.array([1, None, 3, 4], pa.int32())}

    def fields(nullable: bool) -> list[UnischemaField]:
        pair = field("pair", np.float64, (2,), NdarrayCodec(), nullable)
        return [field("id", np.int64, ()), pair, field("age", np.int8, (), nullable=nullable)]

    rows = rows_of(write(tmp_path / "may", fields(True), columns()))
    assert [row.pair is None for row in rows] == [False, True, False, False]
    assert [row.age for row in rows] == [1, None, 3, 4]
    with pytest.raises(DataError, match=r"column '(pair|age)': .* left 1 nulls"):
        rows_of(write(tmp_path / "never", fields(False), columns()))


@pytest.mark.parametrize(
    "cell, problem",
    [
        (saved(np.ones(3)), r"column 'pair': has shape \(2,\) in the schema, got \(3,\)"),
        (saved(np.ones(2, np.float32)), "column 'pair': is float64 in the schema, got float32"),
        (b"nothing", "column 'pair': cannot be decoded by NdarrayCodec"),
        (pickle.dumps(np.ones(2)), "column 'pair': cannot be decoded by NdarrayCodec"),
    ],
    ids=["shape", "dtype", "bytes", "pickle"],
)
def test_what_does_not_fit_the_schema_is_named(cell: bytes, problem: str, tmp_path: Path) -> None:
    fields = [field("id", np.int64, ()), field("pair", np.float64, (2,), NdarrayCodec())]
    path = write(tmp_path / "rows", fields, {"id": pa.array([0]), "pair": pa.array([cell])})
    with pytest.raises(DataError, match=problem):
        rows_of(path)


def test_a_folder_that_cannot_be_asked_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fields = [field("id", np.int64, ()), field("pair", np.float64, (2,), NdarrayCodec())]
    path = write(tmp_path / "rows", fields, {"id": pa.array([0]), "pair": pa.array([saved(np.ones(2))])})

    def refuse(fs: LocalFileSystem, path: str) -> bool:
        raise PermissionError("not yours")

    monkeypatch.setattr(LocalFileSystem, "exists", refuse)
    assert type(rows_of(path)[0].pair) is bytes
    assert f"{path}/_common_metadata is left out: it cannot be looked for: not yours" in caplog.text


def test_colors_of_16_bits_are_refused() -> None:
    pytest.importorskip("PIL")

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0))
    wide = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(7))) + chunk(b"IEND", b"")
    with pytest.raises(DataError, match="has colors of 16 bits"):
        CompressedImageCodec("png").decode(field("image", np.uint16, (1, 1, 3)), wide)


def test_a_written_schema_names_petastorms_classes_and_row_groups(tmp_path: Path) -> None:
    fields = [field("id", np.int64, ()), field("pair", np.int64, (2,), NdarrayCodec(), True)]
    arrays = [saved(np.zeros(2, np.int64))] * 4
    path = write(tmp_path / "rows", fields, {"id": pa.array(range(4)), "pair": pa.array(arrays)})
    metadata = pq.read_schema(Path(path) / FILE).metadata
    assert json.loads(metadata[b"dataset-toolkit.num_row_groups_per_file.v1"]) == {"a.parquet": 2}
    assert b"farandole" not in metadata[KEY] and b"petastorm.unischema\nUnischema" in metadata[KEY]
    again = read_schema((Path(path) / FILE).read_bytes(), path)
    assert again is not None
    assert [each[:3] for each in again] == [each[:3] for each in fields] and isinstance(again.pair.codec, NdarrayCodec)

    class Own(NdarrayCodec):
        pass

    with pytest.raises(pickle.PicklingError, match="readers do not know the codec Own"):
        write_schema(path, Unischema("Rows", [field("pair", np.int64, (2,), Own())]))


def test_rows_for_spark_are_encoded_and_checked() -> None:
    types = pytest.importorskip("pyspark.sql.types")
    schema = Unischema(
        "Rows",
        [
            field("id", np.int32, (), ScalarCodec(types.IntegerType())),
            field("price", Decimal, (), ScalarCodec(types.DecimalType(10, 2)), True),
            field("pair", np.int64, (2,), NdarrayCodec()),
            field("list", np.float32, (None,)),
        ],
    )
    assert schema.as_spark_schema().simpleString() == (
        "struct<id:int,price:decimal(10,2),pair:binary,list:array<float>>"
    )
    pair, numbers = np.array([1, 2]), np.ones(3, np.float32)
    row = dict_to_spark_row(schema, {"id": np.int32(3), "pair": pair, "list": numbers})
    assert (row.id, row.price, row.list) == (3, None, [1.0, 1.0, 1.0]) and type(row.id) is int
    assert np.array_equal(np.load(io.BytesIO(row.pair)), pair)
    again = read_schema(stored(OF_PETASTORM), "here")
    assert again is not None and again.d.codec is not None
    assert again.d.codec.spark_dtype() == types.DecimalType(10, 9)

    wrong: list[tuple[dict[str, Any], str]] = [
        ({"id": 1, "pair": pair}, "column 'list': is missing in the row"),
        ({"id": 1, "pair": pair, "list": numbers, "x": 1}, "column 'x': is not in the schema, which has id"),
        ({"id": None, "pair": pair, "list": numbers}, "column 'id': is None, and is not nullable"),
        ({"id": "1", "pair": pair, "list": numbers}, "column 'id': is int32 in the schema, got '1'"),
        ({"id": 1, "pair": pair[:1], "list": numbers}, r"column 'pair': has shape \(2,\)"),
        ({"id": 1, "pair": pair * 1.0, "list": numbers}, "column 'pair': is int64 in the schema, got float64"),
    ]
    for values, problem in wrong:
        with pytest.raises(DataError, match=problem):
            dict_to_spark_row(schema, values)


@pytest.mark.parametrize("codec", [NdarrayCodec, CompressedNdarrayCodec, CompressedImageCodec])
@pytest.mark.parametrize("shape", [(6, 7), (6, 7, 3)])
def test_codecs_return_what_they_were_given(codec: Callable[[], DataframeColumnCodec], shape: tuple[int, ...]) -> None:
    if codec is CompressedImageCodec:
        pytest.importorskip("PIL")
    given = np.random.default_rng(1).integers(0, 255, shape, np.uint8)
    made = codec()
    some = field("x", np.uint8, tuple(None for _ in shape), made)
    found = made.decode(some, bytes(made.encode(some, given)))
    assert found.dtype == given.dtype and np.array_equal(found, given)
