"""Versions of tables: opening the same version on all ranks, and the version in a state.

Imports no module that reads files: ranks that get a DataFrame's rows start without those."""

from datetime import datetime

from farandole.data.formats.source import Source
from farandole.data.loading.agreement import Gather, together
from farandole.data.loading.settings import check_count
from farandole.data.loading.state import NO_VERSION
from farandole.errors import ConfigError


def check_asked(setting: str, version: object, timestamp: object = None) -> None:
    """Raise `ConfigError` unless at most one of a version, by the name of its setting, and a datetime is given."""
    if version is not None and timestamp is not None:
        raise ConfigError(setting, "and timestamp exclude each other")
    if version is not None:
        check_count(setting, version, 0)
    if timestamp is not None and not isinstance(timestamp, datetime):
        raise ConfigError("timestamp", f"must be a datetime, got {timestamp!r}")


def at_version(source: Source, version: int) -> Source:
    """Return `source` at this version; raises `ConfigError` if only one of `source` and `version` is of a table."""
    here = source.version
    if version == here:
        return source
    if NO_VERSION in (version, here):
        wanted, found = (
            "no version" if each == NO_VERSION else f"version {each}" for each in (version, source.version)
        )
        raise ConfigError("state", f"belongs to other data: it has {wanted} of a table, and this data has {found}")
    return source.at(version)


def same_version(source: Source, gather: Gather | None) -> Source:
    """Return `source` at the version that rank 0 has opened; collective with `gather`.

    Other ranks may have opened a newer version that was written meanwhile."""
    if gather is None:
        return source
    versions = gather(source.version)
    if len(set(versions)) == 1 or NO_VERSION in versions:
        return source  # if only some ranks read a table, the comparison of their data raises an error later
    return together(lambda: at_version(source, versions[0]), gather)
