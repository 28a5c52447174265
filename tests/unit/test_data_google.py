"""Files of Google Cloud Storage: few requests, each of which asks for the generation that was opened."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("gcsfs")

from gcsfs.core import GCSFileSystem

from farandole.data import Growing, GrowingLoader, Loader, ParquetSource, files
from farandole.errors import SourceError
from helpers.datasets import write_rows
from helpers.google_store import GoogleHandler
from helpers.object_store import ObjectStore, Request

FILES, ROWS = 30, 5


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    write_rows(tmp_path, [[ROWS]] * FILES)
    with ObjectStore.serving(tmp_path, handler=GoogleHandler) as served:
        yield served
    GCSFileSystem.clear_instance_cache()


def options(store: ObjectStore) -> dict[str, object]:
    return {"endpoint_url": f"http://{store.address}", "token": "anon"}


def rows_of(source: ParquetSource) -> list[int]:
    return sorted(row for batch in Loader(source, batch_size=4, policy="join") for row in batch["row"].tolist())


def test_a_request_opens_a_file_and_another_reads_its_row_group(store: ObjectStore) -> None:
    store.page = 7
    source = ParquetSource("gs://bucket/data", options(store))
    assert store.requests["GET"] == FILES
    assert not store.requests["HEAD"]
    store.page = 1000
    store.reset()
    assert rows_of(source) == list(range(FILES * ROWS))
    assert store.requests["GET"] <= 1.1 * FILES
    assert not store.requests["HEAD"]


@pytest.mark.parametrize("change", ["changed", "vanished"])
def test_an_object_that_does_not_stay_is_told_by_the_read_itself(store: ObjectStore, change: str) -> None:
    source = ParquetSource("gs://bucket/data", options(store))
    key = "bucket/data/part-007.parquet"
    if change == "changed":  # of the same size
        store.objects[key] = store.objects[key][:-1] + b"?"
    else:
        del store.objects[key]
    text = "has changed while it was being read .its generation" if change == "changed" else "has vanished"
    with pytest.raises(SourceError, match=f"part-007.parquet: {text}"):
        source.read(source.row_groups[7], ["row"])


def test_bodies_that_are_cut_are_asked_for_again(store: ObjectStore) -> None:
    source = ParquetSource("gs://bucket/data", options(store))
    seen = set()

    def cut(request: Request) -> str | None:
        first = request.method == "GET" and request.key not in seen and request.key.endswith("5.parquet")
        seen.add(request.key)
        return "cut" if first else None

    store.fault = cut
    assert rows_of(source) == list(range(FILES * ROWS))


def test_an_error_for_good_names_the_object(store: ObjectStore) -> None:
    source = ParquetSource("gs://bucket/data", options(store))
    store.fault = lambda request: 403 if request.key.endswith("3.parquet") else None
    with pytest.raises(SourceError, match=r"bucket/data/part-003.parquet: .*Forbidden"):
        source.read(source.row_groups[3], ["row"])


def test_samples_and_growing_folders(store: ObjectStore, tmp_path: Path) -> None:
    store.objects["bucket/texts/a.txt"], store.objects["bucket/texts/empty.txt"] = b"one\ntwo\n", b""
    source = files("gs://bucket/texts", options=options(store))
    assert sorted(text for batch in Loader(source, batch_size=4, policy="join") for text in batch["text"]) == [
        "one",
        "two",
    ]
    store.objects["bucket/data/_DONE"] = b""
    growing = Growing("gs://bucket/data", until="_DONE", poll=0, options=options(store))
    rows = [row for batch in GrowingLoader(growing, batch_size=4) for row in batch["row"].tolist()]
    assert sorted(rows) == list(range(FILES * ROWS))
