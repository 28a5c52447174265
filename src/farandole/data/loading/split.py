"""Split of rows into training and validation by their content."""

import numpy as np
from numpy.typing import NDArray


def validation_mask(hashes: NDArray[np.int64], *, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Choose about `fraction` of the rows for validation, given a 64-bit hash of each row's content.

    The choice depends only on a row's content and the seed, not on its position, the number of ranks, or how often
    Spark evaluates the DataFrame. Equal rows get the same choice, so none is in both parts.
    """
    if not 0.0 <= fraction < 1.0:
        raise ValueError(f"fraction must be in [0, 1), got {fraction}")
    # The finalizer of SplitMix64: hashes that differ in one bit become unrelated numbers in [0, 1).
    offset = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]
    mixed = hashes.view(np.uint64) ^ offset
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    places = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    mask: NDArray[np.bool_] = places < fraction
    return mask
