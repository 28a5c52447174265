"""A DataFrame as Parquet that ranks read, by Petastorm's names."""

import gc
import itertools
import logging
import os
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")


pytest.importorskip("pyspark")

pytest.importorskip("tensorflow")

import numpy as np
import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType

from farandole.compat import petastorm
from farandole.data import ParquetSource, make_batch_reader, make_reader
from farandole.data.unischema.codecs import CompressedImageCodec, NdarrayCodec, ScalarCodec
from farandole.data.unischema.schema import Unischema, UnischemaField, dict_to_spark_row
from farandole.errors import ConfigError, DataError, NotInitializedError, PicklingError
from farandole.spark import HorovodRunner, run
from farandole.spark.rows.converter import CACHE_SETTINGS, SparkDatasetConverter, make_spark_converter
from farandole.spark.rows.petastorm_dataset import get_schema_from_dataset_url, materialize_dataset
from helpers.by_value import sent_by_value

pytestmark = [pytest.mark.spark, pytest.mark.slow]

by_value = sent_by_value(__name__)


@pytest.fixture(autouse=True)
def without_folder(spark: SparkSession) -> Iterator[None]:
    """The session's other tests write no files either."""
    yield
    for name in CACHE_SETTINGS:
        spark.conf.unset(name)


def test_files_that_are_there_are_read_by_petastorms_function(spark: SparkSession, tmp_path: Path) -> None:
    """As they are: their doubles stay doubles."""
    files = str(tmp_path / "files")
    spark.range(3).selectExpr("id", "id / 2 AS half").coalesce(1).write.parquet(files)
    converter = petastorm.make_spark_converter(files)
    with converter.make_torch_dataloader(3, num_epochs=1) as batches:
        (batch,) = batches
    assert batch["half"].dtype == torch.float64
    assert dict(zip(batch["id"].tolist(), batch["half"].tolist(), strict=True)) == {0: 0.0, 1: 0.5, 2: 1.0}


def test_a_loader_stays_open_when_its_context_is_dropped(spark: SparkSession, tmp_path: Path) -> None:
    files = str(tmp_path / "files")
    spark.range(3).coalesce(1).write.parquet(files)
    converter = petastorm.make_spark_converter(files)
    with converter.make_torch_dataloader(3, num_epochs=1).__enter__() as batches:
        assert [sorted(batch["id"].tolist()) for batch in batches] == [[0, 1, 2]]


