"""A function of one row on the ranks' rows: what it is given, what it may return, and what is refused."""

import datetime
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pandas")

import pyarrow as pa

from farandole.errors import ConfigError, DataError
from farandole.estimators.trainers.arrow_columns import AnyColumn, VectorColumn
from farandole.estimators.trainers.rows import HASH, Rows, RowsWanted, fed_as, open_rows
from farandole.estimators.trainers.transformation import Transformation

VECTOR = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)


def shard(path: Path, columns: dict[str, Any], *, rows_per_batch: int = 5) -> Path:
    typed = [values if isinstance(values, pa.Array) else pa.array(values) for values in columns.values()]
    arrays = {fed_as(place): values for place, values in enumerate(typed)}
    count = len(next(iter(columns.values())))
    table = pa.table({**arrays, HASH: pa.array(range(count), pa.int64())})
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table, max_chunksize=rows_per_batch)
    return path


def opened(
    path: Path,
    columns: dict[str, Any],
    function: Callable[[dict[str, Any]], Any],
    wanted: tuple[str, ...] = ("x", "y"),
    edit_fields: tuple[Any, ...] = (),
    removed: tuple[str, ...] = (),
    **settings: Any,
) -> Rows:
    asked = RowsWanted(
        columns=wanted, validation=settings.pop("validation", None), validation_col=None, batch_size=4,
        val_batch_size=4, shuffle=True, keep=settings.pop("keep", False),
        transformation=Transformation(
            function=function,
            edit_fields=edit_fields,
            removed_fields=removed,
            fed=tuple(columns),
            weight=settings.pop("weight", None),
        ),
    )  # fmt: skip
    settings = {"rank": 0, "gather": lambda mine: [mine], **settings}
    return open_rows(shard(path / "rows", columns), asked, seed=3, **settings)


def all_of(rows: Rows, epoch: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    batches = list(rows.train.epoch(epoch))
    return {name: np.concatenate([batch.columns[name] for batch in batches]) for name in batches[0].columns}


COLUMNS: dict[str, Any] = {
    "word": [f"w{n}" for n in range(12)],
    "y": [float(n) for n in range(12)],
    "pixels": [[n, n + 1] for n in range(12)],
}


def measured(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.outer(row["pixels"], [1.0, 2.0, 3.0]) + len(row["word"]), "y": row["y"]}


def test_rows_come_once_per_epoch_in_the_order_of_the_seed(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = []

    def noting(row: dict[str, Any]) -> dict[str, Any]:
        given.append(row)
        return measured(row)

    edit = (("x", np.float32, (2, 3), False),)
    rows = opened(tmp_path, COLUMNS, noting, edit_fields=edit, removed=("word", "pixels"), validation=0.3)
    assert rows.kinds == {"x": "float32[2, 3]", "y": "float64"}
    assert given[0] == {"word": "w0", "y": 0.0, "pixels": pytest.approx([0, 1])}
    assert isinstance(given[0]["pixels"], np.ndarray)
    given.clear()
    orders = []
    for epoch in range(2):
        got = all_of(rows, epoch)
        assert got["x"].dtype == np.float32
        for x, y in zip(got["x"], got["y"], strict=True):
            np.testing.assert_array_equal(x, np.outer([y, y + 1], [1, 2, 3]) + len(f"w{int(y)}"))
        orders.append(got["y"].tolist())
    assert rows.validate is not None
    held = [float(y) for batch in rows.validate.epoch(0) for y in batch.columns["y"]]
    assert held and sorted(orders[0] + held) == COLUMNS["y"]
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]
    assert len(given) == 2 * len(orders[0]) + len(held), "once each time"
    assert orders[0] == all_of(opened(tmp_path, COLUMNS, measured, validation=0.3))["y"].tolist()


def test_null_items_of_arrays_reach_the_function(tmp_path: Path) -> None:
    given: list[tuple[Any, Any]] = []

    def filled(row: dict[str, Any]) -> dict[str, Any]:
        given.append((row["x"], row["counts"]))
        return {"x": np.nan_to_num(row["x"]), "y": float(sum(count or 0 for count in row["counts"]))}

    columns = {
        "x": pa.array([[None, 1.0], [2.0, 3.0], None, [4.0, None]], pa.list_(pa.float32())).fill_null([0.0, 0.0]),
        "counts": pa.array([[1, None], [3, 4], [5, 6], [None, 8]], pa.list_(pa.int64())),
        "y": pa.array([0.0] * 4),
    }
    rows = opened(tmp_path, columns, filled, removed=("counts",))
    got = all_of(rows)
    assert rows.kinds["x"] == "float32[2]"
    assert sorted(got["y"]) == [1.0, 7.0, 8.0, 11.0]
    assert {tuple(x) for x in got["x"]} == {(0.0, 1.0), (2.0, 3.0), (0.0, 0.0), (4.0, 0.0)}
    x, counts = next((x, counts) for x, counts in given if counts[0] == 1)
    assert (x.dtype, np.isnan(x).tolist()) == (np.float32, [True, False])
    assert counts.tolist() == [1, None]
    assert all(counts.dtype == np.int64 for _, counts in given if None not in counts)


def test_rows_that_are_kept_are_made_once(tmp_path: Path) -> None:
    calls: list[float] = []

    def noisy(row: dict[str, Any]) -> dict[str, Any]:
        calls.append(row["y"])
        return {"x": row["y"] + np.random.rand(), "y": row["y"]}

    rows = opened(tmp_path, COLUMNS, noisy, keep=True)
    assert sorted(calls[1:]) == COLUMNS["y"], "beside the first row, which is tried"
    once, again = (all_of(rows, epoch) for epoch in (0, 1))
    assert len(calls) == 13
    assert dict(zip(once["y"], once["x"], strict=True)) == dict(zip(again["y"], again["x"], strict=True))


def test_random_numbers_are_those_of_the_seed_and_differ_by_epoch(tmp_path: Path) -> None:
    def noisy(row: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.random.rand(), "y": row["y"]}

    rows, again = (opened(tmp_path, COLUMNS, noisy) for _ in range(2))
    np.random.rand()
    first = all_of(rows, 0)["x"]
    np.testing.assert_array_equal(first, all_of(again, 0)["x"])
    assert not set(first) & set(all_of(rows, 1)["x"])
    assert len(set(first)) == 12


def test_random_numbers_are_those_of_the_seed_in_two_threads(tmp_path: Path) -> None:
    def noisy(row: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.002)
        return {"x": np.random.rand(), "y": row["y"]}

    rows = opened(tmp_path, COLUMNS, noisy)
    want = [all_of(rows, epoch)["x"].tolist() for epoch in range(2)]
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda epoch: all_of(rows, epoch)["x"].tolist(), range(2)))
    assert got == want


