"""Masking of secrets in messages: credentials in URLs, signed queries, options of file systems."""

import re
from collections.abc import Iterator, Mapping

_MASK = "***"

# Names of secrets in queries, connection strings and options of fsspec's file systems.
_NAMES = (
    r"(?:[\w.-]*(?:secret[\w.-]*|token|passw(?:or)?d|passphrase|signature|credentials?|authorization"
    r"|(?:access|account|api|shared|private|encryption)[_-]?key(?:[_-]?id)?)|key|pwd|sig|sas|auth|code)"
)
_NAME = re.compile(_NAMES, re.IGNORECASE)

# scheme://user:password@host, also without the scheme, which file systems strip from paths. Keys may hold slashes that
# should have been quoted; then the match extends to the last "@" of the word.
_USER = re.compile(r"""(?:(://)[^\s/:@?#'"]*:|(?:^|(?<=[\s'"(\[]))[^\s/:@?#'"]*:(?!:|//))(?:[^\s/?#'"]*@|[^\s'"]*@)""")
_QUERY = re.compile(rf"""((?:^|[?&;#]){_NAMES}=)[^\s&;#'"<>]*""", re.IGNORECASE)
_OPTION = re.compile(rf"""((?<![\w.-])(['"]?){_NAMES}\2\s*[:=]\s*)(['"])(?:(?!\3).)*\3""", re.IGNORECASE)

# Shorter values occur in texts by accident.
_LEAST_LENGTH = 6


def mask(text: str, *secrets: str) -> str:
    """Return `text` with `***` in place of credentials in URLs and of secret values in queries and options.

    `secrets` are known secrets, which are masked wherever they occur. Masking a masked text changes nothing."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _LEAST_LENGTH:
            text = text.replace(secret, _MASK)
    if "@" in text:
        text = _USER.sub(lambda found: f"{found[1] or ''}{_MASK}:{_MASK}@", text)
    text = _QUERY.sub(rf"\1{_MASK}", text)
    return _OPTION.sub(rf"\1\3{_MASK}\3", text)


def mask_foreign(text: str) -> str:
    """Return the masked `text` of a user's program as UTF-8 can hold it: a file's name may have bytes that are no text.

    Spark's Python worker fails to send such an error, and the driver would wait for the rank without end."""
    return mask(text.encode(errors="backslashreplace").decode())


def secret_values(options: Mapping[str, object]) -> list[str]:
    """Return the values of options that have the name of a secret, in nested mappings too."""
    return list(_values(options))


def without_secrets(options: Mapping[str, object]) -> dict[str, object]:
    """Return `options` without those that have the name of a secret, in nested mappings too."""
    kept = {name: value for name, value in options.items() if not _NAME.fullmatch(str(name))}
    return {name: without_secrets(value) if isinstance(value, Mapping) else value for name, value in kept.items()}


def hide_cause(error: BaseException, *secrets: str) -> BaseException | None:
    """Return `error` as the cause of another one; None if its text, or that of its own causes, holds a secret.

    For `raise ... from hide_cause(error)`: tracebacks print the texts of causes."""
    each: BaseException | None = error
    while each is not None:
        text = str(each)
        if mask(text, *secrets) != text:
            return None
        each = each.__cause__ or each.__context__
    return error


def _values(options: Mapping[str, object]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _values(value)
        elif isinstance(value, str) and _NAME.fullmatch(str(name)):
            yield value
