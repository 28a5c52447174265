"""Types that differ between the files of one source: widths and forms; and times of several kinds."""

import zlib
from base64 import b64decode
from datetime import datetime
from pathlib import Path

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import Loader, ParquetSource, SelectedSource, Source
from farandole.errors import DataError


def write(folder: Path, *kinds: pa.DataType) -> str:
    for number, kind in enumerate(kinds):
        pq.write_table(pa.table({"value": pa.array([number], kind)}), folder / f"{number}.parquet")
    return str(folder)


@pytest.mark.parametrize(
    ("kinds", "kind"),
    [
        ((pa.int32(), pa.int64(), pa.int8()), pa.int64()),
        ((pa.uint8(), pa.int8()), pa.int16()),
        ((pa.uint16(), pa.uint32()), pa.uint32()),
    ],
)
def test_the_widest_holds_all(tmp_path: Path, kinds: tuple[pa.DataType, ...], kind: pa.DataType) -> None:
    source = ParquetSource(write(tmp_path, *kinds))
    assert source.schema.field("value").type == kind
    assert {source.read(group, ["value"]).schema.field("value").type for group in source.row_groups} == {kind}
    assert rows_of(source) == list(range(len(kinds)))
    assert rows_of(SelectedSource(source, [("value", ">", 0)])) == list(range(1, len(kinds)))


def rows_of(source: Source) -> list[int]:
    batches = [batch["value"] for batch in Loader(source, batch_size=8, policy="join")]
    return sorted(row for values in batches for row in values.tolist())  # type: ignore[union-attr]


@pytest.mark.parametrize("other", [pa.uint64(), pa.float32(), pa.string()])
def test_types_without_a_common_one_are_refused(tmp_path: Path, other: pa.DataType) -> None:
    pq.write_table(pa.table({"value": pa.array([1], pa.int32())}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"value": pa.array([1]).cast(other)}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"'value': is int32 in .*a\.parquet, but"):
        Loader(ParquetSource(str(tmp_path)), batch_size=1, policy="join")


@pytest.mark.parametrize("year", [1, 1500, 2300, 9999])
def test_old_times_that_nanoseconds_do_not_reach_are_refused(tmp_path: Path, year: int) -> None:
    if year == 2300 and int(pa.__version__.partition(".")[0]) < 23:
        pytest.skip("this pyarrow writes times before 1970 like those of 2262 to 2554")
    times = pa.array(
        [datetime(2020, 1, 2, 3, 4, 5, 678901), None, datetime(1900, 1, 1, 0, 0, 0, 1)], pa.timestamp("us")
    )
    pq.write_table(pa.table({"at": times}), tmp_path / "1.parquet", use_deprecated_int96_timestamps=True)
    source = ParquetSource(str(tmp_path))
    assert source.read(source.row_groups[0], ["at"])["at"].cast(pa.timestamp("us")).to_pylist() == times.to_pylist()
    far = pa.array([datetime(2020, 1, 1), datetime(year, 12, 31)], pa.timestamp("us"))
    pq.write_table(pa.table({"at": far}), tmp_path / "2.parquet", use_deprecated_int96_timestamps=True)
    source = ParquetSource(str(tmp_path))
    with pytest.raises(DataError, match=r"column 'at': .*2.parquet holds times before 1677 or after 2262 as INT96"):
        source.read(source.row_groups[1], ["at"])