def test_values_of_any_type_reach_the_function() -> None:
    day = datetime.date(2026, 1, 2)
    columns = {
        "bytes": pa.array([b"a", None, b"c"]),
        "flag": pa.array([True, False, True]),
        "day": pa.array([day, None, day]),
        "lists": pa.array([[1.0], [], None], pa.list_(pa.float32())),
        "words": pa.array([["a", "b"], None, []]),
        "map": pa.array([[("a", 1)], None, []], pa.map_(pa.string(), pa.int32())),
        "pair": pa.array([{"a": 1, "b": "x"}, None, {"a": 2, "b": "y"}]),
        "vector": pa.array(
            [
                {"type": 0, "size": 3, "indices": [1], "values": [5.0]},
                None,
                {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0, 3.0]},
            ],
            VECTOR,
        ),
    }
    chunked = {name: pa.chunked_array([values.slice(0, 1), values.slice(1)]) for name, values in columns.items()}
    cells = {name: AnyColumn.of(name, values).take(np.array([2, 0, 1])) for name, values in chunked.items()}
    assert cells["bytes"].tolist() == [b"c", b"a", None]
    assert cells["flag"].tolist() == [True, True, False]
    assert cells["day"].tolist() == [np.datetime64(day), np.datetime64(day), None]
    assert [None if each is None else each.tolist() for each in cells["lists"]] == [None, [1.0], []]
    assert cells["words"].tolist() == [[], ["a", "b"], None]
    assert cells["map"].tolist() == [{}, {"a": 1}, None]
    assert cells["pair"].tolist() == [{"a": 2, "b": "y"}, {"a": 1, "b": "x"}, None]
    assert [None if each is None else each.tolist() for each in cells["vector"]] == [[1, 2, 3], [0, 5, 0], None]
    cells["lists"][1] += 1.0  # a row's own memory


def test_compressed_vectors_fill_up_as_they_are_taken() -> None:
    rows: list[Any] = [{"type": 0, "size": 4, "indices": [n % 4], "values": [float(n)]} for n in range(6)]
    rows[2] = {"type": 1, "size": None, "indices": None, "values": [9.0, float("nan"), 7.0, 6.0]}
    column = VectorColumn.of("v", pa.chunked_array([pa.array(rows[:4], VECTOR), pa.array(rows[4:], VECTOR)]))
    facts = column.facts()
    assert (facts.rows, facts.rows_with_nulls, facts.shortest, facts.longest) == (6, 0, 4, 4)
    assert column.rows_with_nan() == 1
    got = column.of_width(4).take(np.array([5, 2, 0]))
    np.testing.assert_array_equal(got, [[0, 5, 0, 0], [9, np.nan, 7, 6], [0, 0, 0, 0]])
    assert column.of_width(4).take(np.empty(0, np.int64)).shape == (0, 4)


