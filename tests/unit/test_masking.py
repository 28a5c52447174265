"""Secrets in URLs and options: no message, log, repr or traceback has them."""

import logging
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import fsspec

from farandole.data import ArrowSource, ParquetSource, make_batch_reader
from farandole.data.formats.file_systems import Files
from farandole.data.formats.row_groups import File, RowGroup
from farandole.data.loading.agreement import together
from farandole.data.reader_options import ReaderOptions
from farandole.errors import ConfigError, DataError, FarandoleError, RankFailed, SourceError
from farandole.masking import hide_cause, mask, secret_values

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
PLAIN = "sk-0123456789abcdef"

LEAKING = {
    "user": f"s3://AKIAEXAMPLE:{PLAIN}@bucket/train",
    "key with a slash": f"s3://AKIAEXAMPLE:{SECRET}@bucket/train/part-*.parquet",
    "colons": f"s3://AKIAEXAMPLE::{PLAIN}@bucket/train",
    "without scheme": f"AKIAEXAMPLE:{SECRET}@bucket/train",
    "quoted": f"s3://AKIAEXAMPLE:{SECRET.replace('/', '%2F')}@bucket",
    "chained": f"simplecache::s3://AKIAEXAMPLE:{PLAIN}@bucket/x",
    "sas": f"https://account.blob.core.windows.net/c/x.parquet?sv=2022&sig={SECRET}&se=2030",
    "amazon": f"https://bucket.s3.amazonaws.com/x?X-Amz-Expires=9&X-Amz-Signature={PLAIN}&X-Amz-Credential={PLAIN}",
    "google": f"https://storage.googleapis.com/b/x?X-Goog-Signature={PLAIN}",
    "token": f"https://host/x.parquet?token={PLAIN}",
    "access token": f"hf://datasets/x?access_token={PLAIN}#frag",
    "account key": f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={SECRET}==;EndpointSuffix=x",
    "options": f"{{'key': '{PLAIN}', 'secret': '{SECRET}', 'client_kwargs': {{'aws_session_token': \"{PLAIN}\"}}}}",
    "call": f"S3FileSystem(access_key='{PLAIN}', secret_key='{SECRET}', region='x')",
}

KEPT = [
    "abfs://container@account.dfs.core.windows.net/train",
    "hdfs://namenode:8020/train/day=1",
    "s3://bucket/train?region=us-east-1&endpoint_override=127.0.0.1:9000&scheme=http",
    "/data/monkey=1/part-0.parquet: has vanished since it was listed",
    "column 'key': is int64 in /data/a.parquet, but double in /data/b.parquet",
    "rank 3: 10 rows; use one shape",
    "2 bytes, 2024-05-01 10:00:00+00:00, are now 3 bytes",
]


def leaks(text: str) -> list[str]:
    """Return which secrets a text has, whole or in part."""
    return [each for each in (PLAIN, SECRET, "K7MDENG", "bPxRfi", "wJalrX", "AKIAEXAMPLE") if each in text]


@pytest.mark.parametrize("case", LEAKING)
def test_secrets_are_masked_and_stay_so(case: str) -> None:
    for text in (LEAKING[case], f"'{LEAKING[case]}': cannot be opened", f"['{LEAKING[case]}', '{LEAKING[case]}']"):
        assert "***" in mask(text)
        assert not leaks(mask(text))
        assert mask(mask(text)) == mask(text)


@pytest.mark.parametrize("text", KEPT)
def test_what_is_no_secret_stays(text: str) -> None:
    assert mask(text) == text


def test_the_rest_of_a_url_stays() -> None:
    assert mask(f"s3://KEY:{PLAIN}@bucket/v@2/x") == "s3://***:***@bucket/v@2/x"
    assert mask(f"https://host/x?sv=1&sig={SECRET}&se=2") == "https://host/x?sv=1&sig=***&se=2"


word = st.text("abcXYZ019+/=_-.~%", min_size=8, max_size=40).map(lambda tail: f"S{tail}T")


@given(word, word, st.sampled_from(["s3", "gs", "https", "hdfs", "ftp"]))
def test_any_credentials_are_masked(user: str, password: str, scheme: str) -> None:
    masked = mask(f"{scheme}://{user.replace('/', '')}:{password}@bucket/path")
    assert masked == f"{scheme}://***:***@bucket/path"


@given(st.text(max_size=300))
def test_masking_takes_any_text_and_ends(text: str) -> None:
    assert mask(mask(text)) == mask(text)


def test_options_secret_by_name() -> None:
    options = {"key": "a-key-1", "anon": False, "endpoint_url": "http://x", "client_kwargs": {"aws_secret": "b-secret"}}
    assert secret_values(options) == ["a-key-1", "b-secret"]
    assert mask("failed with b-secret", *secret_values(options)) == "failed with ***"