@pytest.mark.parametrize("shape", [(-1,), (1,), (-1, 1)])
def test_old_times_within_arrays_that_nanoseconds_do_not_reach_are_refused(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    kind, near, far = pa.timestamp("us"), datetime(1900, 1, 1, 0, 0, 0, 1), datetime(9999, 12, 31)
    rows: list[object] = [near, far]
    for length in shape:
        kind, rows = pa.list_(kind, length), [[each] for each in rows]
    last = None if shape == (-1,) else rows[0]  # Arrow 16 reads no nulls among lists of one length
    table = pa.table({"at": pa.array([*rows, last], kind)})
    pq.write_table(table, tmp_path / "1.parquet", row_group_size=1, use_deprecated_int96_timestamps=True)
    source = ParquetSource(str(tmp_path))
    read = [source.read(group, ["at"])["at"].cast(kind) for group in (source.row_groups[0], source.row_groups[2])]
    assert [each.to_pylist() for each in read] == [rows[:1], [last]]
    with pytest.raises(DataError, match=r"column 'at': .*1.parquet holds times before 1677 or after 2262 as INT96"):
        source.read(source.row_groups[1], ["at"])


# What Arrow 22 wrote of three times, and its own name.
OLD_ARROW = (
    "eNoLcAwyFGUQDREN0RHlADLYRNlkGBgYmICYmZcj/chRbi4GhsctqgwvmDfmZW/8/3/dTRUGGLi0R5lBlEVSx5RBgq04OSM1N1GUCWiEKpMEU2IJgxiH"
    "pIykjBqDjCibpCobgyRIUBQoKlYlVqXG4SkDtI0BqN5Gk01SjYkNaBxQgkMNKM2goVCQWFRYmlqim1xQoJtYVJRfrlCWWlScmZ+nYGSkZ6BnICkDcmUN"
    "EAcAPQAAu40nEA=="
)


def test_old_times_that_old_arrow_wrote_are_read(tmp_path: Path) -> None:
    (tmp_path / "1.parquet").write_bytes(zlib.decompress(b64decode(OLD_ARROW)))
    source = ParquetSource(str(tmp_path))
    times = source.read(source.row_groups[0], ["at"])["at"].cast(pa.timestamp("us")).to_pylist()
    assert times == [
        datetime(2020, 1, 2, 3, 4, 5, 678901),
        None,
        datetime(1900, 1, 1, 0, 0, 0, 1),
        datetime(1700, 5, 6),
    ]


TENSOR = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(4.0).reshape(1, 2, 2))
NAMED = pa.ExtensionArray.from_storage(
    pa.fixed_shape_tensor(pa.float64(), (2, 2), dim_names=["height", "width"]), TENSOR.storage
)
ALIKE: dict[str, list[pa.Array]] = {
    "large text": [pa.array(["a"]), pa.array(["a"], pa.large_string())],
    "text and views": [pa.array(["a"], pa.string_view()), pa.array(["a"])],
    "views alone": [pa.array(["a"], pa.string_view())],
    "bytes": [pa.array([b"a"]), pa.array([b"a"], pa.large_binary())],
    "views of bytes": [pa.array([b"a"]), pa.array([b"a"], pa.binary_view())],
    "categories": [pa.array(["a"]).cast(pa.dictionary(pa.int8(), pa.string())), pa.array(["a"]).dictionary_encode()],
    "categories and text": [pa.array(["a"]).dictionary_encode(), pa.array(["a"]), pa.nulls(0)],
    "lists": [pa.array([[1]], pa.list_(pa.int32())), pa.array([[1]], pa.large_list(pa.int64()))],
    "lists without nulls": [
        pa.array([[1]]),
        pa.array([[1]], pa.list_(pa.field("element", pa.int64(), nullable=False))),
    ],
    "fixed lists": [pa.array([[1]], pa.list_(pa.int8(), 1)), pa.array([[1]], pa.list_(pa.int16(), 1))],
    "tensors": [TENSOR, NAMED, TENSOR],
}


@pytest.mark.parametrize("case", ALIKE)
@pytest.mark.parametrize("backward", [False, True])
def test_types_that_differ_in_their_form_only_are_one(tmp_path: Path, case: str, backward: bool) -> None:
    if "views" in case and int(pa.__version__.partition(".")[0]) < 22:
        pytest.skip("this pyarrow does not write views")
    for number, array in enumerate(reversed(ALIKE[case]) if backward else ALIKE[case]):
        pq.write_table(pa.table({"value": array}), tmp_path / f"{number}.parquet")
    source = ParquetSource(str(tmp_path))
    kind = source.schema.field("value").type
    tables = [source.read(group, ["value"]) for group in source.row_groups if group.rows]
    assert [table.schema.field("value").type for table in tables] == [kind] * len(tables)
    rows = [row for batch in Loader(source, batch_size=8, policy="join") for row in batch["value"].tolist()]  # type: ignore[union-attr]
    assert len(rows) == sum(map(len, ALIKE[case]))
    assert all(row == rows[0] for row in rows)


def test_tensors_of_different_shapes_are_refused(tmp_path: Path) -> None:
    for number, shape in enumerate([(1, 2, 2), (1, 4, 1)]):
        array = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(4.0).reshape(shape))
        pq.write_table(pa.table({"value": array}), tmp_path / f"{number}.parquet")
    with pytest.raises(DataError, match=r"'value': is .*shape=\[2,2\].* but .*shape=\[4,1\]"):
        Loader(ParquetSource(str(tmp_path)), batch_size=1, policy="join")
