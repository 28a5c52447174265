"""Small data sets of Parquet files and of images, and readers that stand for the ranks of a job."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farandole.data import Batch, Loader, Source

# Numbers of rows in row groups, by file: equal, unequal, with empty groups, one large group, fewer groups than ranks.
RAGGED: dict[str, list[list[int]]] = {
    "even": [[20, 20, 20], [20, 20, 20], [20, 20, 20]],
    "ragged": [[31, 2], [1], [17, 17, 5, 9], [40]],
    "some empty": [[12, 0, 7], [0], [30, 3]],
    "one large": [[1], [1], [200], [1], [1]],
    "many small": [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7], [9, 3, 2, 3, 8, 4, 6, 2, 6]],
    "one row group": [[83]],
}


def write_rows(
    folder: Path, layout: Sequence[Sequence[int]], make: Callable[[int, int], pa.Table] | None = None
) -> int:
    """Write files with row groups of these sizes; return the number of rows.

    `make(first, rows)` returns the rows from number `first` on; by default a column "row" with their numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    made = make or (lambda first, rows: pa.table({"row": np.arange(first, first + rows)}))
    first = 0
    for number, sizes in enumerate(layout):
        with pq.ParquetWriter(folder / f"part-{number:03}.parquet", made(0, 1).schema) as writer:
            for rows in sizes:
                if rows:
                    writer.write_table(made(first, rows))
                first += rows
    return first


def write_images(folder: Path, count: int) -> None:
    """Write images whose pixels all have the image's number, to folders "even" and "odd"; skip without Pillow."""
    image = pytest.importorskip("PIL.Image", reason="no images without Pillow")
    for number in range(count):
        path = folder / ("even", "odd")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((2, 3, 3), number, np.uint8)).save(path)


def read_all(
    source: Source, size: int, epochs: int, make: Callable[[Source, int], Loader]
) -> Iterator[list[list[Batch]]]:
    """Yield, for each epoch, the batches of each of `size` ranks; `make` returns the loader of a rank."""
    loaders = [make(source, rank) for rank in range(size)]
    for _ in range(epochs):
        yield [list(loader) for loader in loaders]
