"""The predicates of `petastorm.predicates`."""

from pathlib import Path

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
from farandole.data import make_batch_reader  # noqa: E402

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
    with make_batch_reader(url, ["row"], predicate=predicate, shuffle_row_groups=False) as reader:
        return sorted(int(row) for batch in reader for row in batch.row)


def test_each_chooses_its_rows(url: str) -> None:
    few, named = in_set([3, 5, 200], "row"), in_lambda(["name", "row"], lambda values: values["name"] == "n5")
    assert rows(url, few) == [3, 5]
    assert rows(url, in_intersection([-7, 9], "pair")) == [7, 9]
    assert rows(url, named) == [5]
    assert rows(url, in_lambda(["row"], lambda values, most: values["row"] < most, 2)) == [0, 1]
    assert rows(url, in_reduce([few, named], all)) == [5]
    assert rows(url, in_reduce([few, in_set([8], "row")], any)) == [3, 5, 8]
    assert rows(url, in_negate(in_lambda(["row"], lambda values: values["row"] > 1))) == [0, 1]
    assert in_reduce([few, named], all).get_fields() == {"row", "name"}


def test_the_parts_of_a_split_are_the_whole(url: str) -> None:
    parts = [rows(url, in_pseudorandom_split([0.5, 0.2, 0.3], part, "name")) for part in range(3)]
    assert sorted(row for part in parts for row in part) == list(range(ROWS))
    assert len(parts[0]) > len(parts[1]) > 0
    assert parts[0] == rows(url, in_pseudorandom_split([0.5, 0.5], 0, "name"))


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="fractions"):
        in_pseudorandom_split([0.5, 0.5], 2, "name")
    with pytest.raises(ValueError, match="list of columns"):
        in_lambda("name", bool)
