"""Choice of the columns that are read: by name, by pattern, or all that tensors hold."""

import difflib
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

import pyarrow as pa

from farandole.data.formats.fields import is_held
from farandole.errors import ConfigError, DataError

log = logging.getLogger(__name__)


class HasName(Protocol):
    """A field of Arrow's or Petastorm's schema."""

    @property
    def name(self) -> str: ...


SchemaField: TypeAlias = str | HasName


def check_names(schema: pa.Schema, names: Iterable[str]) -> None:
    """Raise `DataError` for the first name that is not in the schema."""
    known = dict.fromkeys(schema.names)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise DataError(name, f"is not in the data, which has {', '.join(known)}{hint}")


def columns_to_read(schema: pa.Schema, asked: Sequence[str] | None, *, warn: bool = True) -> list[str]:
    """Return `asked`; if it is None, all columns but those that no tensor holds, such as maps.

    With `warn`, logs one warning that names the columns left out. Raises `DataError` if no column is left."""
    if asked is not None:
        return list(asked)
    held = [field.name for field in schema if is_held(field.type)]
    if len(held) < len(schema):
        out = ", ".join(f"{field.name} ({field.type})" for field in schema if not is_held(field.type))
        if not held:
            raise DataError("", f"no tensor holds any column: {out}; cast one")
        if warn:
            log.warning("columns that no tensor holds are left out: %s", out)
    return held


def columns_by_pattern(schema: pa.Schema, asked: Sequence[SchemaField] | None, *, warn: bool) -> list[str]:
    """Return the columns that `asked` chooses by name, or by regular expression among those that tensors hold."""
    if asked is None:
        return columns_to_read(schema, None, warn=warn)
    if isinstance(asked, str) or not all(isinstance(each, str) or hasattr(each, "name") for each in asked):
        raise ConfigError("schema_fields", f"must be a list of names or fields, got {asked!r}")
    known, chosen = dict.fromkeys(schema.names), dict[str, None]()
    patterns = [each if isinstance(each, str) else each.name for each in asked]
    held = [] if known.keys() >= set(patterns) else columns_to_read(schema, None, warn=warn)
    for pattern in patterns:
        found = [pattern] if pattern in known else [name for name in held if re.fullmatch(pattern, name)]
        if not found:
            raise DataError(pattern, f"is not in the data, which has {', '.join(known)}")
        chosen |= dict.fromkeys(found)
    return list(chosen)