def test_a_dataframe_is_read_by_several_ranks_exactly_once(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.range(101).selectExpr("id", "id / 2 AS half", "array(id, -id) AS pair").repartition(3)
    spark.conf.set(CACHE_SETTINGS[1], tmp_path.as_uri())  # the name that programs have
    converter = make_spark_converter(frame)
    assert len(converter) == 101
    assert len(converter.file_urls) == 3
    with make_batch_reader(converter.file_urls, ["id"]) as reader:
        assert sorted(row for batch in reader for row in batch.id.tolist()) == list(range(101))
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


def test_types_are_cast_when_asked_and_by_petastorms_name_and_nothing_stays(
    spark: SparkSession, tmp_path: Path
) -> None:
    spark.conf.set(CACHE_SETTINGS[0], str(tmp_path))
    frame = spark.createDataFrame(
        [(1.5, Vectors.dense(1.0, 2.0), [0.5]), (2.5, Vectors.sparse(2, {1: 4.0}), [1.5])], ["x", "vector", "list"]
    )
    for make, asked, kind in (
        (make_spark_converter, {"dtype": "float32", "compression_codec": "snappy"}, torch.float32),
        (petastorm.make_spark_converter, {}, torch.float32),
        (make_spark_converter, {}, torch.float64),
    ):
        converter = make(frame, **asked)
        with converter.make_torch_dataloader(2, num_epochs=1, shuffle_row_groups=False) as batches:
            (batch,) = batches
        assert {name: tensor.dtype for name, tensor in batch.items()} == dict.fromkeys(frame.columns, kind)
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


def test_timestamps_are_microseconds_with_and_without_a_folder(spark: SparkSession, tmp_path: Path) -> None:
    setting = "spark.sql.parquet.outputTimestampType"
    spark.conf.set(setting, "INT96")
    try:
        frame = spark.sql("SELECT TIMESTAMP '2021-03-01 00:00:00.000007 UTC' AS at, array(TIMESTAMP_SECONDS(1)) AS all")
        found = []
        for folder in (None, tmp_path.as_uri()):
            if folder is not None:
                spark.conf.set(CACHE_SETTINGS[0], folder)
            with make_spark_converter(frame).make_torch_dataloader(1, num_epochs=1) as batches:
                found += [(int(batch["at"]), batch["all"].tolist()) for batch in batches]
        assert spark.conf.get(setting) == "INT96"
    finally:
        spark.conf.unset(setting)
    assert found == [(1614556800_000_007, [[1_000_000]])] * 2


def read_both(train: SparkDatasetConverter, val: SparkDatasetConverter, tensorflow: bool) -> list[tuple[Any, ...]]:
    """What every rank runs: how many rows it learns of, and all ranks' rows of two epochs and of one."""
    import farandole.torch as hvd

    with pytest.raises(NotInitializedError), train.make_torch_dataloader(cur_shard=0, shard_count=2):
        pass
    hvd.init()
    place = {"cur_shard": hvd.rank(), "shard_count": hvd.size()}
    counted = len(val)  # before anybody has looked at them: all ranks together
    for wrong in ({}, {"cur_shard": 1 - hvd.rank(), "shard_count": 2}, {"cur_shard": 0, "shard_count": 1}):
        with pytest.raises(ConfigError, match="has no rows but its own"), train.make_torch_dataloader(**wrong):
            pass
    with (
        train.make_torch_dataloader(8, num_epochs=2, **place) as batches,
        val.make_torch_dataloader(3, num_epochs=1, schema_fields=["x", "list"], **place) as others,
    ):
        read = [row for batch in batches for row in zip(*(each.tolist() for each in batch.values()), strict=True)]
        more = [row for batch in others for row in zip(*(each.tolist() for each in batch.values()), strict=True)]
    if tensorflow:
        with val.make_tf_dataset(3, num_epochs=1, filters=[("x", ">", 2.0)], **place) as dataset:
            for batch in dataset:
                more += zip(batch.x.numpy().tolist(), batch.word.numpy().tolist(), strict=True)
    return [(counted, len(train)), *(list(itertools.chain(*hvd.allgather_object(each))) for each in (read, more))]


def test_without_a_folder_the_job_brings_the_rows(spark: SparkSession) -> None:
    numbers = spark.range(101).selectExpr("id", "id / 2 AS half").repartition(2, "id")  # of which one rank has more
    texts = spark.createDataFrame([(x + 0.5, [1.0 * x, 2.0], f"word {x}") for x in range(5)], ["x", "list", "word"])
    train, val = make_spark_converter(numbers), make_spark_converter(texts, dtype="float32")
    expected = Counter([(row, row / 2) for row in range(101)] * 2)

    def main(tensorflow: bool) -> list[tuple[Any, ...]]:
        return read_both(train, val, tensorflow)

    for np_ in (2, -2):
        (counted, known), read, more = HorovodRunner(np=np_).run(main, tensorflow=np_ > 0)
        assert (counted, known) == (5, 101)
        assert Counter(read) == expected
        assert sorted(each for each in more if isinstance(each[1], list)) == [(x + 0.5, [x, 2.0]) for x in range(5)]
        words = sorted(each for each in more if isinstance(each[1], bytes))
        assert words == [(x + 0.5, b"word %d" % x) for x in range(2, 5) if np_ > 0]


def held_files(folder: Path) -> list[str]:
    """The files in `folder`, though without a name, that this process has open."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [target for target in links if target.startswith(f"{folder}/") and target.endswith(" (deleted)")]


def test_without_a_folder_the_driver_has_all_rows(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    converter = make_spark_converter(spark.range(50).selectExpr("id", "id / 2 AS half"), dtype="float32")
    assert len(converter) == 50
    assert converter.cache_dir_url is None and converter.file_urls == []
    for _ in range(2):
        with converter.make_torch_dataloader(8, num_epochs=1) as batches:
            seen = [row for batch in batches for row in batch["id"].tolist()]
        assert sorted(seen) == list(range(50))
    with converter.make_tf_dataset(8, num_epochs=1, cur_shard=0, shard_count=1) as dataset:
        assert sum(float(batch.half.numpy().sum()) for batch in dataset) == sum(range(50)) / 2
    with pytest.raises(ConfigError, match="rank 0 of 1 has no rows but its own"):
        converter.make_torch_dataloader(8, cur_shard=0, shard_count=2).__enter__()

    def one() -> int:
        with converter.make_torch_dataloader(8, num_epochs=None) as batches:
            assert len(next(iter(batches))["id"]) == 8
        return len(converter)

    assert HorovodRunner(np=-1).run(one) == 50
    assert len(held_files(tmp_path)) == 1
    converter.delete()
    assert held_files(tmp_path) == []
    with pytest.raises(PicklingError, match=r"closure variable 'converter'.*was deleted"):
        run(one, num_proc=1)
    with caplog.at_level(logging.WARNING):
        empty = make_spark_converter(spark.range(0), compression_codec="zstd")
    assert "compression_codec and parquet_row_group_size_bytes are ignored" in caplog.text
    with pytest.raises(DataError, match="there are no rows"):
        empty.make_torch_dataloader().__enter__()
    with pytest.raises(DataError, match="column 'i': Spark cannot convert interval to Arrow"):
        make_spark_converter(spark.range(3).selectExpr("make_interval(1) AS i"))


def test_output_of_a_stream_has_the_rows_that_spark_reads(spark: SparkSession, tmp_path: Path) -> None:
    given, out = tmp_path / "given", tmp_path / "a b" / "out"
    for first in range(0, 50, 10):
        frame = spark.range(first, first + 10).selectExpr("id", "concat('day ', id % 2) AS day").coalesce(1)
        frame.write.mode("append").parquet(str(given))
    spark.conf.set("spark.sql.streaming.fileSink.log.compactInterval", 3)
    try:
        stream = spark.readStream.schema("id bigint, day string").option("maxFilesPerTrigger", 1).parquet(str(given))
        sink = stream.writeStream.format("parquet").partitionBy("day").option("checkpointLocation", f"{tmp_path}/kept")
        query = sink.trigger(availableNow=True).start(str(out))
        assert query.awaitTermination(60)
    finally:
        spark.conf.unset("spark.sql.streaming.fileSink.log.compactInterval")
    logs = {file.name for file in (out / "_spark_metadata").iterdir()}
    assert "2.compact" in logs, logs
    some = next(out.glob("day=day 0/*.parquet"))
    (some.parent / "part-of-a-failed-batch.parquet").write_bytes(some.read_bytes())

    source = ParquetSource(str(out))
    assert source.version == 4
    tables = [source.read(group, ["id", "day"]).to_pylist() for group in source.row_groups]
    found = sorted((row["id"], row["day"]) for table in tables for row in table)
    assert found == sorted((row["id"], row["day"]) for row in spark.read.parquet(str(out)).collect())
    assert [number for number, _ in found] == list(range(50))
    with make_batch_reader(f"file://{out}", num_epochs=1, shuffle_row_groups=False) as reader:
        assert sorted(number for batch in reader for number in batch.id.tolist()) == list(range(50))


def test_a_data_set_with_a_unischema_is_written_and_read(spark: SparkSession, tmp_path: Path) -> None:
    fields = [
        UnischemaField("id", np.int32, (), ScalarCodec(IntegerType())),
        UnischemaField("image", np.uint8, (4, 5, 3), CompressedImageCodec("png")),
        UnischemaField("list", np.int64, (None,), NdarrayCodec(), True),
    ]
    schema, url = Unischema("Rows", fields), (tmp_path / "rows").as_uri()

    def row(number: int) -> dict[str, Any]:
        image = np.full((4, 5, 3), number, np.uint8)
        return {"id": number, "image": image, "list": np.arange(number) if number % 3 else None}

    rows = [dict_to_spark_row(schema, row(number)) for number in range(10)]
    with materialize_dataset(spark, url, schema, 1):
        assert spark.conf.get("parquet.block.size") == str(1 << 20)
        spark.createDataFrame(rows, schema.as_spark_schema()).coalesce(2).write.parquet(url)
    assert spark.conf.get("parquet.block.size", None) is None
    assert [*get_schema_from_dataset_url(url).fields] == ["id", "image", "list"]
    with make_reader(url) as reader:
        for found in reader:
            expected = row(int(found.id))
            assert np.array_equal(found.image, expected["image"])
            assert (found.list is None) == (expected["list"] is None)
            assert found.list is None or found.list.tolist() == expected["list"].tolist()
    with pytest.raises(ZeroDivisionError), materialize_dataset(spark, url, schema, 2):
        raise ZeroDivisionError
    assert spark.conf.get("parquet.block.size", None) is None
