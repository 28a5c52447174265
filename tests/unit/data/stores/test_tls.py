"""Stores over TLS: certificates come from where users name them, and one that is not trusted is told at once."""

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("botocore")

from farandole.data import Loader, ParquetSource
from farandole.errors import ConfigError, SourceError
from helpers.datasets import write_rows
from helpers.object_store import ObjectStore

if shutil.which("openssl") is None:
    pytest.skip("openssl makes the certificates", allow_module_level=True)

FILES, ROWS = 4, 5
VARIABLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "AWS_CONFIG_FILE", "AWS_PROFILE")


def _certificate(folder: Path, names: str) -> tuple[Path, ssl.SSLContext]:
    """Make a certificate that is signed by itself; give its file, and a server's context."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=store"
    ask = [
        "openssl",
        *made.split(),
        "-addext",
        f"subjectAltName={names}",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run(ask, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate, context


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    return _certificate(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1")


@pytest.fixture
def store(
    tmp_path: Path, certificate: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectStore]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    write_rows(tmp_path / "data", [[ROWS]] * FILES)
    with ObjectStore.serving(tmp_path / "data", tls=certificate[1]) as served:
        yield served


def rows_of(store: ObjectStore, **how: Any) -> list[int]:
    options = {**store.options, **how}
    if "verify" in how:  # where pandas' users write it
        options["client_kwargs"] = {**store.options["client_kwargs"], "verify": options.pop("verify")}  # type: ignore[dict-item]
    loader = Loader(ParquetSource("s3://bucket/data", options), batch_size=4, policy="join")
    return sorted(row for batch in loader for row in batch["row"].tolist())


@pytest.mark.parametrize("way", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "profile", "verify", "any"])
def test_certificates_are_trusted_where_users_say_so(
    store: ObjectStore,
    certificate: tuple[Path, ssl.SSLContext],
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    how: dict[str, Any] = {}
    if way == "profile":
        told = tmp_path / "config"
        told.write_text(f"[profile lab]\nca_bundle = {certificate[0]}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(told))
        monkeypatch.setenv("AWS_PROFILE", "lab")
    elif way in VARIABLES:
        monkeypatch.setenv(way, str(certificate[0]))
    else:
        how = {"verify": str(certificate[0]) if way == "verify" else False}
    assert rows_of(store, **how) == list(range(FILES * ROWS))
    assert store.requests["GET"] <= 2 * FILES + 2, "asked by the client for few requests"


def test_a_certificate_that_is_not_trusted_is_told_at_once(
    store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with pytest.raises(
        SourceError, match=r"s3://bucket/data: .*self.signed certificate.*not trusted.*AWS_CA_BUNDLE"
    ) as told:
        rows_of(store)
    assert "again in" not in caplog.text
    assert "secretsecret" not in str(told.value)
    assert store.count == 0


def test_a_certificate_of_another_host_is_told(store: ObjectStore, tmp_path: Path) -> None:
    other, context = _certificate(tmp_path, "DNS:elsewhere.test")
    with (
        ObjectStore.serving(tmp_path / "data", tls=context) as served,
        pytest.raises(SourceError, match=r"s3://bucket/data: .*(IP address|Hostname) mismatch.*127.0.0.1"),
    ):
        rows_of(served, verify=str(other))


def test_a_file_of_certificates_that_is_not_there_is_named(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"verify: no certificates can be read from .*nowhere.pem: .*AWS_CA_BUNDLE"):
        rows_of(store, verify=str(tmp_path / "nowhere.pem"))


def test_a_web_servers_certificate_that_is_not_trusted_is_told_at_once(
    store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("aiohttp")
    caplog.set_level("INFO")
    with pytest.raises(SourceError, match=r"https://127.0.0.1.*self.signed certificate.*not trusted.*SSL_CERT_FILE"):
        ParquetSource(store.urls())
    assert "again in" not in caplog.text