@pytest.mark.parametrize(
    ("function", "edit", "error", "text"),
    [
        (lambda row: None, (), ConfigError, "returns NoneType, and has to return a row as a dict"),
        (lambda row: {"x": 1.0}, (), ConfigError, "returns no y, but x"),
        (lambda row: {"x": 1.0, "y": 2.0}, (("z", np.float32, (), False),), ConfigError, "returns no z, but x, y"),
        (lambda row: {"x": row["nowhere"], "y": 1}, (), ConfigError, "first row of rank 0: KeyError: 'nowhere'"),
        (lambda row: {"x": None, "y": 1}, (), ConfigError, "gives None for 1 of 1 rows"),
        (lambda row: {"x": "text", "y": 1}, (), ConfigError, "column 'x': transformation_fn gives str; return numbers"),
        (lambda row: {"x": np.uint64(1), "y": 1}, (), ConfigError, "gives uint64; return numbers .* a type among bool"),
        (
            lambda row: {"x": [1.0, 2.0], "y": 1}, (("x", np.float32, (3,), False),), ConfigError,
            r"gives the shape \(2,\), transformation_edit_fields promises \(3,\)",
        ),
    ],
)  # fmt: skip
def test_a_function_that_fails_on_the_first_row_is_refused(
    tmp_path: Path, function: Any, edit: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as refused:
        opened(tmp_path, COLUMNS, function, edit_fields=edit)
    assert "transformation_fn" in str(refused.value)


def test_a_later_row_unlike_the_first_is_refused(tmp_path: Path) -> None:
    rows = opened(tmp_path, COLUMNS, lambda row: {"x": [1.0] * (1 + int(row["y"] > 5)), "y": row["y"]})
    with pytest.raises(DataError, match="column 'x': transformation_fn gives"):
        all_of(rows)
    rows = opened(tmp_path, COLUMNS, lambda row: {"x": 1 if row["y"] == 0 else 1.5, "y": row["y"]})
    with pytest.raises(DataError, match="gives float64, and int64 for the first row; give its type and shape in"):
        all_of(rows)


@pytest.mark.parametrize("edit", [(), (("w", np.float32, (1,), False),)])
def test_a_weight_is_one_number_per_row(tmp_path: Path, edit: tuple[Any, ...]) -> None:
    def weighed(row: dict[str, Any]) -> dict[str, Any]:
        return {"w": np.array([row["y"] + 0.5]), "x": np.array([row["y"]])}

    settings: dict[str, Any] = {"wanted": ("x", "w"), "removed": ("y",), "weight": "w", "edit_fields": edit}
    for keep in (False, True):
        made = all_of(opened(tmp_path, COLUMNS, weighed, keep=keep, **settings))
        assert made["w"].shape == (12,) and made["x"].shape == (12, 1)
        np.testing.assert_array_equal(made["w"], made["x"][:, 0] + 0.5)
    with pytest.raises(
        ConfigError, match=r"'w': transformation_fn gives int64\[2\]; sample_weight_col holds one number"
    ):
        opened(tmp_path, COLUMNS, lambda row: {"w": [1, 2], "x": 1}, **settings | {"edit_fields": ()})


def test_integers_are_not_cut_to_the_type_of_the_first_row(tmp_path: Path) -> None:
    rows = opened(tmp_path, COLUMNS, lambda row: {"x": np.int8(1) if row["y"] == 0 else 300, "y": row["y"]})
    with pytest.raises(DataError, match="gives int64, and int8 for the first row; give its type and shape in"):
        all_of(rows)
    edit = (("x", np.int8, (), False),)
    rows = opened(tmp_path, COLUMNS, lambda row: {"x": 1 if row["y"] == 0 else 300, "y": row["y"]}, edit_fields=edit)
    with pytest.raises(DataError, match=r"column 'x': transformation_fn gives results that form no array: .*300"):
        all_of(rows)
    rows = opened(tmp_path, COLUMNS, lambda row: {"x": np.int16(1) if row["y"] == 0 else 7, "y": row["y"]})
    assert sorted(all_of(rows)["x"]) == [1] + [7] * 11


def test_a_rank_without_rows_has_the_types_of_the_others(tmp_path: Path) -> None:
    meeting = threading.Barrier(2, timeout=30)
    kinds: dict[int, Any] = {}
    sent: list[Any] = [None, None]

    def gather_of(rank: int) -> Callable[[Any], list[Any]]:
        def gather(mine: Any) -> list[Any]:
            meeting.wait()
            sent[rank] = mine
            meeting.wait()
            return list(sent)

        return gather

    def open_on(rank: int) -> None:
        columns = COLUMNS if rank == 0 else {name: pa.array(values)[:0] for name, values in COLUMNS.items()}
        (tmp_path / str(rank)).mkdir()
        rows = opened(
            tmp_path / str(rank), columns, measured, removed=("word", "pixels"), rank=rank, gather=gather_of(rank)
        )
        batches = list(rows.train.epoch(0))
        kinds[rank] = (
            rows.kinds,
            len(batches),
            {(each.columns["x"].dtype, each.columns["x"].shape[1:]) for each in batches},
        )

    ranks = [threading.Thread(target=open_on, args=(rank,)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert kinds[0] == kinds[1] == ({"x": "float64[2, 3]", "y": "float64"}, 3, {(np.dtype("float64"), (2, 3))})
