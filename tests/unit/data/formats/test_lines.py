"""Lines of text and JSON: their types, marks, and faults."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

from farandole.data import CachedSource, Loader, Reading, files
from farandole.errors import DataError, SourceError

IN_ORDER = Reading(shuffle=False)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_integers_and_numbers_with_fractions_become_one_type_on_all_ranks_and_in_a_cache(tmp_path: Path) -> None:
    wanted = [*range(1023), 0.5, *range(2000)]
    path = write_rows(tmp_path / "x.jsonl", [{"x": x} for x in wanted])
    source = files(path)
    cached = CachedSource(source, tmp_path / "cache", 1 << 20)
    for each in (source, cached, cached):
        found: list[float] = []
        for rank in range(2):
            for batch in Loader(each, batch_size=100, policy="join", rank=rank, size=2):
                assert batch["x"].dtype == np.float64  # type: ignore[union-attr]
                found += batch["x"].tolist()  # type: ignore[union-attr]
        assert sorted(found) == sorted(wanted)


def test_a_fraction_after_the_lines_that_decide_the_type_is_refused_with_file_and_line(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl", [{"x": 1}] * 3000)
    with open(path, "a") as more:
        more.write('\n{"x": 0.5}\n')
    loader = Loader(files(path), batch_size=100, policy="join")
    with pytest.raises(
        DataError, match=r"line 3002 of .*/x\.jsonl has 0\.5 of type float, which int64, .*float\("
    ) as e:
        list(loader)
    assert e.value.column == "x"
    exact = files(path, decode=lambda row: {"x": float(row["x"])})
    assert sum(batch["x"].sum() for batch in Loader(exact, batch_size=100, policy="join")) == 3000.5  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("place", "problem"), [(7, "line 1 of .* has no such column"), (1999, "line 2000 of .* has this")]
)
def test_a_column_that_not_all_lines_have_is_refused(tmp_path: Path, place: int, problem: str) -> None:
    source = files(
        write_rows(tmp_path / "x.jsonl", [{"x": n, "y": 1} if n == place else {"x": n} for n in range(2000)])
    )
    with pytest.raises(DataError, match=f"column 'y': .*{problem}"):
        list(Loader(source, batch_size=9, policy="join", reading=IN_ORDER))
    if "y" in source.schema.names:
        assert len(list(Loader(source, columns=["x"], batch_size=2000, policy="drop"))) == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", "each line must be a JSON object of few levels"),
        ("[1, 2]", "it is a list; each line must be a JSON object"),
        ('{"x": ' + "9" * 5000 + "}", "digits"),
    ],
)
def test_a_line_that_is_no_json_object_is_named(tmp_path: Path, line: str, problem: str) -> None:
    (tmp_path / "x.jsonl").write_text('\n\n{"x": 1}\n' + line)
    with pytest.raises(SourceError, match=rf"/x\.jsonl: line 4 cannot be read: .*{problem}"):
        files(str(tmp_path))


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"one\ntw\xff\n")
    with pytest.raises(SourceError, match=r"/x\.txt: line 2 cannot be read: .*text must be UTF-8"):
        list(Loader(files(str(tmp_path)), batch_size=1, policy="join"))


@pytest.mark.parametrize(("name", "line", "column"), [("x.txt", "ä", "text"), ("x.jsonl", '{"t": "ä"}', "t")])
def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path, name: str, line: str, column: str) -> None:
    (tmp_path / name).write_text(f"{line}\r\n{line}", "utf-8-sig", newline="")
    (batch,) = Loader(files(str(tmp_path)), batch_size=2, policy="join")
    assert batch[column].tolist() == ["ä", "ä"]  # type: ignore[union-attr]
