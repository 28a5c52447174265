"""The order in which a rank visits its rows."""

import numpy as np
from numpy.typing import NDArray


def permutation(rows: int, *, seed: int, epoch: int, shard: int) -> NDArray[np.int64]:
    """Return the order of rows 0..rows-1 in this epoch, a function of the arguments and nothing else.

    Raises `ValueError` when the seed, the epoch or the shard is negative.
    """
    # Seed and position are kept apart (entropy, spawn key), so that seed 1 epoch 23 is not seed 12 epoch 3.
    stream = np.random.SeedSequence(seed, spawn_key=(epoch, shard))
    return np.random.Generator(np.random.PCG64(stream)).permutation(rows).astype(np.int64, copy=False)
