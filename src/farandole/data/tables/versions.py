"""Versions of tables: opening the same version on all ranks, and the version in a state.

Imports no module that reads files: ranks that get a DataFrame's rows start without those."""

from typing import Protocol, runtime_checkable

from farandole.data.formats.row_groups import Source
from farandole.data.loading.agreement import Gather, together
from farandole.data.loading.state import NO_VERSION
from farandole.errors import ConfigError

__all__ = ["Versioned", "at_version", "same_version", "version_of"]


@runtime_checkable
class Versioned(Protocol):
    """A source that may read a version of a table."""

    @property
    def version(self) -> int:
        """The version that is read; `NO_VERSION` for other data."""
        ...

    def at(self, version: int) -> Source:
        """Open another version of the same table, with the same settings; raises `SourceError` if it is gone."""
        ...


def version_of(source: Source) -> int:
    """Return the version of the table that `source` reads; `NO_VERSION` if it reads no table."""
    return source.version if isinstance(source, Versioned) else NO_VERSION


def at_version(source: Source, version: int) -> Source:
    """Return `source` at this version; raises `ConfigError` if only one of `source` and `version` is of a table."""
    if version == version_of(source):
        return source
    if version == NO_VERSION or version_of(source) == NO_VERSION or not isinstance(source, Versioned):
        wanted, found = (
            "no version" if each == NO_VERSION else f"version {each}" for each in (version, version_of(source))
        )
        raise ConfigError("state", f"belongs to other data: it has {wanted} of a table, and this data has {found}")
    return source.at(version)


def same_version(source: Source, gather: Gather | None) -> Source:
    """Return `source` at the version that rank 0 has opened; collective with `gather`.

    Other ranks may have opened a newer version that was written meanwhile."""
    if gather is None:
        return source
    versions = gather(version_of(source))
    if len(set(versions)) == 1 or NO_VERSION in versions:
        return source  # if only some ranks read a table, the comparison of their data raises an error later
    return together(lambda: at_version(source, versions[0]), gather)
