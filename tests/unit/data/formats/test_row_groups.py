"""Many row groups: the same ones as objects, and little memory for each."""

import hashlib
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa

from farandole.data import Loader
from farandole.data.formats.file_systems import Files
from farandole.data.formats.row_groups import File, RowGroup, RowGroups, fingerprint, rows_in
from farandole.data.tables.data_files import PIECE_BYTES, DataFile, TableColumn, TableSource


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5))
def test_row_groups_are_those_of_a_tuple(layout: list[list[int]]) -> None:
    files = [File(f"part-{place}", 100, f"mark {place % 2}") for place in range(len(layout))]
    counts, rows = [len(each) for each in layout], [rows for each in layout for rows in each]
    groups = RowGroups(files, counts, rows)
    wanted = tuple(
        RowGroup(file, number, rows)
        for file, each in zip(files, layout, strict=True)
        for number, rows in enumerate(each)
    )
    assert tuple(groups) == wanted == tuple(groups[place] for place in range(len(groups)))
    assert groups == wanted
    assert groups != (*wanted, RowGroup(File("x", 1, ""), 0, 1))
    assert (groups[1:], groups[::-1]) == (wanted[1:], wanted[::-1])
    assert rows_in(groups).tolist() == rows_in(wanted).tolist() == rows
    with pytest.raises(IndexError):
        groups[len(rows)]
    # States of earlier versions have the digest of this JSON.
    for of_table in (False, True):
        told = [[group.rows, group.file.mark] if of_table else group.rows for group in wanted]
        digest = int.from_bytes(hashlib.sha256(json.dumps(told).encode()).digest()[:7])
        assert fingerprint(groups, of_table=of_table) == fingerprint(wanted, of_table=of_table) == digest


def test_a_row_group_of_a_table_takes_few_bytes() -> None:
    count, pieces = 500, 100
    data = [DataFile(File(f"part-{place}", PIECE_BYTES * pieces, "1"), 1000 * pieces, {}) for place in range(count)]
    Files()  # what it imports is no row group's
    tracemalloc.start()
    source = TableSource(Files(), data, [TableColumn(field=pa.field("x", pa.float32()), names=("x",))], "is gone")
    loader = Loader(source, batch_size=256, policy="drop", size=64)
    order = loader._order.epoch(0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(order.order.row_groups) == count * pieces
    assert held / (count * pieces) < 100
