"""A DataFrame as Parquet that ranks read, by Petastorm's names."""

import gc
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

pytest.importorskip("tensorflow")

import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession

from farandole.errors import ConfigError, DataError
from farandole.spark.converter import CACHE_SETTINGS, make_spark_converter
from helpers.spark_session import session

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with session("local[2]") as started:
        yield started


def test_a_dataframe_is_read_by_several_ranks_exactly_once(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.range(101).selectExpr("id", "id / 2 AS half", "array(id, -id) AS pair").repartition(3)
    spark.conf.unset(CACHE_SETTINGS[0])
    with pytest.raises(ConfigError, match="parentCacheDirUrl: is not set"):
        make_spark_converter(frame)
    spark.conf.set(CACHE_SETTINGS[1], tmp_path.as_uri())  # the name that programs have
    converter = make_spark_converter(frame)
    assert len(converter) == 101
    seen: list[int] = []
    for shard in range(2):
        # As in the function that a HorovodRunner sends to its ranks.
        sent = pickle.loads(pickle.dumps(converter))
        with sent.make_torch_dataloader(8, num_epochs=1, cur_shard=shard, shard_count=2) as batches:
            for batch in batches:
                assert batch["half"].dtype == torch.float64
                assert torch.equal(batch["half"], batch["id"] / 2)
                assert torch.equal(batch["pair"], torch.stack([batch["id"], -batch["id"]], 1))
                seen += batch["id"].tolist()
    assert Counter(seen) == Counter(range(101))
    with converter.make_tf_dataset(8, prefetch=1, num_epochs=1, shuffling_queue_capacity=50) as dataset:
        named = [(int(row), *pair) for batch in dataset for row, pair in zip(batch.id, batch.pair.numpy(), strict=True)]
    with converter.make_tf_dataset() as dataset:
        assert [len(batch.half) for batch in dataset.take(7)] == [32] * 7
    assert sorted(named) == [(row, row, -row) for row in range(101)]
    # A copy that a rank had does not take the files with it; the converter does.
    del sent, batches
    gc.collect()
    assert list(tmp_path.iterdir())
    converter.delete()
    assert not list(tmp_path.iterdir())


def test_types_are_cast_only_when_asked_and_nothing_stays(spark: SparkSession, tmp_path: Path) -> None:
    spark.conf.set(CACHE_SETTINGS[0], str(tmp_path))
    frame = spark.createDataFrame(
        [(1.5, Vectors.dense(1.0, 2.0), [0.5]), (2.5, Vectors.sparse(2, {1: 4.0}), [1.5])], ["x", "vector", "list"]
    )
    converter = make_spark_converter(frame, dtype="float32", compression_codec="snappy")
    with converter.make_torch_dataloader(2, num_epochs=1, shuffle_row_groups=False) as batches:
        (batch,) = batches
    assert {name: str(tensor.dtype) for name, tensor in batch.items()} == dict.fromkeys(batch, "torch.float32")
    assert sorted(batch["vector"].tolist()) == [[0.0, 4.0], [1.0, 2.0]]
    del converter
    gc.collect()
    assert not list(tmp_path.iterdir())
    with pytest.raises(DataError, match="there are no rows"):
        make_spark_converter(frame.where("x < 0"))
    assert not list(tmp_path.iterdir())
    for wrong in ({"dtype": "float16"}, {"compression_codec": "rar"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            make_spark_converter(frame, **wrong)  # type: ignore[arg-type]
