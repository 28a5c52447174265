"""Batches of `farandole.data` as JAX arrays.

loader = TensorLoader(Loader(ParquetSource(url), batch_size=32, policy="drop", rank=hvd.rank(), size=hvd.size()))
for batch in loader:
    state = train_step(state, batch["pixels"], batch["label"])
"""

import logging
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO
from numpy.typing import NDArray

from farandole.data import Loader, Ragged, SparseRows, Values, tensors
from farandole.errors import DataError

__all__ = ["TensorBatch", "TensorLoader", "as_tensor"]

log = logging.getLogger(__name__)

Tensor: TypeAlias = jax.Array | BCOO
TensorBatch: TypeAlias = tensors.TensorBatch[Tensor]
Place: TypeAlias = jax.Device | jax.sharding.Sharding


def as_tensor(name: str, values: Values, device: Place | None = None) -> Tensor:
    """Return a column as an array on `device`, by default JAX's first one. It owns its memory and may be donated.

    Times become integers in their own unit, since 1970; sparse vectors become a BCOO matrix. Dtypes of 64 bits become
    32 bits wide unless `jax_enable_x64` is set. Raises `DataError` for numbers that do not fit into 32 bits, for
    strings and bytes, for arrays of different lengths, and for rows that a sharding cannot divide.
    """
    if isinstance(values, Ragged):
        raise DataError(name, "JAX has no arrays of different lengths; pad them in a transform, or leave them out")
    if isinstance(values, SparseRows):
        rows = np.repeat(np.arange(len(values)), np.diff(values.offsets))
        narrow = max(len(values), values.width) <= 2**31
        places = np.stack([rows, values.indices], axis=1).astype(np.int32 if narrow else np.int64)
        parts = _put(name, values.values, device), _put(name, places, device)
        return BCOO(parts, shape=(len(values), values.width), unique_indices=True)
    if values.dtype.kind in "OSU":
        raise DataError(
            name, "texts and bytes have no array; give a vocabulary, decode them in a transform, or leave them out"
        )
    return _put(name, values.view(np.int64) if values.dtype.kind in "mM" else values, device)


class TensorLoader(tensors.TensorLoader[Tensor]):
    """A `Loader` or `FeedLoader` that yields `TensorBatch`, with arrays on `device`, or on several by a sharding.

    Logs which columns become 32 bits wide. Raises `DataError` for a column that JAX cannot hold."""

    def __init__(self, loader: Loader, device: Place | None = None) -> None:
        super().__init__(loader, lambda name, values: as_tensor(name, values, device))
        narrow = [f"{name} ({kind})" for name, kind in loader.kinds.items() if kind.startswith(_WIDE)]
        if narrow and _kind_of(np.dtype(np.int64)) != np.int64:
            log.warning("%s: 64 bits become 32, unless jax_enable_x64 is set", ", ".join(narrow))


_WIDE = ("int64", "uint64", "double", "float64", "decimal")  # decimals are read as float64


def _put(name: str, values: NDArray[np.generic], device: Place | None) -> jax.Array:
    values = _narrowed(name, values)
    try:
        # `device_put` shares aligned memory in any case, and a donated array would then be overwritten.
        return jnp.array(values, copy=True, device=device)
    except (TypeError, ValueError) as error:
        hint = ""
        if isinstance(device, jax.sharding.Sharding):
            hint = "; with a sharding choose a batch_size that its devices divide, and policy 'pad' or 'drop'"
        raise DataError(name, f"JAX refuses {len(values)} rows of {values.dtype} on {device}: {error}{hint}") from error


def _narrowed(name: str, values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return the values in the dtype that JAX uses; raises `DataError` if numbers do not fit into it."""
    kind = _kind_of(values.dtype)
    if kind == values.dtype:
        return values
    if kind.kind in "iu" and len(values):
        least, most = values.min(), values.max()
        if least < np.iinfo(kind).min or most > np.iinfo(kind).max:
            raise DataError(name, f"{least} to {most} do not fit into {kind}; set jax_enable_x64, or scale them")
    try:
        with np.errstate(over="raise"):
            return values.astype(kind)
    except FloatingPointError as error:
        raise DataError(name, f"numbers do not fit into {kind}; set jax_enable_x64, or scale them") from error


def _kind_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that JAX uses for `dtype`."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype)).newbyteorder("=")
