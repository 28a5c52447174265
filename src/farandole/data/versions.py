"""Versions of tables: one for all ranks, and the one that a state names.

Imports no module that reads files: ranks that are fed rows start without those."""

from typing import Protocol, runtime_checkable

from farandole.data.agreement import Gather, together
from farandole.data.row_groups import Source
from farandole.data.state import NO_VERSION
from farandole.errors import ConfigError

__all__ = ["Versioned", "at_version", "same_version", "version_of"]


@runtime_checkable
class Versioned(Protocol):
    """A source whose rows may be those of a version of a table."""

    @property
    def version(self) -> int:
        """The version that is read; `NO_VERSION` if the rows have none."""
        ...

    def at(self, version: int) -> Source:
        """Open another version of the same table in the same way; raises `SourceError` if it is gone."""
        ...


def version_of(source: Source) -> int:
    """Return the version of the table that `source` reads; `NO_VERSION` if its rows have none."""
    return source.version if isinstance(source, Versioned) else NO_VERSION


def at_version(source: Source, version: int) -> Source:
    """Return `source` at this version; raises `ConfigError` if its rows have no versions."""
    if version == version_of(source):
        return source
    if version == NO_VERSION or version_of(source) == NO_VERSION or not isinstance(source, Versioned):
        said, found = (
            "no version" if each == NO_VERSION else f"version {each}" for each in (version, version_of(source))
        )
        raise ConfigError("state", f"belongs to other data: it has {said} of a table, and this data has {found}")
    return source.at(version)


def same_version(source: Source, gather: Gather | None) -> Source:
    """Return `source` at the version that rank 0 has opened; collective. A writer may have added one since."""
    if gather is None:
        return source
    versions = gather(version_of(source))
    if len(set(versions)) == 1 or NO_VERSION in versions:
        return source  # also where ranks see different data, which they find out when they compare it
    return together(lambda: at_version(source, versions[0]), gather)
