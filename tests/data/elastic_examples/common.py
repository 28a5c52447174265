"""What the elastic programs beside this file share: data, lines for the test that runs them, and an end on its word."""

import os
import zlib

import numpy as np


def digits(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels of the shapes and types of MNIST."""
    dice = np.random.default_rng(42)
    return dice.integers(0, 256, (rows, 28, 28), np.uint8), dice.integers(0, 10, rows, np.uint8)


def is_over() -> float:
    """Return 1.0 once the test wants the training to end; ranks agree on the maximum."""
    return float(os.path.exists("end"))


def show(hvd: object, step: int) -> None:
    print("step", step, hvd.rank(), hvd.size(), os.getpid(), flush=True)


def done(weights: list[np.ndarray]) -> None:
    print(
        "done",
        0,
        zlib.crc32(b"".join(np.ascontiguousarray(each).tobytes() for each in weights)),
        os.getpid(),
        flush=True,
    )
