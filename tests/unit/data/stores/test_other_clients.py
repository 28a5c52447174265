"""Files of Google Cloud Storage and Azure stores: few requests, each of which asks for the content that was opened."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("fsspec")

from fsspec.asyn import sync

from farandole.data import Growing, GrowingLoader, Loader, ParquetSource, files
from farandole.data.stores.ranges import Span
from farandole.errors import SourceError
from helpers.azure_store import ACCOUNT, AzureHandler
from helpers.datasets import write_rows
from helpers.google_store import GoogleHandler
from helpers.object_store import ObjectStore, Request

FILES, ROWS = 12, 5


@dataclass(frozen=True)
class Store:
    """A store that answers as one of the kinds, and how it is reached."""

    scheme: str
    served: ObjectStore = field(repr=False)
    options: dict[str, object] = field(repr=False)
    looks: int  # HEAD requests of a file that is opened
    mark: str  # what errors call it

    def open(self) -> ParquetSource:
        return ParquetSource(f"{self.scheme}://bucket/data", self.options)


@contextmanager
def google(folder: Path) -> Iterator[Store]:
    gcsfs = pytest.importorskip("gcsfs")
    with ObjectStore.serving(folder, handler=GoogleHandler) as served:
        options: dict[str, object] = {"endpoint_url": f"http://{served.address}", "token": "anon"}
        yield Store("gs", served, options, looks=0, mark="its generation")
    gcsfs.GCSFileSystem.clear_instance_cache()


@contextmanager
def azure(folder: Path) -> Iterator[Store]:
    adlfs = pytest.importorskip("adlfs")
    with ObjectStore.serving(folder, handler=AzureHandler) as served, pytest.MonkeyPatch.context() as patch:
        # adlfs closes its connections when the interpreter ends; their loop does not run any more then.
        patch.setattr("adlfs.spec.weakref", SimpleNamespace(finalize=lambda *_: None))
        place = f"BlobEndpoint=http://{served.address}/{ACCOUNT}"
        account = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey=c2VjcmV0c2VjcmV0;{place};"
        # Ranges from the end do not exist there: a look tells the size.
        yield Store("abfs", served, {"connection_string": account}, looks=1, mark="its mark")
        for fs in adlfs.AzureBlobFileSystem._cache.values():
            sync(fs.loop, fs.service_client.close)
        adlfs.AzureBlobFileSystem.clear_instance_cache()


KINDS = {"google": google, "azure": azure}


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    write_rows(tmp_path, [[ROWS]] * FILES)
    made: AbstractContextManager[Store] = KINDS[request.param](tmp_path)
    with made as ready:
        yield ready


def rows_of(source: ParquetSource) -> list[int]:
    return sorted(row for batch in Loader(source, batch_size=4, policy="join") for row in batch["row"].tolist())


def test_a_request_opens_a_file_and_another_reads_its_row_group(store: Store) -> None:
    store.served.page = 7
    source = store.open()
    assert store.served.requests["GET"] == FILES
    assert store.served.requests["HEAD"] == store.looks * FILES
    store.served.page = 1000
    store.served.reset()
    assert rows_of(source) == list(range(FILES * ROWS))
    assert store.served.requests["GET"] <= 1.1 * FILES
    assert not store.served.requests["HEAD"]


@pytest.mark.parametrize("change", ["changed", "vanished"])
def test_an_object_that_does_not_stay_is_told_by_the_read_itself(store: Store, change: str) -> None:
    source = store.open()
    key = "bucket/data/part-007.parquet"
    if change == "changed":  # of the same size
        store.served.objects[key] = store.served.objects[key][:-1] + b"?"
    else:
        del store.served.objects[key]
    text = f"has changed while it was being read .{store.mark}" if change == "changed" else "has vanished"
    with pytest.raises(SourceError, match=f"part-007.parquet: {text}"):
        source.read(source.row_groups[7], ["row"])


def test_bodies_that_are_cut_are_asked_for_again(store: Store) -> None:
    source = store.open()
    seen = set()

    def cut(request: Request) -> str | None:
        first = request.method == "GET" and request.key not in seen and request.key.endswith("5.parquet")
        seen.add(request.key)
        return "cut" if first else None

    store.served.fault = cut
    assert rows_of(source) == list(range(FILES * ROWS))


@pytest.mark.parametrize("short", ["range", "closed"])
def test_the_rest_of_an_answer_shorter_than_asked_is_asked_for(store: Store, short: str) -> None:
    source = store.open()
    store.served.short = short
    assert rows_of(source) == list(range(FILES * ROWS))


def test_an_error_for_good_names_the_object(store: Store) -> None:
    source = store.open()
    store.served.fault = lambda request: 403 if request.key.endswith("3.parquet") else None
    with pytest.raises(SourceError, match=r"bucket/data/part-003.parquet: .*(Fault|forbidden|Forbidden|authoriz)"):
        source.read(source.row_groups[3], ["row"])


def test_a_file_is_read_whatever_its_mark(store: Store) -> None:
    client = store.open()._source._files.client  # type: ignore[union-attr]
    assert client is not None
    assert client.fetch("bucket/data/part-000.parquet", Span(0, 4), "").data == b"PAR1"


def test_samples_and_growing_folders(store: Store) -> None:
    store.served.objects["bucket/texts/a.txt"], store.served.objects["bucket/texts/empty.txt"] = b"one\ntwo\n", b""
    source = files(f"{store.scheme}://bucket/texts", options=store.options)
    texts = [text for batch in Loader(source, batch_size=4, policy="join") for text in batch["text"]]
    assert sorted(texts) == ["one", "two"]
    store.served.objects["bucket/data/_DONE"] = b""
    growing = Growing(f"{store.scheme}://bucket/data", until="_DONE", poll=0, options=store.options)
    rows = [row for batch in GrowingLoader(growing, batch_size=4) for row in batch["row"].tolist()]
    assert sorted(rows) == list(range(FILES * ROWS))
