"""Places of files as users give them: texts and paths."""

import os
from collections.abc import Sequence

__all__ = ["Places", "texts_of"]

Places = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def texts_of(places: Places) -> str | list[str]:
    """Return URLs and paths as texts; of a `FlyteDirectory` or `FlyteFile` the place in the store.

    Its `__fspath__` would download all files."""
    if isinstance(places, str):
        return places
    if isinstance(places, os.PathLike):
        return str(getattr(places, "remote_source", None) or os.fspath(places))
    return [each if isinstance(each, str) else str(texts_of(each)) for each in places]
