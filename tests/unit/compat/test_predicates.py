"""The predicates of `petastorm.predicates`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")

import pyarrow.parquet as pq  # noqa: E402

from farandole.compat.predicates import (  # noqa: E402
    PredicateBase,
    in_intersection,
    in_lambda,
    in_negate,
    in_pseudorandom_split,
    in_reduce,
    in_set,
)
from farandole.data import make_batch_reader, make_reader  # noqa: E402
from farandole.errors import ConfigError  # noqa: E402

ROWS = 100


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("rows") / "rows.parquet"
    table = pa.table(
        {"row": range(ROWS), "name": [f"n{row}" for row in range(ROWS)], "pair": [[r, -r] for r in range(ROWS)]}
    )
    pq.write_table(table, file)
    return Path(file).as_uri()


def rows(url: str, predicate: PredicateBase) -> list[int]:
    """Return the rows that both readers choose."""
    with make_batch_reader(url, ["row"], predicate=predicate) as reader:
        batched = sorted(int(row) for batch in reader for row in batch.row)
    with make_reader(url, ["row"], predicate=predicate) as reader:
        assert sorted(int(each.row) for each in reader) == batched
    return batched


def test_each_chooses_its_rows(url: str) -> None:
    few, named = in_set([3, 5, 200], "row"), in_lambda(["name", "row"], lambda name, row: name == "n5" and row < 50)
    assert rows(url, few) == [3, 5]
    assert rows(url, in_intersection([-7, 9], "pair")) == [7, 9]
    assert rows(url, in_intersection(["n7", "n"], "name")) == [7]
    with pytest.raises(ValueError, match="'row' must hold lists"):
        rows(url, in_intersection([7], "row"))
    assert rows(url, named) == [5]
    assert rows(url, in_lambda(["row"], lambda row, most: row < most, 2)) == [0, 1]
    assert rows(url, in_reduce([few, named], all)) == [5]
    assert rows(url, in_reduce([few, in_set([8], "row")], any)) == [3, 5, 8]
    assert rows(url, in_negate(in_lambda(["row"], lambda row: row > 1))) == [0, 1]
    assert in_reduce([few, named], all).get_fields() == {"row", "name"}


def test_the_parts_of_a_split_are_the_whole(url: str) -> None:
    parts = [rows(url, in_pseudorandom_split([0.5, 0.2, 0.3], part, "name")) for part in range(3)]
    assert sorted(row for part in parts for row in part) == list(range(ROWS))
    assert len(parts[0]) > len(parts[1]) > 0
    assert parts[0] == rows(url, in_pseudorandom_split([0.5, 0.5], 0, "name"))


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="fractions"):
        in_pseudorandom_split([0.5, 0.5], 2, "name")
    for unordered in ("name", {"name", "row"}):
        with pytest.raises(ValueError, match="list of columns"):
            in_lambda(unordered, bool)  # type: ignore[arg-type]
    for make in (in_negate, lambda each: in_reduce([each], all)):
        with pytest.raises(ValueError, match="no predicate"):
            make(bool)


def test_a_function_gets_its_values_in_the_order_of_the_fields(url: str) -> None:
    assert rows(url, in_lambda(["row", "name"], lambda row, name: f"n{row}" == name and row > 97)) == [98, 99]
    assert rows(url, in_lambda(["name", "row"], lambda name, row, most: name != "n0" and row < most, 3)) == [1, 2]


class OnFrames(PredicateBase):
    """A predicate of whole row groups, as programs give it to Petastorm's `make_batch_reader`."""

    def get_fields(self) -> set[str]:
        return {"row", "name"}

    def do_include(self, values: Any) -> Any:
        return values["name"].str.len().eq(2) & (values["row"] > 5)


def test_predicates_of_a_frame_choose_the_rows_of_a_batch_reader(url: str) -> None:
    pytest.importorskip("pandas")
    called = []

    def long(name: Any, row: Any) -> Any:
        called.append(len(name))
        return (name.str.len() == 2) & (row > 5)

    for predicate in (OnFrames(), in_lambda(["name", "row"], long)):
        with make_batch_reader(url, ["row"], predicate=predicate) as reader:
            assert sorted(int(row) for batch in reader for row in batch.row) == [6, 7, 8, 9]
    assert called == [ROWS]


def test_an_array_for_a_frame_is_no_mask(tmp_path: Path) -> None:
    # In a frame, pair[0] is the pair of the first row, which has as many items as there are rows.
    pq.write_table(pa.table({"row": [0, 1], "pair": [[9, 1], [7, 8]]}), tmp_path / "rows.parquet")
    assert rows(tmp_path.as_uri(), in_lambda(["pair"], lambda pair: pair[0] > 3)) == [0, 1]


def test_the_error_for_a_frame_is_shown_with_that_for_a_row(url: str) -> None:
    pytest.importorskip("pandas")
    with pytest.raises(AttributeError, match="'str' object has no attribute 'strr'") as raised:
        make_batch_reader(url, predicate=in_lambda(["name"], lambda name: name.strr.len() > 1))
    assert "Series" in str(raised.value.__cause__)
    nothing = SimpleNamespace(get_fields=set, do_include=bool)
    with pytest.raises(ConfigError, match="names no column"):
        make_batch_reader(url, predicate=nothing)
