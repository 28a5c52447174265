"""Options of object stores, for clients that name them in other ways."""

from pathlib import Path

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

from fsspec.registry import _registry

from farandole.data import ParquetSource
from farandole.data.stores.options import arrow_s3_options, botocore_options, delta_url, object_store_options
from farandole.errors import SourceError

PANDAS = {"key": "K", "secret": "S", "client_kwargs": {"endpoint_url": "http://here:9000", "region_name": "eu"}}


def test_options_of_the_url_and_of_fsspec_are_the_same_to_deltalake() -> None:
    url = "s3://K:S%2F@bucket/a/table?region=eu&scheme=http&endpoint_override=here:9000"
    wanted = {
        "AWS_ACCESS_KEY_ID": "K",
        "AWS_SECRET_ACCESS_KEY": "S",
        "AWS_REGION": "eu",
        "AWS_ENDPOINT_URL": "http://here:9000",
        "AWS_ALLOW_HTTP": "true",
    }
    assert object_store_options(url, {}) == wanted | {"AWS_SECRET_ACCESS_KEY": "S/"}
    assert object_store_options("s3://bucket/a/table", PANDAS) == wanted
    assert delta_url(url) == delta_url("s3a://bucket/a/table") == "s3://bucket/a/table"
    assert object_store_options("s3://bucket/t", {"anon": True}) == {"AWS_SKIP_SIGNATURE": "true"}
    assert object_store_options("/data/table", {"auto_mkdir": True}) == {}
    assert object_store_options("abfs://c@a.dfs/t", {"account_key": "x", "n": 3}) == {"account_key": "x"}
    assert delta_url("file:///data/a%20table") == "/data/a table"


def test_options_of_fsspec_are_arrows() -> None:
    assert arrow_s3_options(PANDAS) == {
        "access_key": "K",
        "secret_key": "S",
        "endpoint_override": "here:9000",
        "scheme": "http",
        "region": "eu",
    }
    with pytest.raises(ValueError, match="option 'profile' needs s3fs"):
        arrow_s3_options({"profile": "mine"})


def test_options_that_arrow_does_not_know_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)  # where an earlier test has loaded it
    for options, text in (
        ({"profile": "mine", "secret": "very secret"}, "option 'profile' needs s3fs"),
        ({"secret": "very secret"}, "the URL has options, too"),
    ):
        url = "s3://bucket/x" if "profile" in options else "s3://bucket/x?region=eu"
        with pytest.raises(SourceError, match=text) as refused:
            ParquetSource(url, options)
        assert "very secret" not in str(refused.value)


def test_certificates_to_trust_are_options_of_each_client() -> None:
    def given(verify: object) -> dict[str, object]:
        return {**PANDAS, "client_kwargs": {**PANDAS["client_kwargs"], "verify": verify}}  # type: ignore[dict-item]

    assert arrow_s3_options(given("ca.pem"))["tls_ca_file_path"] == "ca.pem"
    with pytest.raises(ValueError, match="option 'verify' needs s3fs"):
        arrow_s3_options(given(False))
    assert object_store_options("s3://bucket/t", given(False))["allow_invalid_certificates"] == "true"
    assert "allow_invalid_certificates" not in object_store_options("s3://bucket/t", given("ca.pem"))
    assert [botocore_options("s3://bucket/t", given(each))["verify"] for each in (Path("ca.pem"), False)] == [
        "ca.pem",
        False,
    ]
