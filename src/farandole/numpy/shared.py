"""Arrays in memory that the ranks of a host share."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from farandole.core import default
from farandole.numpy.adapter import Array


def empty_shared(shape: int | Sequence[int], dtype: npt.DTypeLike = float) -> Array:
    """Return an uninitialized array, as `numpy.empty` does, that the other ranks of this host can read.

    An in-place allreduce copies nothing if every rank uses such arrays. The memory is freed with its last view, also
    after `shutdown`. Across several hosts it is ordinary memory. Raises `InvalidRequest` if this rank's part of the
    arena is exhausted.
    """
    sizes = np.broadcast_to(0, shape).shape  # NumPy's own reading of a shape, and its errors
    kind = np.dtype(dtype)
    memory = default.context().empty_shared(math.prod(sizes) * kind.itemsize)
    return np.asarray(memory).view(kind).reshape(sizes)
