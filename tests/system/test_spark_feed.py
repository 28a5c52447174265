"""Training on a DataFrame as it is: its rows come to the ranks in the job itself, and no trace of them stays."""

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

pytest.importorskip("pyspark")

from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from farandole.data import FeedLoader, FieldOptions, Loader, ParquetSource, Ragged, Reading, ShardSource, SparseRows
from farandole.errors import ConfigError, DataError, RankFailed
from farandole.spark import HorovodRunner, run
from farandole.spark.rows.exchange.batches import counted_by_rows
from farandole.spark.rows.exchange.shuffle import keys_of_partitions

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def by_value() -> Iterator[None]:
    """Send this module's functions whole: ranks cannot import it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def read_epochs(rows: ShardSource, epochs: int) -> tuple[int, list[list[int]]]:
    """What every rank runs: the numbers of its rows, by epoch."""
    import farandole.numpy as hvd

    hvd.init()
    loader = FeedLoader(
        rows, batch_size=3, policy="join", rank=hvd.rank(), size=hvd.size(), gather=hvd.allgather_object
    )
    return len(loader), [[int(row) for batch in loader for row in batch["id"]] for _ in range(epochs)]  # type: ignore[union-attr]


def frames(spark: SparkSession) -> dict[str, DataFrame]:
    rows = spark.range(0, 101, 1, 5)
    return {
        "more partitions than ranks": rows,
        "one rank has all": rows.repartition(2, F.lit(0)),
        "fewer rows than ranks": rows.where("id = 100"),
    }


def test_every_row_once_per_epoch_over_all_ranks(spark: SparkSession) -> None:
    for name, frame in frames(spark).items():
        values = run(read_epochs, (frame,), {"epochs": 2}, num_proc=2)
        assert len({steps for steps, _ in values}) == 1, name
        expected = Counter(row["id"] for row in frame.collect())
        for epoch in range(2):
            assert Counter(row for _, seen in values for row in seen[epoch]) == expected, name


def test_a_try_on_this_machine_reads_the_same_rows(spark: SparkSession) -> None:
    def main(data: ShardSource, epochs: int) -> list[list[int]]:
        import farandole.numpy as hvd

        _, seen = read_epochs(data, epochs)
        return [[row for part in parts for row in part] for parts in zip(*hvd.allgather_object(seen), strict=True)]

    frame = spark.range(0, 50, 1, 3)
    for np_ in (-1, -2):
        seen = HorovodRunner(np=np_).run(main, data=frame, epochs=2)
        assert [sorted(each) for each in seen] == [list(range(50))] * 2
        assert seen[0] != seen[1]


TYPES = """
    row                                                     AS row,
    CAST(row AS tinyint)                                    AS tiny,
    CAST(row AS smallint)                                   AS small,
    CAST(row AS int)                                        AS number,
    CAST(row / 3 AS float)                                  AS single,
    row / 7                                                 AS twice,
    row % 3 = 0                                             AS flag,
    CAST(row / 4 AS decimal(12, 3))                         AS price,
    concat('row ', row)                                     AS text,
    CAST(concat('bytes ', row) AS binary)                   AS bytes,
    date_add(DATE'2024-01-01', CAST(row AS int))            AS day,
    TIMESTAMP'2024-01-01 00:00:00' + make_dt_interval(0, row)  AS at,
    CAST(TIMESTAMP'2024-01-01 00:00:00' + make_dt_interval(0, row) AS timestamp_ntz) AS local,
    IF(row % 5 = 0, NULL, row)                              AS maybe,
    IF(row % 5 = 0, NULL, concat('row ', row))              AS word,
    array(row / 2, row / 3)                                 AS pair,
    array(array(row, 1), array(2, row))                     AS matrix,
    transform(sequence(0, row % 4), x -> CAST(x AS float))  AS some
