"""Files of Azure stores: few requests, each of which asks for the ETag that was opened."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("adlfs")

from adlfs import AzureBlobFileSystem
from fsspec.asyn import sync

from farandole.data import Growing, GrowingLoader, Loader, ParquetSource, files
from farandole.errors import SourceError
from helpers.azure_store import ACCOUNT, AzureHandler
from helpers.datasets import write_rows
from helpers.object_store import ObjectStore, Request

FILES, ROWS = 30, 5


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    # adlfs closes its connections when the interpreter ends; their loop does not run any more then.
    monkeypatch.setattr("adlfs.spec.weakref", SimpleNamespace(finalize=lambda *_: None))
    write_rows(tmp_path, [[ROWS]] * FILES)
    with ObjectStore.serving(tmp_path, handler=AzureHandler) as served:
        yield served
        for fs in AzureBlobFileSystem._cache.values():
            sync(fs.loop, fs.service_client.close)
        AzureBlobFileSystem.clear_instance_cache()


def options(store: ObjectStore) -> dict[str, object]:
    place = f"http://{store.address}/{ACCOUNT}"
    told = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey=c2VjcmV0c2VjcmV0;BlobEndpoint={place};"
    return {"connection_string": told}


def rows_of(source: ParquetSource) -> list[int]:
    return sorted(row for batch in Loader(source, batch_size=4, policy="join") for row in batch["row"].tolist())


def test_a_request_opens_a_file_and_another_reads_its_row_group(store: ObjectStore) -> None:
    store.page = 7
    source = ParquetSource("abfs://bucket/data", options(store))
    assert store.requests["GET"] == FILES
    assert store.requests["HEAD"] == FILES  # ranges from the end do not exist
    store.page = 1000
    store.reset()
    assert rows_of(source) == list(range(FILES * ROWS))
    assert store.requests["GET"] <= 1.1 * FILES
    assert not store.requests["HEAD"]


@pytest.mark.parametrize("change", ["changed", "vanished"])
def test_an_object_that_does_not_stay_is_told_by_the_read_itself(store: ObjectStore, change: str) -> None:
    source = ParquetSource("abfs://bucket/data", options(store))
    key = "bucket/data/part-007.parquet"
    if change == "changed":  # of the same size
        store.objects[key] = store.objects[key][:-1] + b"?"
    else:
        del store.objects[key]
    text = "has changed while it was being read .its mark" if change == "changed" else "has vanished"
    with pytest.raises(SourceError, match=f"part-007.parquet: {text}"):
        source.read(source.row_groups[7], ["row"])


def test_bodies_that_are_cut_are_asked_for_again(store: ObjectStore) -> None:
    source = ParquetSource("abfs://bucket/data", options(store))
    seen = set()

    def cut(request: Request) -> str | None:
        first = request.method == "GET" and request.key not in seen and request.key.endswith("5.parquet")
        seen.add(request.key)
        return "cut" if first else None

    store.fault = cut
    assert rows_of(source) == list(range(FILES * ROWS))


def test_an_error_for_good_names_the_object(store: ObjectStore) -> None:
    source = ParquetSource("abfs://bucket/data", options(store))
    store.fault = lambda request: 403 if request.key.endswith("3.parquet") else None
    with pytest.raises(SourceError, match=r"bucket/data/part-003.parquet: .*(Fault|forbidden|Forbidden|authoriz)"):
        source.read(source.row_groups[3], ["row"])


def test_samples_and_growing_folders(store: ObjectStore, tmp_path: Path) -> None:
    store.objects["bucket/texts/a.txt"], store.objects["bucket/texts/empty.txt"] = b"one\ntwo\n", b""
    source = files("abfs://bucket/texts", options=options(store))
    assert sorted(text for batch in Loader(source, batch_size=4, policy="join") for text in batch["text"]) == [
        "one",
        "two",
    ]
    store.objects["bucket/data/_DONE"] = b""
    growing = Growing("abfs://bucket/data", until="_DONE", poll=0, options=options(store))
    rows = [row for batch in GrowingLoader(growing, batch_size=4) for row in batch["row"].tolist()]
    assert sorted(rows) == list(range(FILES * ROWS))
