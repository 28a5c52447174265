"""Ranks on a Spark Connect session: their client is this process, Spark's driver is another one."""

import importlib.util
import os
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
pytest.importorskip("grpc_status", reason="PySpark's client of Spark Connect is not installed")

import pyarrow as pa
from pyspark.sql import SparkSession

from farandole.data import FeedLoader, ShardSource
from farandole.errors import ConfigError, DataError, RankFailed, SlotsError
from farandole.estimators.folders import CHUNK, folder_of
from farandole.spark import HorovodRunner, log_to_driver, run
from farandole.spark.jobs import connect
from helpers.marked import wait_until_gone
from helpers.spark_faults import interrupt_job, restart_after_a_kill
from helpers.spark_servers import connect_server
from helpers.spark_session import end_local_session

pytestmark = [pytest.mark.spark, pytest.mark.slow]

needs_native = pytest.mark.skipif(importlib.util.find_spec("farandole._native") is None, reason="no native core")

HANGS = 100


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    end_local_session()
    folder = tmp_path_factory.mktemp("connect")
    events = folder / "events"
    events.mkdir()
    settings = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
    }
    with connect_server(folder, settings) as url, pytest.MonkeyPatch.context() as patch:
        # PySpark sets them for good; its functions make columns of the one kind or of the other by them.
        for variable in ("SPARK_CONNECT_MODE_ENABLED", "SPARK_REMOTE", "PYSPARK_REMOTE_INIT_CONF_LEN"):
            patch.delenv(variable, raising=False)
        patch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
        session = SparkSession.builder.remote(url).create()
        try:
            yield session
        finally:
            session.stop()


@needs_native
def test_ranks_on_all_slots_average_and_show_their_output(
    spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(factor: float) -> float:
        import numpy as np

        import farandole.numpy as hvd

        hvd.init()
        print(f"heard from {hvd.rank()} of {hvd.size()}")
        log_to_driver("and sent")
        return float(hvd.allreduce(np.full(100_000, factor * hvd.rank()), name="gradient")[-1])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert HorovodRunner(np=0, driver_log_verbosity="all").run(main, factor=3.0) == 1.5
    shown = capsys.readouterr().out
    for rank in range(2):
        assert f"[{rank}] heard from {rank} of 2" in shown
        assert f"[{rank}] and sent" in shown


def test_too_many_ranks_are_refused_at_once(spark: SparkSession) -> None:
    started = time.monotonic()
    with pytest.raises(SlotsError, match=r"3 ranks need 3 slots, but Spark \(local\[2\]\) has 2"):
        HorovodRunner(np=3).run(print)
    assert time.monotonic() - started < 20


def test_a_failing_rank_is_named_with_its_exception(spark: SparkSession, mark: str) -> None:
    def main() -> None:
        if os.environ["FARANDOLE_RANK"] == "1":
            raise KeyError("the column that is not there")
        threading.Event().wait(HANGS)

    with pytest.raises(RankFailed, match="the column that is not there") as caught:
        run(main, env={"MARK": mark})
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)
    assert wait_until_gone(mark, 20) == []


def test_ctrl_c_ends_the_ranks(spark: SparkSession, mark: str) -> None:
    interrupt_job(spark, mark)
    assert spark.getTags() == set()


def test_a_killed_rank_is_started_again_with_all_others(spark: SparkSession, tmp_path: Path, mark: str) -> None:
    restart_after_a_kill(spark, tmp_path, mark)


def test_each_row_of_dataframes_is_fed_once_and_partitions_stay(spark: SparkSession) -> None:
    def main(dealt: ShardSource, arranged: ShardSource) -> list[list[int]]:
        def rows(source: ShardSource) -> list[int]:
            made = FeedLoader(source, batch_size=64, policy="join", rank=0, size=1, gather=lambda mine: [mine])
            return [int(number) for batch in made for number in batch["id"]]

        return [rows(dealt), rows(arranged)]

    half = spark.range(0, 1000, 1, 4).repartition(2, "id")
    expected = [sorted(row.id for row in half.where(f"spark_partition_id() = {rank}").collect()) for rank in range(2)]
    values = run(main, (spark.range(0, 1000, 1, 3), half), num_proc=2, verbose=0)
    assert sorted(values[0][0] + values[1][0]) == list(range(1000))
    assert [sorted(value[1]) for value in values] == expected


@needs_native
@pytest.mark.usefixtures("warm_torch")
def test_an_estimator_fits_and_its_model_transforms(spark: SparkSession) -> None:
    import torch
    from torch.nn.functional import mse_loss

    from farandole.estimators.torch import TorchEstimator

    model = torch.nn.Linear(2, 1)
    rows = [([float(i % 7), float(i % 3)], i % 7 + 2.0 * (i % 3)) for i in range(42)]
    data = spark.createDataFrame(rows, "x array<double>, y double")
    fitted = TorchEstimator(
        num_proc=2, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.02), loss=mse_loss,
        feature_cols=["x"], label_cols=["y"], batch_size=7, epochs=4, random_seed=9, verbose=0,
    ).fit(data)  # fmt: skip
    assert fitted.history[-1]["loss"] < fitted.history[0]["loss"]
    weight, bias = (parameter.detach().numpy().ravel() for parameter in fitted.getModel().parameters())
    for row in fitted.transform(data).collect():
        assert row["y__output"] == pytest.approx(weight @ row["x"] + bias[0], rel=1e-5)


