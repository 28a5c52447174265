"""Readers of Parquet files that `bench/data.py` compares with farandole.data, set up as their documents recommend."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch.utils.data
from numpy.typing import NDArray
from peer_environment import missing

BUFFER = 10_000  # rows among which Hugging Face's streaming shuffles
WINDOW = 4  # row groups whose rows are shuffled together

Batch = dict[str, NDArray[np.generic]]


def cut(whole: pa.Table, batch: int, order: NDArray[np.int64] | None) -> Iterator[Batch]:
    """Yield the rows of a table as batches of arrays, in this order."""
    columns = {name: as_array(whole[name]) for name in whole.column_names}
    if order is not None:
        columns = {name: values[order] for name, values in columns.items()}
    for first in range(0, whole.num_rows, batch):
        yield {name: values[first : first + batch] for name, values in columns.items()}


def as_array(column: pa.ChunkedArray) -> NDArray[np.generic]:
    """Return a column as an array; lists of one length as an array of two dimensions."""
    whole = column.combine_chunks()
    if pa.types.is_list(whole.type):
        values: NDArray[np.generic] = whole.flatten().to_numpy()
        return values.reshape(len(whole), -1)
    array: NDArray[np.generic] = whole.to_numpy()
    return array


def spdl_groups(folder: Path, *, shuffle: bool, batch: int) -> Iterator[Batch]:
    """Yield batches of an SPDL pipeline, which reads row groups on two threads. SPDL has no reader of Parquet."""
    from spdl.pipeline import PipelineBuilder

    paths = sorted(folder.glob("*.parquet"))
    groups = [(path, number) for path in paths for number in range(pq.read_metadata(path).num_row_groups)]
    if shuffle:
        random.shuffle(groups)

    def read(group: tuple[Path, int]) -> pa.Table:
        with pq.ParquetFile(group[0]) as file:
            return file.read_row_group(group[1], use_threads=False)

    def batches(tables: list[pa.Table]) -> list[Batch]:
        whole = pa.concat_tables(tables)
        return list(cut(whole, batch, np.random.permutation(whole.num_rows) if shuffle else None))

    builder = PipelineBuilder().add_source(groups)
    builder.pipe(read, concurrency=2, output_order="completion" if shuffle else "input")
    # Lists of batches pass the pipeline, because each item takes a turn of its event loop.
    builder.aggregate(WINDOW if shuffle else 1).pipe(batches).add_sink(3)
    with (made := builder.build(num_threads=2)).auto_stop():
        for group in made:
            yield from group


def hugging_face(folder: Path, *, shuffle: bool, batch: int) -> Iterator[Batch]:
    """Yield batches of Hugging Face's streaming, as NumPy arrays; without worker processes, which are slower here."""
    import datasets

    files = sorted(map(str, folder.glob("*.parquet")))
    data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    if shuffle:
        data = data.shuffle(seed=0, buffer_size=BUFFER)
    return iter(data.with_format("numpy").iter(batch))


def index_litdata(folder: Path) -> Path:
    """Write LitData's index of the Parquet files next to their folder; return the index's folder."""
    import litdata

    index = folder.with_name(f"{folder.name}-index")
    if not index.exists():
        index.mkdir()
        litdata.index_parquet_dataset(str(folder), cache_dir=str(index))
    return index


def litdata_rows(folder: Path, index: Path, *, shuffle: bool, batch: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of LitData, which reads the Parquet files by its index of them, with two processes."""
    import litdata
    from litdata.streaming.item_loader import ParquetLoader

    data = litdata.StreamingDataset(str(folder), item_loader=ParquetLoader(), shuffle=shuffle, index_path=str(index))
    return iter(
        litdata.StreamingDataLoader(data, batch_size=batch, num_workers=2, multiprocessing_context="forkserver")
    )


def installed() -> frozenset[str]:
    """Return the modules of the readers that are installed; print those that are not."""
    needed = {"spdl": (), "datasets": (), "litdata": ("polars",), "torchdata": ()}
    return frozenset(name for name, others in needed.items() if not missing(name, *others))