class SignedFileSystem(fsspec.AbstractFileSystem):
    """A file system that keeps whole URLs as paths, as that of HTTP does, and tells them in its errors."""

    protocol = "signed"
    failing: type[Exception] = RuntimeError

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if "there" in path:
            return {"name": path, "size": 4, "type": "file", "mtime": 1}
        raise self.failing(f"403, url='{path}', key {self.storage_options.get('secret')}")

    def isdir(self, path: str) -> bool:
        return False

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        raise self.failing(f"403, url='{path}', key {self.storage_options.get('secret')}")


fsspec.register_implementation("signed", SignedFileSystem, clobber=True)


def refusals(act: Callable[[], object]) -> str:
    """Return all that a failing call tells: message, repr, fields, pickle, traceback."""
    try:
        act()
    except FarandoleError as error:
        again = pickle.loads(pickle.dumps(error))
        # The lines of this file hold the secrets: only what the errors themselves tell.
        told = "".join(
            line for line in traceback.format_exception(error) if not line.lstrip().startswith(("File", "act()"))
        )
        return f"{error}{error!r}{error.args}{vars(error)}{again}{vars(again)}{told}"
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("failing", [RuntimeError, FileNotFoundError, PermissionError, ValueError])
@pytest.mark.parametrize("read", [ParquetSource, ArrowSource, make_batch_reader])
@pytest.mark.parametrize("path", ["there", "nowhere"])
def test_no_refusal_of_files_tells_a_secret(
    read: Callable[..., object],
    failing: type[Exception],
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "farandole")
    monkeypatch.setattr(SignedFileSystem, "failing", failing)
    url = f"signed://AKIAEXAMPLE:{PLAIN}@host/{path}.parquet?sig={SECRET}"
    if read is make_batch_reader:
        told = refusals(lambda: read(url, storage_options={"secret": SECRET}))
    else:
        told = refusals(lambda: read(url, {"secret": SECRET}))
    assert "***" in told
    assert not leaks(told)
    assert not leaks(caplog.text)


@pytest.mark.parametrize(
    "url",
    [
        f"s3://AKIAEXAMPLE:{SECRET}@bucket/train?zone=x",
        f"s3://AKIAEXAMPLE:{PLAIN}@bucket/train?no_such_option={PLAIN}&secret_key={SECRET}",
        f"nowhere://AKIAEXAMPLE:{PLAIN}@bucket/train",
    ],
)
def test_urls_that_nothing_opens_are_masked(url: str) -> None:
    told = refusals(lambda: ParquetSource(url))
    assert not [each for each in leaks(told) if each != PLAIN or "no_such_option" not in url]


def test_reprs_and_names_of_files_are_masked() -> None:
    path = f"https://AKIAEXAMPLE:{PLAIN}@host/x.parquet?sig={SECRET}"
    group = RowGroup(File(path, 1, "mark"), 0, 1)
    options = ReaderOptions(storage_options={"key": PLAIN, "secret": SECRET})
    files = Files(SignedFileSystem(secret=SECRET))
    assert not leaks(f"{group}{group!r}{group.file!r}{options!r}{options}{files!r}")


def test_errors_and_other_ranks_are_masked() -> None:
    url = f"s3://AKIAEXAMPLE:{SECRET}@bucket/x"
    failed = RankFailed(1, f"died at {url}", f'ParquetSource("{url}")', [f"reading {url}"])
    for error in (SourceError(url, url), ConfigError("url", url), DataError("a", url), failed):
        assert not leaks(f"{error}{error!r}{vars(error)}{pickle.loads(pickle.dumps(error))!r}")
    told: list[str] = []

    def gather(obj: Any) -> list[Any]:
        told.append(obj)
        return [obj]

    def fail() -> None:
        raise RuntimeError(url)

    with pytest.raises(RuntimeError):
        together(fail, gather)
    assert told and not leaks(told[0])


def test_a_cause_with_a_secret_is_hidden_at_any_depth() -> None:
    clean, leaking = ValueError("clean"), ValueError(f"s3://a:{PLAIN}@b")
    assert hide_cause(clean) is clean
    assert hide_cause(leaking) is None
    clean.__cause__ = leaking
    assert hide_cause(clean) is None
    assert hide_cause(ValueError("failed with b-secret"), "b-secret") is None


def test_stores_and_converters_do_not_tell_their_secrets(tmp_path: Path) -> None:
    from farandole.estimators.store import FilesystemStore
    from farandole.spark.rows.written_rows import WrittenRows

    store = FilesystemStore(f"file://{tmp_path}", {"key": PLAIN, "secret": SECRET})
    assert not leaks(repr(store))
    assert not leaks(repr(WrittenRows(f"s3://AKIAEXAMPLE:{SECRET}@bucket/x", 3)))
    told = refusals(lambda: FilesystemStore(f"nowhere://AKIAEXAMPLE:{PLAIN}@bucket?sig={SECRET}"))
    assert not leaks(told)
