"""Nulls, and arrays of other lengths, that a transform gets and must not leave."""

import numpy as np
from numpy.typing import NDArray

from farandole.data.loading.values import Array, Ragged, SparseRows, Values
from farandole.errors import DataError


def nulls_in(values: Values, planned: Values) -> NDArray[np.bool_] | None:
    """Return where a column of the type of `planned` has None, NaT or, for an integer, NaN; None if nowhere."""
    plain, kind = _plain(values), _plain(planned).dtype.kind
    if plain.dtype.hasobject:
        found = [cell is None or (isinstance(cell, float) and cell != cell) for cell in plain.reshape(-1).tolist()]
        nulls = np.array(found, bool).reshape(plain.shape)
    elif plain.dtype.kind in "mM":
        nulls = np.isnat(plain)
    elif plain.dtype.kind == "f" and kind in "biu":
        nulls = np.isnan(plain)
    else:
        return None
    return nulls if nulls.any() else None


def settled(name: str, given: Values, nulls: NDArray[np.bool_] | None, made: Values, planned: Values) -> Values:
    """Return a column that a transform has `made`, in the planned type if it only filled the `nulls` that were given.

    Raises `DataError` for nulls, and for arrays of other lengths, that were given and are left."""
    if isinstance(given, Ragged) and isinstance(made, Ragged) and not isinstance(planned, Ragged):
        problem = "the transform has left arrays of different lengths; pad or cut them, or read them as they are"
        raise DataError(name, f"{problem}: ragged=['{name}']")
    if nulls is None:
        return made
    if (left := nulls_in(made, planned)) is not None:
        problem = f"the transform has left {left.sum()} nulls; fill them, or say what stands for them"
        raise DataError(name, f"{problem}: nulls={{'{name}': ...}}")
    before, after, kind = _plain(given), _plain(made), _plain(planned).dtype
    if kind.kind not in "biu" or after.shape != before.shape or not (after == before)[~nulls].all():
        return made
    filled = after.astype(kind)
    if not (filled == after).all():
        return made
    return Ragged(filled, made.offsets) if isinstance(made, Ragged) else filled


def _plain(values: Values) -> Array:
    return values.values if isinstance(values, Ragged | SparseRows) else values
