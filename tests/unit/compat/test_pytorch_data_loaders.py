"""`horovod.spark.data_loaders`, over readers."""

import itertools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")
pytest.importorskip("torch")

import pyarrow as pa
import pyarrow.parquet as pq

from farandole.compat.pytorch_data_loaders import (
    PytorchAsyncDataLoader,
    PytorchDataLoader,
    PytorchInfiniteAsyncDataLoader,
    PytorchInfiniteDataLoader,
    PytorchInmemAsyncDataLoader,
    PytorchInmemDataLoader,
)
from farandole.data import Reader, make_batch_reader
from farandole.errors import ConfigError

ROWS = 10


@pytest.fixture
def url(tmp_path: Path) -> str:
    pq.write_table(pa.table({"row": range(ROWS)}), tmp_path / "rows.parquet")
    return tmp_path.as_uri()


def reader_of(url: str, epochs: int | None = 1) -> Reader:
    return make_batch_reader(url, num_epochs=epochs, shuffle_row_groups=False)


def epoch(loader: Any) -> list[int]:
    return [row for batch in loader for row in batch["row"].tolist()]


@pytest.mark.parametrize("kind", [PytorchDataLoader, PytorchAsyncDataLoader])
def test_each_epoch_is_a_pass(url: str, kind: Any) -> None:
    with reader_of(url) as reader:
        loader = kind(reader=reader, batch_size=4, shuffling_queue_capacity=0, name="train", verbose=True)
        assert (len(loader), epoch(loader), epoch(loader)) == (0, list(range(ROWS)), list(range(ROWS)))
        few = kind(reader=reader, batch_size=4, shuffling_queue_capacity=0, limit_step_per_epoch=2)
        assert (len(few), epoch(few), epoch(few)) == (2, list(range(8)), list(range(8)))
        assert epoch(loader) == list(range(ROWS))


@pytest.mark.parametrize("kind", [PytorchInfiniteDataLoader, PytorchInfiniteAsyncDataLoader])
def test_epochs_continue_an_endless_pass(url: str, kind: Any) -> None:
    with reader_of(url, None) as reader:
        loader = kind(reader=reader, batch_size=4, shuffling_queue_capacity=0, limit_step_per_epoch=2)
        rows = list(itertools.chain(*(epoch(loader) for _ in range(5))))
        assert rows == [*range(ROWS)] * 4
    with reader_of(url) as reader, pytest.raises(ConfigError, match="num_epochs: of the reader must be None"):
        kind(reader=reader, batch_size=4, shuffling_queue_capacity=0)


@pytest.mark.parametrize("kind", [PytorchInmemDataLoader, PytorchInmemAsyncDataLoader])
def test_epochs_of_rows_in_memory(url: str, kind: Any) -> None:
    loader = kind(reader=reader_of(url, None), batch_size=4, num_epochs=2, limit_step_per_epoch=2)
    assert (len(loader), epoch(loader), epoch(loader)) == (2, list(range(8)), list(range(8)))
    with pytest.raises(RuntimeError, match="give a larger num_epochs"):
        epoch(loader)
    with reader_of(url) as reader, pytest.raises(ValueError, match="limit_step_per_epoch"):
        kind(reader=reader, batch_size=4, num_epochs=2)
