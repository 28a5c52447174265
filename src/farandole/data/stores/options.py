"""Translation of object stores' options, from URLs and fsspec, for the clients of Arrow, botocore and deltalake."""

from collections.abc import Mapping
from urllib.parse import parse_qsl, unquote, urlsplit

from farandole.data.formats.places import local_path

# Names of s3 options in fsspec and in Arrow's URLs, and the names for them in deltalake, Arrow's client and botocore.
_S3 = {
    "key": ("AWS_ACCESS_KEY_ID", "access_key", "aws_access_key_id"),
    "secret": ("AWS_SECRET_ACCESS_KEY", "secret_key", "aws_secret_access_key"),
    "token": ("AWS_SESSION_TOKEN", "session_token", "aws_session_token"),
    "endpoint_url": ("AWS_ENDPOINT_URL", "", "endpoint_url"),
    "region_name": ("AWS_REGION", "region", "region_name"),
    "region": ("AWS_REGION", "region", "region_name"),
    "anon": ("AWS_SKIP_SIGNATURE", "anonymous", "anonymous"),
    "anonymous": ("AWS_SKIP_SIGNATURE", "anonymous", "anonymous"),
    "profile": ("", "", "profile"),
    "verify": ("", "", "verify"),
    "use_ssl": ("", "", "use_ssl"),
}
_DELTALAKE, _ARROW, _BOTOCORE = ({name: names[of] for name, names in _S3.items() if names[of]} for of in range(3))
_IN_QUERIES = {"scheme", "endpoint_override", "allow_bucket_creation", "allow_bucket_deletion"}


def delta_url(url: str) -> str:
    """Return the URL in deltalake's form: without credentials and query; for a local folder, its absolute path."""
    if (path := local_path(url)) is not None:
        return path
    parts = urlsplit(url)
    scheme = "s3" if parts.scheme == "s3a" else parts.scheme
    # Outside of s3, the part before "@" may be a container: abfss://container@account.
    host = parts.netloc.rpartition("@")[2] if scheme == "s3" else parts.netloc
    return f"{scheme}://{host}{parts.path}"


def object_store_options(url: str, options: Mapping[str, object]) -> dict[str, str]:
    """Return deltalake's options for a URL and the options of its file system.

    Options of s3 are translated. For other stores, options that are texts are passed on unchanged, and others are left
    out."""
    if local_path(url) is not None:
        return {}
    parts = urlsplit(url)
    if parts.scheme not in ("s3", "s3a"):
        return {name: value for name, value in options.items() if isinstance(value, str)}
    found = _options_in_url(url) | _flat(options)
    made = {_DELTALAKE[name]: _text(found[name]) for name in found if name in _DELTALAKE and found[name] is not None}
    made |= {name: str(value) for name, value in options.items() if name.upper().startswith("AWS_")}
    if found.get("verify") is False:
        made["allow_invalid_certificates"] = "true"
    if made.get("AWS_ENDPOINT_URL", "").startswith("http://"):
        made["AWS_ALLOW_HTTP"] = "true"
    return made


def arrow_s3_options(options: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of Arrow's s3 client for options of fsspec, in the form that pandas accepts.

    Raises `ValueError` naming an option that Arrow's client does not have."""
    made: dict[str, object] = {}
    for name, value in _flat(options).items():
        if name == "endpoint_url":
            scheme, _, host = str(value).rpartition("://")
            made |= {"endpoint_override": host, "scheme": scheme or "https"}
        elif name == "verify" and isinstance(value, str):
            made["tls_ca_file_path"] = value
        elif name in _ARROW:
            made[_ARROW[name]] = value
        else:
            raise ValueError(f"option '{name}' needs s3fs, which is not installed: pip install s3fs")
    return made


def botocore_options(url: str, options: Mapping[str, object]) -> dict[str, object]:
    """Return arguments of botocore's s3 client, and "anonymous" and "profile", for a URL and fsspec's options.

    "verify" is a file of certificates to trust, or False to verify none. Raises `ValueError` naming an option that
    botocore does not have."""
    found = {name: value for name, value in (_options_in_url(url) | _flat(options)).items() if name not in _IN_QUERIES}
    unknown = sorted(set(found) - set(_BOTOCORE))
    if unknown:
        raise ValueError(f"botocore has no option '{unknown[0]}'")
    made = {_BOTOCORE[name]: value for name, value in found.items() if value is not None}
    if not isinstance(made.get("verify", True), bool):
        made["verify"] = str(made["verify"])
    return made


def _options_in_url(url: str) -> dict[str, object]:
    """Return the options in an s3 URL of Arrow's form, by fsspec's names."""
    parts = urlsplit(url)
    found: dict[str, object] = dict(parse_qsl(parts.query))
    if "endpoint_override" in found:
        found["endpoint_url"] = f"{found.get('scheme', 'https')}://{found['endpoint_override']}"
    if parts.username is not None:
        found |= {"key": unquote(parts.username), "secret": unquote(parts.password or "")}
    return found


def _flat(options: Mapping[str, object]) -> dict[str, object]:
    """Return the file system's options with those in "client_kwargs" merged in, as s3fs does."""
    client = options.get("client_kwargs")
    flat = {name: value for name, value in options.items() if name != "client_kwargs"}
    return {**flat, **client} if isinstance(client, Mapping) else flat


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
