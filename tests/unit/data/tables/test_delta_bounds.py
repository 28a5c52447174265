"""Bounds of columns in Delta's logs, by which conditions pass over files."""

import json
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("deltalake")
pytest.importorskip("fsspec")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import DeltaSource, SelectedSource
from helpers.delta_logs import write_log
from helpers.tables import rows_of, start_deltalake


@pytest.fixture(scope="module", autouse=True)
def deltalake_threads() -> None:
    """Start deltalake before the first test counts threads and descriptors."""
    start_deltalake()


def test_bounds_of_widened_floats_leave_no_row_out(tmp_path: Path) -> None:
    """The log has the shortest digits of a float, 0.1, and the file 0.100000001."""
    pq.write_table(pa.table({"x": pa.array([0.1], pa.float32())}), tmp_path / "part.parquet")
    stats = {"numRecords": 1, "minValues": {"x": 0.1}, "maxValues": {"x": 0.1}, "nullCount": {"x": 0}}
    changes = [{"fromType": "float", "toType": "double"}]
    schema = [{"name": "x", "type": "double", "metadata": {"delta.typeChanges": changes}}]
    adds = [{"path": "part.parquet", "stats": json.dumps(stats)}]
    write_log(tmp_path, schema, adds, features=["typeWidening"])
    chosen = SelectedSource(DeltaSource(str(tmp_path)), [("x", ">", 0.1)])
    assert rows_of(chosen, ["x"]) == Counter([(repr(float(np.float32(0.1))),)])


@pytest.mark.parametrize("kind", ["float", "double"])
def test_nan_is_no_bound(tmp_path: Path, kind: str) -> None:
    """Spark takes NaN for the greatest number, and writes it as a text."""
    stored = pa.array([1, 10, float("nan")], pa.float32() if kind == "float" else pa.float64())
    pq.write_table(pa.table({"x": stored}), tmp_path / "part.parquet")
    stats = {"numRecords": 3, "minValues": {"x": 1.0}, "maxValues": {"x": "NaN"}, "nullCount": {"x": 0}}
    write_log(tmp_path, [{"name": "x", "type": kind}], [{"path": "part.parquet", "stats": json.dumps(stats)}])
    chosen = SelectedSource(DeltaSource(str(tmp_path)), [("x", ">", 5)])
    assert rows_of(chosen, ["x"]) == Counter([("10.0",)])