"""
NULLS = {"maybe": -1, "word": "none"}


def vectors(spark: SparkSession) -> DataFrame:
    dense = [(row, Vectors.dense(float(row), 1.0, 2.0)) for row in range(30)]
    mixed = [
        (row, Vectors.sparse(3, {row % 3: float(row)}) if row % 2 else Vectors.dense(0.0, 0.0, 1.0))
        for row in range(30)
    ]
    return spark.createDataFrame(dense, ["row", "dense"]).join(
        spark.createDataFrame(mixed, ["row", "sparse"]), on="row"
    )


def every_type(loader: FeedLoader | Loader) -> dict[str, Any]:
    """All rows of all columns, in the order of `row`, as something that can be compared and sent."""
    parts: dict[str, list[Any]] = {}
    for batch in loader:
        for name, values in batch.items():
            if isinstance(values, Ragged):
                cells: list[Any] = [row.tolist() for row in values.rows()]
            else:
                cells = list(values.dense() if isinstance(values, SparseRows) else values)
            parts.setdefault(name, []).extend(cells)
    order = np.argsort(parts["row"])
    return {name: [cells[place] for place in order] for name, cells in parts.items()} | {"kinds": loader.kinds}


def test_every_type_comes_as_it_does_from_parquet(spark: SparkSession, tmp_path: Path) -> None:
    frame = vectors(spark).join(spark.range(30).withColumnRenamed("id", "row").selectExpr(*_expressions()), on="row")
    frame.write.parquet(str(tmp_path / "rows"))
    reading = Reading(fields=FieldOptions(nulls=NULLS))
    parquet = ParquetSource(str(tmp_path / "rows"))
    expected = every_type(Loader(parquet, batch_size=4, policy="join", reading=reading))

    def main(rows: ShardSource) -> dict[str, Any]:
        return every_type(FeedLoader(rows, batch_size=4, policy="join", reading=reading))

    (found,) = run(main, (frame,), num_proc=1)
    kinds, parquets = found.pop("kinds"), expected.pop("kinds")
    # Spark writes times to Parquet in nanoseconds, and hands over microseconds.
    assert {name: kind for name, kind in kinds.items() if parquets[name] != kind} == {"at": "timestamp[us, tz=UTC]"}
    assert list(found) == list(expected)
    for name, cells in expected.items():
        assert len(cells) == 30
        assert type(found[name][0]) is type(cells[0]), name
        if isinstance(cells[0], np.ndarray):
            assert found[name][0].dtype == cells[0].dtype, name
        assert np.array_equal(found[name], cells) if name != "some" else found[name] == cells, name
    assert found["maybe"][:2] == [-1, 1]
    assert found["pair"][3].tolist() == [1.5, 1.0]


def _expressions() -> list[str]:
    return [each.strip() for each in TYPES.strip().split(",\n")]


def held_files(scratch: Path) -> list[str]:
    """Files of rows that some process still has open; they have no name by which to look for them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            for link in os.listdir(process / "fd"):
                with suppress(OSError):  # it has just been closed
                    found.append(os.readlink(process / "fd" / link))
    return [each for each in found if each.startswith(f"{scratch}/") and each.endswith(" (deleted)")]


@pytest.mark.parametrize("end", ["success", "failure", "kill -9"])
def test_nothing_of_the_rows_stays(spark: SparkSession, scratch: Path, end: str) -> None:
    def main(rows: ShardSource) -> list[str]:
        import farandole.numpy as hvd

        assert rows.row_groups
        hvd.init()
        held, written = held_files(scratch), [path.name for path in scratch.rglob("*") if "arrow" in path.name]
        assert len(held) >= 2, held  # of which each rank and its task hold one
        assert not written, written
        hvd.allgather_object("seen")
        if end == "failure":
            raise KeyError("in training")
        if end == "kill -9" and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.barrier()
        return written

    frame = spark.range(0, 10_000, 1, 2)
    if end == "success":
        assert run(main, (frame,), num_proc=2) == [[], []]
    else:
        with pytest.raises(RankFailed, match="in training" if end == "failure" else "SIGKILL"):
            run(main, (frame,), num_proc=2)
    assert held_files(scratch) == []


def refuse(rows: ShardSource) -> None:
    import farandole.numpy as hvd

    hvd.init()
    try:
        FeedLoader(rows, batch_size=3, policy="join", rank=hvd.rank(), size=2, gather=hvd.allgather_object)
    except DataError as error:
        texts = hvd.allgather_object(str(error))
        assert texts[0] == texts[1], texts
        raise


def test_rows_that_cannot_be_trained_on_are_refused(spark: SparkSession) -> None:
    rows = spark.range(10)
    unknown_none = spark.createDataFrame([(1,), (2,)], "id long").mapInArrow(lambda batches: iter(()), "id long")
    with pytest.raises(RankFailed, match="no rows on any of 2 ranks"):
        run(refuse, (unknown_none,), num_proc=2)
    with pytest.raises(RankFailed, match="no rows on any of 2 ranks"):
        run(refuse, (rows.limit(0),), num_proc=2)
    with pytest.raises(RankFailed, match=r"no tensor holds any column: s \(struct") as caught:
        run(refuse, (rows.selectExpr("struct(id) AS s"),), num_proc=2)
    assert isinstance(caught.value.__cause__, DataError)
    with pytest.raises(ConfigError, match="dataframe: 65 are in the call, 64 are the most"):
        run(print, [spark.range(1) for _ in range(65)], num_proc=2)
    with pytest.raises(DataError, match="column 'i': Spark cannot convert interval to Arrow"):
        run(refuse, (rows.selectExpr("make_interval(1) AS i"),), num_proc=2)