@needs_native
@pytest.mark.usefixtures("warm_torch")
def test_an_error_of_a_fit_is_raised_without_another_attempt(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    torch = pytest.importorskip("torch")
    from farandole.estimators.torch import TorchEstimator

    def failing(output: object, label: object) -> None:
        raise ArithmeticError("no such loss")

    model = torch.nn.Linear(1, 1)
    estimator = TorchEstimator(
        num_proc=2, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), verbose=0, input_shapes=[[1]],
        loss=torch.nn.functional.mse_loss, feature_cols=["x"], label_cols=["y"],
    )  # fmt: skip
    with pytest.raises(DataError, match="column 'x': 1 of 3 rows are null"):
        estimator.fit(spark.createDataFrame([(1.0, 1.0), (None, 1.0), (2.0, 1.0)], "x double, y double"))
    with pytest.raises(RankFailed, match="ArithmeticError: no such loss"):
        estimator.copy({estimator.loss: failing}).fit(spark.createDataFrame([(1.0, 1.0)] * 4, "x double, y double"))
    assert [each for each in caplog.messages if "another Spark job follows" in each] == []


@needs_native
@pytest.mark.usefixtures("warm_torch")
def test_estimators_models_and_pipelines_are_saved_and_loaded(spark: SparkSession, tmp_path: Path) -> None:
    import torch
    from pyspark.ml import PipelineModel

    from farandole.estimators.torch import TorchEstimator, TorchModel

    net = torch.nn.Sequential(torch.nn.Linear(1, 900), torch.nn.Linear(900, 900), torch.nn.Linear(900, 1))  # 3 MiB
    model = TorchModel(model=net, feature_columns=["x"], label_columns=["y"], outputs=[("float32", [1])])
    data = spark.createDataFrame([([float(number)],) for number in range(3)], "x array<float>")
    want = [row["y__output"] for row in model.transform(data).collect()]
    estimator = TorchEstimator(
        model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.5), feature_cols=["x"], epochs=3
    )
    for _ in range(2):
        model.write().overwrite().save(str(tmp_path / "model"))
    estimator.save(str(tmp_path / "estimator"))
    PipelineModel(stages=[model]).write().overwrite().save(str(tmp_path / "pipeline"))

    loaded = TorchModel.load(str(tmp_path / "model"))
    assert loaded.uid == model.uid
    assert [row["y__output"] for row in loaded.transform(data).collect()] == want
    again = TorchEstimator.load(str(tmp_path / "estimator"))
    assert (again.getEpochs(), again.getFeatureCols(), again.getOptimizer().param_groups[0]["lr"]) == (3, ["x"], 0.5)
    stage = PipelineModel.load(str(tmp_path / "pipeline")).stages[0]
    assert [row["y__output"] for row in stage.transform(data).collect()] == want
    with pytest.raises(ConfigError, match="load it with that class"):
        TorchEstimator.load(str(tmp_path / "model"))


def test_files_of_classic_sessions_are_read_in_pieces(spark: SparkSession, tmp_path: Path) -> None:
    content = os.urandom(2 * CHUNK + 7)
    (tmp_path / "model.pt").write_bytes(content)
    folder = folder_of(spark, str(tmp_path))
    assert folder.read("model.pt") == content
    with pytest.raises(ConfigError, match=r"has no file 'weights.h5'; it was not saved by farandole"):
        folder.read("weights.h5")


@pytest.mark.parametrize("size", [0, 3 << 20], ids=["small call", "large call"])
def test_no_file_of_the_server_holds_the_secret(spark: SparkSession, size: int) -> None:
    def main(ballast: bytes, folder: str) -> tuple[int, list[str]]:
        secret = bytes.fromhex(os.environ["FARANDOLE_SECRET"])
        held = {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
        return len(held), [str(path) for path, data in held.items() if secret in data or secret.hex().encode() in data]

    folder = spark.conf.get("spark.local.dir")
    ((files, found),) = run(main, (os.urandom(size), folder), num_proc=1)
    assert files > 0
    assert found == []


def test_tasks_that_cannot_reach_this_machine_are_told_of(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "join_address", lambda host, port: f"{host}:1")  # nothing listens there
    with pytest.raises(
        ConfigError, match=r"spark: is a Spark Connect session whose tasks reach this machine at none of 127"
    ):
        run(print)


def test_without_executors_the_search_for_an_address_ends(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def linger(addresses: object, secret: object, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        time.sleep(3)
        yield from ()

    with (
        monkeypatch.context() as patched,
        pytest.raises(ConfigError, match=r"start_timeout: no executor has tried .* for 0.05 s; look at the executors"),
    ):
        patched.setattr(connect, "_try_all", linger)  # a task that does its work may end sooner
        connect.reach(spark, ["127.0.0.1"], timedelta(seconds=0.05))
    assert not spark.getTags()
    assert connect.reach(spark, ["127.0.0.1"], timedelta(seconds=60)) == "127.0.0.1"
