"""Files of this machine: links, names with signs of globs, URLs with escapes, and columns from names of folders."""

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from farandole.data import ArrowSource, Growing, Loader, ParquetSource, files, make_batch_reader
from farandole.data.formats.places import local_path
from farandole.data.formats.row_groups import File
from farandole.data.stores.far_files import list_places
from farandole.errors import ConfigError, DataError, SourceError


def write(path: Path, *rows: int) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"row": rows}), path)
    return str(path)


def rows_at(url: str | list[str]) -> list[int]:
    source = ParquetSource(url)
    return sorted(row for group in source.row_groups for row in source.read(group, ["row"])["row"].to_pylist())


def test_files_that_a_store_does_not_list_in_order_are_found() -> None:
    """S3's directory buckets, and Azure's accounts with a hierarchical namespace, list files in other orders."""

    class Client:
        def listing(self, prefix: str, most_pages: int | None) -> list[File]:
            return [File(f"bucket/{name}", 1, "") for name in ("a/2", "b/1", "a-0", "a/1", "c")]

    found = list_places(Client(), ["bucket/a", "bucket/c"])  # type: ignore[arg-type]
    assert found is not None
    (inner, is_folder), (single, is_other_folder) = found
    assert [each.path for each in inner] == ["bucket/a/1", "bucket/a/2"] and is_folder
    assert [each.path for each in single] == ["bucket/c"] and not is_other_folder


def test_folders_behind_links_are_read(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.parquet", 1)
    write(tmp_path / "other" / "deep" / "b.parquet", 2)
    (tmp_path / "data" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "all").symlink_to(tmp_path / "data")
    for url in (tmp_path / "data", tmp_path / "all", tmp_path / "al*"):
        assert rows_at(str(url)) == [1, 2]


def test_links_in_a_circle_and_into_a_table_are_named(tmp_path: Path) -> None:
    write(tmp_path / "data" / "deep" / "a.parquet", 1)
    link = tmp_path / "data" / "deep" / "link"
    for target in (tmp_path / "data", tmp_path, tmp_path / "data" / "deep"):
        link.symlink_to(target)
        with pytest.raises(SourceError, match=r"deep/link: is a link to a folder that it lies in"):
            ParquetSource(str(tmp_path / "data"))
        link.unlink()
    write(tmp_path / "table" / "day=1" / "b.parquet", 2)
    (tmp_path / "table" / "_delta_log").mkdir()
    link.symlink_to(tmp_path / "table" / "day=1")
    with pytest.raises(SourceError, match="table: is a Delta table"):
        ParquetSource(str(tmp_path / "data"))


@pytest.mark.parametrize("glob", ["**/*.parquet", "**", "*/*/*.parquet"])
def test_globs_leave_out_folders_of_other_tools(tmp_path: Path, glob: str) -> None:
    write(tmp_path / "_above" / "day=1" / "deep" / "a.parquet", 1)
    write(tmp_path / "_above" / "_temporary" / "0" / "a.parquet", 1)
    write(tmp_path / "_above" / "day=1" / ".trash" / "a.parquet", 1)
    assert rows_at(f"{tmp_path}/_above/{glob}") == [1]
    assert rows_at(f"{tmp_path}/_above/*/.trash/*.parquet") == [1]


def test_files_with_other_endings_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, name in enumerate(["a.parquet", "B.PARQUET", "_c", "000000_0", "d.pq"]):
        write(tmp_path / name, number)
    assert rows_at(str(tmp_path)) == [0, 1]
    assert f"2 files that do not end in .parquet are left out, such as {tmp_path}/000000_0" in caplog.messages


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_paths_of_one_file_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, link: Any) -> None:
    real = write(tmp_path / "a.parquet", 1)
    link(real, tmp_path / "b.parquet")
    assert rows_at(str(tmp_path)) == [1, 1]
    assert f"{real} and {tmp_path}/b.parquet are one file, whose rows come twice" in caplog.text


def test_a_file_that_a_link_names_may_not_change(tmp_path: Path) -> None:
    real = write(tmp_path / "real.parquet", 1)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.parquet").symlink_to(real)
    source = ParquetSource(str(tmp_path / "data"))
    os.utime(real, (1, 1))
    with pytest.raises(SourceError, match=r"a\.parquet: has changed"):
        source.check()


@pytest.mark.parametrize("name", ["a[1].parquet", "x::y.parquet", "what?.parquet", "folder[2]/a.parquet", "a*.parquet"])
def test_a_path_that_is_there_is_no_glob_and_no_chain(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, 1)
    write(tmp_path / "a1.parquet", 2)
    assert rows_at(path) == [1]
    assert rows_at(f"file://{path}") == [1]
    assert rows_at(os.path.dirname(path)) == ([1] if "/" in name else [1, 2])


def test_escapes_in_a_url_stand_for_signs_unless_the_name_has_them(tmp_path: Path) -> None:
    write(tmp_path / "a b" / "x.parquet", 1)
    url = (tmp_path / "a b").as_uri()
    assert url.endswith("/a%20b")
    for each in (url, f"{url}/*.parquet", f"{url}/x.parquet"):
        assert rows_at(each) == [1]
    write(tmp_path / "a%20b" / "x.parquet", 2)
    for each in (url, f"{url}/*.parquet", str(tmp_path / "a%20b")):
        assert rows_at(each) == [2]


def test_urls_of_other_file_systems_are_not_paths() -> None:
    for url in (
        "s3://bucket/key",
        "memory://x",
        "simplecache::memory://x",
        "zip://a::file:///b.zip",
        "simplecache::/x",
    ):
        assert local_path(url) is None
    assert local_path("x::y") == os.path.abspath("x::y")


@pytest.mark.parametrize("place", [None, 3, [3], b"x", {"a": "b"}, [None]], ids=repr)
def test_what_is_no_place_is_refused(place: object) -> None:
    for opening in (ParquetSource, ArrowSource, files, Growing, make_batch_reader):
        with pytest.raises(ConfigError, match="url: must be a URL or a path, not "):
            opening(place)  # type: ignore[operator]


def test_folders_above_the_given_one_are_no_columns(tmp_path: Path) -> None:
    top = tmp_path / "user=joe" / "data"
    first, second = (write(top / f"day={day}" / "x.parquet", day) for day in (1, 2))
    named = {str(top): ["row", "day"], f"{top}/day=1": ["row"], first: ["row"], f"{top}/day=*": ["row", "day"]}
    for url, columns in named.items():
        assert ParquetSource(url).schema.names == columns
    # What tells several apart is a column.
    assert ParquetSource([first, second]).schema.names == ["row", "day"]
    assert ParquetSource([f"{top}/day=1", f"{top}/day=2/*"]).schema.names == ["row", "day"]
    assert ParquetSource([first]).schema.names == ["row"]


def test_a_column_in_the_names_of_some_folders_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "day=1" / "x.parquet", 1)
    write(tmp_path / "y.parquet", 2)
    with pytest.raises(DataError, match=r"column 'day': is in .*day=1/x\.parquet, but of none of .*y\.parquet"):
        Loader(ParquetSource(str(tmp_path)), batch_size=1, policy="join")
    loader = Loader(ParquetSource(str(tmp_path)), batch_size=2, policy="join", columns=["row"])
    assert [sorted(batch["row"].tolist()) for batch in loader] == [[1, 2]]  # type: ignore[union-attr]