def ids_of(rows: ShardSource) -> list[int]:
    return [row for group in rows.row_groups for row in rows.read(group, ["id"])["id"].to_pylist()]


@pytest.mark.parametrize("num_proc", [2, -2])
def test_a_stream_is_refused_with_the_way_to_read_it(spark: SparkSession, num_proc: int) -> None:
    stream = spark.readStream.format("rate").load()
    with pytest.raises(DataError, match=r"streaming DataFrame cannot be fed.*Growing\(folder, format='stream'\)"):
        HorovodRunner(np=num_proc).run(lambda rows: None, rows=stream)


def test_several_dataframes_reach_the_ranks_of_one_job(spark: SparkSession) -> None:
    def main(train: ShardSource, arranged: ShardSource, *, again: ShardSource) -> list[list[int]]:
        assert train.schema.names == again.schema.names == ["id", "text"]
        assert arranged.schema.names == ["id"]
        return [ids_of(train), ids_of(arranged), ids_of(again)]

    train = spark.range(0, 101, 1, 5).withColumn("text", F.col("id").cast("string"))
    arranged = spark.range(0, 10).repartitionByRange(2, "id")
    first, second = run(main, (train, arranged), {"again": train}, num_proc=2)
    assert sorted(first[0] + second[0]) == list(range(101))
    assert abs(len(first[0]) - len(second[0])) <= 5  # of five partitions, an odd row each
    assert (sorted(first[1]), sorted(second[1])) == (list(range(5)), list(range(5, 10)))
    assert [first[2], second[2]] == [first[0], second[0]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_shares_go_where_spark_takes_their_keys(spark: SparkSession, ranks: int) -> None:
    keys = spark.createDataFrame([(key,) for key in keys_of_partitions(ranks)], "key int")
    found = keys.repartition(ranks, "key").select(F.spark_partition_id(), "key").collect()
    assert sorted(map(tuple, found)) == list(enumerate(keys_of_partitions(ranks)))


BATCH_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"


def test_spark_measures_batches_only_where_their_rows_may_be_large(spark: SparkSession) -> None:
    numbers, texts = spark.range(10), spark.range(10).select(F.lit("text"))
    assert spark.conf.get(BATCH_BYTES, None) is None
    with counted_by_rows([numbers]) as planned:
        assert spark.conf.get(BATCH_BYTES) == str(2**31 - 1)
        planned()
        assert spark.conf.get(BATCH_BYTES, None) is None
    with counted_by_rows([numbers, texts]):
        assert spark.conf.get(BATCH_BYTES, None) is None
    spark.conf.set(BATCH_BYTES, "1m")
    try:
        with counted_by_rows([numbers]):
            assert spark.conf.get(BATCH_BYTES) == "1m"
    finally:
        spark.conf.unset(BATCH_BYTES)


def read_as_it_arrives(folder: str) -> list[tuple[list[int], int, int]]:
    """Run the job on all ranks; return each rank's rows, steps and generations."""
    import farandole.numpy as hvd
    from farandole.data import Growing, GrowingLoader

    hvd.init()
    growing = Growing(folder, format="stream", until="_END", poll=0.1, patience=60)
    loader = GrowingLoader(growing, batch_size=4, rank=hvd.rank(), size=hvd.size(), gather=hvd.allgather_object)
    batches = [batch["id"].tolist() for batch in loader]  # type: ignore[union-attr]
    return hvd.allgather_object(([row for batch in batches for row in batch], len(batches), loader.epoch))


def test_a_structured_stream_feeds_ranks_while_it_runs(spark: SparkSession, tmp_path: Path) -> None:
    spark.range(60).repartition(3).write.parquet(str(tmp_path / "in"))
    out = tmp_path / "out"
    stream = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
    writer = stream.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(availableNow=True).start(str(out))

    def end() -> None:
        query.awaitTermination(60)
        (out / "_END").touch()

    ending = threading.Thread(target=end)
    ending.start()
    told = HorovodRunner(np=-2).run(read_as_it_arrives, folder=str(out))
    ending.join()
    assert sorted(row for rows, _, _ in told for row in rows) == list(range(60))
    (_, steps, generations), other = told
    assert other[1:] == (steps, generations)
    assert steps >= 8
