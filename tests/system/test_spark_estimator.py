"""`TorchEstimator` and `TorchModel` on an embedded Spark, with real ranks."""

import dataclasses
import importlib.util
import io
import logging
import os
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("torch")
if importlib.util.find_spec("farandole._native") is None:
    pytest.skip("the native core is not built", allow_module_level=True)

import numpy as np
import torch
import torch.nn.functional as F
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import Vectors
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col
from torch import Tensor, nn

from farandole.errors import ConfigError, DataError, RankFailed, SlotsError
from farandole.estimators.folders import ConnectFolder
from farandole.estimators.functions import argmax, sigmoid, softmax
from farandole.estimators.store import FilesystemStore, Store
from farandole.estimators.torch import TorchEstimator, TorchModel
from farandole.estimators.trainers.checkpoint import Checkpoint
from helpers.programs import run, warm_spark
from helpers.spark_session import last_job

pytestmark = [pytest.mark.spark, pytest.mark.slow]

RATE = 2.0**-7


@pytest.fixture(scope="module", autouse=True)
def warm_torch() -> None:
    # The first optimizer makes torch set a variable of its compiler, for good.
    torch.optim.SGD(line().parameters())


@pytest.fixture
def store(tmp_path: Path) -> FilesystemStore:
    return Store.create(str(tmp_path / "store"))


def line() -> nn.Module:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.25)
    return model


def points(spark: SparkSession, count: int, *, partitions: int = 3) -> DataFrame:
    rows = [([float(i % 7), float(i % 3)], i / count, i) for i in range(count)]
    return spark.createDataFrame(rows, "x array<double>, y double, id bigint").repartition(partitions)


def estimator(model: nn.Module, **changes: object) -> TorchEstimator:
    settings: dict[str, object] = {
        "num_proc": 2,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=RATE),
        "loss": F.mse_loss,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "verbose": 0,
    }
    return TorchEstimator(**(settings | changes))  # type: ignore[arg-type]


class Logged:
    """A logger that keeps the values of the epochs."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []

    def log_epoch(self, record: Mapping[str, float]) -> None:
        self.records.append(dict(record))


@pytest.mark.parametrize(("num_proc", "count"), [(1, 11), (2, 11), (2, 3)])
def test_a_step_is_the_mean_over_all_rows_of_all_ranks(spark: SparkSession, num_proc: int, count: int) -> None:
    data = points(spark, count)
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE / num_proc)  # ranks multiply it by their number
    fitted = estimator(model, num_proc=num_proc, optimizer=optimizer, batch_size=1000, epochs=3).fit(data)
    # Gradient descent over all rows at once is what any number of ranks must come to.
    x, y = (np.array([row[name] for row in data.collect()]) for name in ("x", "y"))
    weight, bias = np.array([0.5, 0.5]), 0.25
    for _ in range(3):
        error = x @ weight + bias - y
        weight, bias = weight - RATE * 2 * x.T @ error / len(y), bias - RATE * 2 * error.mean()
    state = fitted.getModel().state_dict()
    np.testing.assert_allclose(state["weight"].numpy()[0], weight, rtol=1e-5)
    np.testing.assert_allclose(state["bias"].item(), bias, rtol=1e-5)
    assert [(record["epoch"], record["steps"]) for record in fitted.history] == [(1, 1), (2, 1), (3, 1)]
    assert model.state_dict()["weight"].eq(0.5).all(), "the user's own model must stay as it was"


def recorder(folder: Path) -> nn.Module:
    # Made in a function, so that it is pickled by value: ranks cannot import this file.
    class Recorder(nn.Module):
        """Learns nothing; leaves a line for each row that it is given."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(1))

        def forward(self, ids: Tensor) -> Tensor:
            if torch.is_inference_mode_enabled():  # the row that is tried before training
                return ids * 0 + self.scale
            kind = "train" if self.training else "val"
            with (folder / f"{kind}-{os.getpid()}").open("a") as out:
                out.writelines(f"{int(each)}\n" for each in ids)
            return ids * 0 + self.scale

    return Recorder()


def seen(folder: Path, kind: str) -> list[int]:
    return sorted(int(each) for path in folder.glob(f"{kind}-*") for each in path.read_text().split())


@pytest.mark.parametrize("batch_size", [1, 4])
def test_every_row_once_per_epoch(spark: SparkSession, tmp_path: Path, batch_size: int) -> None:
    data = points(spark, 23, partitions=5)
    model = recorder(tmp_path)
    settings = {"feature_cols": ["id"], "batch_size": batch_size, "epochs": 3, "validation": 0.3, "random_seed": 4}
    fitted = estimator(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), **settings).fit(data)
    train, val = seen(tmp_path, "train"), seen(tmp_path, "val")
    assert sorted(train + val) == sorted(3 * list(range(23)))
    assert 0 < len(val) < len(train)
    assert not set(train) & set(val)
    assert [record["epoch"] for record in fitted.history] == [1, 2, 3]
    assert all(record["val_loss"] > 0 for record in fitted.history)


def with_dropout() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))


def test_a_resumed_run_is_the_uninterrupted_one(spark: SparkSession, store: FilesystemStore) -> None:
    data = points(spark, 40)
    logged = {"straight": Logged(), "resumed": Logged()}

    def fit(run_id: str, epochs: int, seed: int = 9) -> TorchModel:
        model = with_dropout()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        settings = {"store": store, "run_id": run_id, "epochs": epochs, "batch_size": 4, "random_seed": seed}
        settings["loggers"] = [logged[run_id]]
        return estimator(model, optimizer=optimizer, validation=0.2, **settings).fit(data)

    straight = fit("straight", 3)
    for epochs in (1, 2, 3):
        resumed = fit("resumed", epochs)
        content = store.read(store.get_checkpoint_path("resumed"))
        assert content is not None
        saved = Checkpoint.load(content)
        assert (saved.kind, saved.epoch) == ("pytorch", epochs)
        assert saved.state is not None
        state = torch.load(io.BytesIO(saved.state), weights_only=True)
        assert [group["lr"] for group in state["optimizer"]["param_groups"]] == [0.01]
    for one, other in zip(straight.getModel().parameters(), resumed.getModel().parameters(), strict=True):
        assert torch.equal(one, other)
    losses = [[record["loss"] for record in model.history] for model in (straight, resumed)]
    assert losses[0] == losses[1]
    assert logged["straight"].records == straight.history
    assert logged["resumed"].records == resumed.history
    assert store.read(store.get_best_path("resumed")) is not None

    before = last_job(spark)["jobId"]
    again = fit("resumed", 3)
    assert last_job(spark)["jobId"] == before, "all epochs were finished: there is nothing to run"
    assert again.history == resumed.history
    with pytest.raises(ConfigError, match="random_seed: is 8, but resumed was started with 9"):
        fit("resumed", 3, seed=8)
    with pytest.raises(ConfigError, match=r"run_id: the checkpoint of 'resumed' in .* is of another model"):
        estimator(line(), store=store, run_id="resumed", random_seed=9).fit(data)

    store.write(store.get_checkpoint_path("resumed"), dataclasses.replace(saved, kind="keras").dump())
    with pytest.raises(ConfigError, match="run_id: 'resumed' is a run of a keras estimator; choose another name"):
        fit("resumed", 4)


def test_a_model_that_names_a_module_of_before_loads(spark: SparkSession, tmp_path: Path) -> None:
    with zipfile.ZipFile(Path(__file__).parents[1] / "data" / "saved" / "torch_model.zip") as files:
        files.extractall(tmp_path / "model")
    model = TorchModel.load(str(tmp_path / "model"))
    assert model.getModel().weight.shape == (1, 3)
    with pytest.raises(ConfigError, match=r"holds a farandole\.spark\.torch\.TorchModel; load it with that class"):
        TorchEstimator.load(str(tmp_path / "model"))


@pytest.mark.usefixtures("frameworks")  # TensorBoard imports TensorFlow if it is there
def test_what_a_run_leaves_in_its_store(spark: SparkSession, store: FilesystemStore) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    data = points(spark, 20).selectExpr("x", "y", "id % 4 = 0 as held_out")
    model = line()
    settings = {"store": store, "run_id": "curves", "epochs": 2, "batch_size": 4, "validation": "held_out"}
    fitted = estimator(model, metrics=[F.l1_loss], **settings).fit(data)
    curves = EventAccumulator(store.get_logs_path("curves")).Reload()
    assert {"train/batch_loss", "train/loss", "train/l1_loss", "train/rows_per_s", "validation/loss"} <= set(
        curves.Tags()["scalars"]
    )
    assert "train/waiting_for_data_percent" in curves.Tags()["scalars"]
    steps = sum(int(record["steps"]) for record in fitted.history)
    assert [point.step for point in curves.Scalars("train/batch_loss")] == list(range(1, steps + 1))
    written = [path for path in Path(store.get_run_path("curves")).parent.parent.rglob("*") if path.is_file()]
    names = {path.name.partition(".tfevents")[0] for path in written}
    assert names == {"checkpoint", "checkpoint.former", "best", "events.out"}
    assert fitted.getRunId() == "curves"


def two_heads() -> nn.Module:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kind, self.value = nn.Linear(5, 3), nn.Linear(5, 1)

        def forward(self, vector: Tensor, flag: Tensor) -> tuple[Tensor, Tensor]:
            both = torch.cat([vector, flag], 1)
            return self.kind(both), self.value(both)

    return TwoHeads()


def test_vectors_booleans_two_labels_and_their_columns(spark: SparkSession) -> None:
    rows = [
        (Vectors.sparse(4, [1], [i * 0.1]) if i % 2 else Vectors.dense([0.5] * 4), i % 3 == 0, i % 3, i * 0.1, str(i))
        for i in range(30)
    ]
    data = spark.createDataFrame(rows, ["vec.tor", "flag", "kind", "value", "name"])
    model = two_heads()
    fitted = estimator(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=[F.cross_entropy, F.mse_loss],
        loss_weights=[0.7, 0.3],
        feature_cols=["vec.tor", "flag"],
        label_cols=["kind", "value"],
        input_shapes=[[-1, 4], [-1, 1]],
        compress_sparse_cols=True,
        batch_size=5,
        epochs=2,
    ).fit(data)
    before = last_job(spark)["jobId"]
    predicted = fitted.setOutputCols(["class scores", "value.out"]).transform(data)
    assert [(field.name, field.dataType.simpleString()) for field in predicted.schema.fields[-2:]] == [
        ("class scores", "array<float>"),
        ("value.out", "double"),
    ]
    assert predicted.columns[:-2] == data.columns
    assert last_job(spark)["jobId"] == before, "the schema is known without a job"
    trained = fitted.getModel().eval()
    for row in predicted.collect():
        with torch.no_grad():
            vector, flag = torch.tensor(row["vec.tor"].toArray()).float(), torch.tensor([float(row["flag"])])
            scores, value = trained(vector[None], flag[None])
        np.testing.assert_allclose(row["class scores"], scores[0].numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(row["value.out"], value.item(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["__farandole_predicted", "__Farandole_Predicted"])
def test_transform_keeps_columns_of_any_name(spark: SparkSession, name: str) -> None:
    """The column that `transform` makes and drops does not replace one of the user's, nor an output."""
    model = TorchModel(model=line(), feature_columns=["x"], label_columns=["y"])
    predicted = model.transform(points(spark, 4).withColumn(name, 2 * col("id"))).orderBy("id")
    assert predicted.columns == ["x", "y", "id", name, "y__output"]
    assert [(row[name], row["y__output"]) for row in predicted.collect()] == [
        (2 * i, 0.25 + 0.5 * (i % 7 + i % 3)) for i in range(4)
    ]
    assert model.setOutputCols([name]).transform(points(spark, 4)).columns == ["x", "y", "id", name]


def test_outputs_are_what_stages_of_spark_take(spark: SparkSession, tmp_path: Path) -> None:
    """Outputs are vectors for a label of vectors and doubles for a label of numbers, as Spark's evaluators require."""
    rows = [(Vectors.dense([n % 2, 1 - n % 2]), float(n % 2), [float(n % 2)] * 2) for n in range(8)]
    data = spark.createDataFrame(rows, ["both", "first", "pair"])
    model = nn.Linear(2, 2)
    fitted = estimator(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), loss=F.mse_loss, feature_cols=["both"],
        label_cols=["both"], num_proc=1, epochs=4,
    ).fit(data)  # fmt: skip
    fitted.write().save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model")).setFeatureColumns(["pair"])
    for each in (fitted.transform(data), loaded.transform(data.drop("both"))):
        row = each.first()
        assert row is not None and row["both__output"].toArray().shape == (2,)
    score = BinaryClassificationEvaluator(rawPredictionCol="both__output", labelCol="first")
    assert score.evaluate(fitted.transform(data)) in (0.0, 1.0)
    single = TorchModel(
        model=nn.Linear(2, 1), feature_columns=["both"], label_columns=["first"], history=None, run_id=None
    )
    assert score.setRawPredictionCol("first__output").evaluate(single.transform(data)) in (0.0, 1.0)
    by_hand = TorchModel(model=nn.Linear(2, 1), feature_columns=["both"], label_columns=["both"])
    assert by_hand.transform(data).schema["both__output"].dataType.simpleString() == "vector"


LOAD_AND_TRANSFORM = """
import sys
from pyspark.ml import PipelineModel
from helpers.spark_session import session
from farandole.estimators.torch import TorchModel

folder, data = sys.argv[1:]
with session("local[1]") as spark:
    rows = spark.read.parquet(data)
    fitted = PipelineModel.load(folder + "/fitted")
    assembled, model = fitted.stages[0].transform(rows), fitted.stages[-1]
    again = TorchModel(model=model.getModel(), feature_columns=["x"], label_columns=["y"]).setOutputCols(["again"])
    shown = again.transform(model.transform(assembled)).orderBy("id").collect()
    print("predicted", [row["guess"] for row in shown])
    print("again", [row["again"] for row in shown])
    print("facts", type(model) is TorchModel, model.getRunId(), model.getHistory())
"""


@pytest.mark.timeout(400)
def test_saved_estimators_and_models_work_in_a_new_session(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = spark.createDataFrame(
        [(float(i % 7), float(i % 3), i / 12, i) for i in range(12)], "a double, b double, y double, id bigint"
    )
    data.coalesce(1).write.parquet(str(tmp_path / "rows"))

    class Net(nn.Module):  # of this function: another process can import it from nowhere
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    where = Store.create(str(tmp_path / "store"), {"key": "secret of the store", "auto_mkdir": True})
    stages = [
        VectorAssembler(inputCols=["a", "b"], outputCol="x"),
        estimator(
            Net(), store=where, run_id="kept", num_proc=1, metrics=[lambda output, label: (output - label).mean()]
        ),
    ]
    pipeline = Pipeline(stages=stages)
    fitted = pipeline.fit(data)
    fitted.stages[-1].setOutputCols(["guess"])
    fitted.write().overwrite().save(str(tmp_path / "fitted"))
    fitted.write().overwrite().save(str(tmp_path / "fitted"))
    needs = ResourceProfileBuilder().require(TaskResourceRequests().cpus(1)).build
    pipeline.getStages()[-1].setEpochs(2).setResourceProfile(needs)
    with caplog.at_level(logging.WARNING):
        pipeline.save(str(tmp_path / "unfitted"))
    assert "is saved without its secret options" in caplog.text
    written = b"".join(path.read_bytes() for path in (tmp_path / "unfitted").rglob("*") if path.is_file())
    assert b"secret of the store" not in written
    (saved,) = (tmp_path / "unfitted" / "stages").glob("1_*/parameters.pickle")
    ConnectFolder(spark, str(saved.parent)).write(saved.name, saved.read_bytes())  # as a Spark Connect session saves it
    saved.unlink()
    with pytest.raises(ConfigError, match="load it with that class"):
        TorchEstimator.load(str(next((tmp_path / "fitted" / "stages").glob("1_*"))))

    again = Pipeline.load(str(tmp_path / "unfitted"))
    loaded = again.getStages()[-1]
    assert (type(loaded), loaded.getStore().prefix_path, loaded.getEpochs()) == (TorchEstimator, where.prefix_path, 2)
    assert loaded.getResourceProfile().taskResources["cpus"].amount == 1
    loaded.setResourceProfile(None)  # which is for clusters
    resumed = again.fit(data).stages[-1]
    assert [record["epoch"] for record in resumed.history] == [1, 2]

    want = [row["guess"] for row in fitted.transform(data).orderBy("id").collect()]
    command = [sys.executable, "-c", LOAD_AND_TRANSFORM, str(tmp_path), str(tmp_path / "rows")]
    done = run(command, env={**os.environ, **warm_spark("torch")}, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line for line in done.stdout.splitlines() if line.startswith(("predicted", "again", "facts"))] == [
        f"predicted {want}",
        f"again {want}",
        f"facts True kept {fitted.stages[-1].getHistory()}",
    ]


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"feature_cols": ["nowhere"]}, DataError, "column 'nowhere': is not in the DataFrame"),
        ({"feature_cols": ["word"]}, DataError, "column 'word': no tensor holds string"),
        ({"validation": "y"}, DataError, "column 'y': is double; a validation column holds"),
        ({"input_shapes": [[-1, 2], [-1]]}, ConfigError, "input_shapes: has 2 shapes for 1 feature columns"),
        ({"loss": None}, ConfigError, "loss: is not set"),
        ({"num_proc": 3}, SlotsError, "3 ranks need 3 slots"),
    ],
)
def test_what_cannot_work_is_said_before_anything_runs(
    spark: SparkSession, changes: dict[str, object], error: type[Exception], text: str
) -> None:
    data = spark.createDataFrame([([1.0, 2.0], 0.5, "a")], "x array<double>, y double, word string")
    data.count()
    before = last_job(spark)["jobId"]
    started = time.monotonic()
    with pytest.raises(error, match=text):
        estimator(line(), **changes).fit(data)
    assert time.monotonic() - started < 30
    assert last_job(spark)["jobId"] == before


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([([1.0, 2.0], 0.5), ([1.0, None], 0.5), (None, 0.5)], "column 'x': 2 of 3 rows are null"),
        ([([1.0, 2.0], 0.5), ([1.0], 0.5)], "column 'x': arrays of 1 to 2 numbers"),
        ([], "there are no rows"),
    ],
)
def test_rows_that_no_tensor_holds(spark: SparkSession, rows: list[tuple[object, float]], text: str) -> None:
    data = spark.createDataFrame(rows, "x array<double>, y double")
    with pytest.raises(DataError, match=text):
        estimator(line()).fit(data)


def test_a_failing_rank_says_where(spark: SparkSession) -> None:
    def loss(output: Tensor, label: Tensor) -> Tensor:
        raise ArithmeticError("no such loss")

    with pytest.raises(RankFailed, match="failed: ArithmeticError: no such loss") as failed:
        estimator(line(), loss=loss).fit(points(spark, 5))
    assert isinstance(failed.value.__cause__, ArithmeticError)
    assert last_job(spark)["status"] == "FAILED"


def test_progress_in_plain_lines(spark: SparkSession, capfd: pytest.CaptureFixture[str]) -> None:
    shown = estimator(line(), verbose=1, run_id="shown")
    fitted = shown.fit(points(spark, 20), {shown.epochs: 2})
    out = capfd.readouterr().out
    assert "[0] shown: 20 rows train, 0 validate; 1 steps per epoch on 2 ranks, on the CPU; " in out
    assert "; features x float64[2] as float32" in out
    assert "as float32 [rows, 2]; labels y float64" in out
    assert "epoch 2/2 step 1/1" in out
    assert "epoch 2: loss" in out
    assert len(fitted.history) == 2


def test_probabilities_and_classes_of_a_stream(spark: SparkSession, tmp_path: Path) -> None:
    net = nn.Linear(2, 3)
    fitted = TorchModel(
        model=net, feature_columns=["x"], label_columns=["kind"], outputs=[("float32", [3])]
    ).setOutputCols(["logits"])
    points(spark, 6, partitions=1).write.parquet(str(tmp_path / "rows"))
    stream = spark.readStream.schema("x array<double>, y double, id bigint").parquet(str(tmp_path / "rows"))
    chances, first = softmax("logits").alias("chances"), sigmoid(col("logits")[0]).alias("first")
    predicted = fitted.transform(stream).select("id", "logits", argmax("logits").alias("class"), chances, first)
    assert predicted.isStreaming
    query = predicted.writeStream.format("memory").queryName("predicted").trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(120)
        rows = spark.table("predicted").orderBy("id").collect()
    finally:
        query.stop()
    with torch.no_grad():
        want = net(torch.tensor([[float(i % 7), float(i % 3)] for i in range(6)]))
    np.testing.assert_allclose([row["logits"] for row in rows], want, rtol=1e-5)
    np.testing.assert_allclose([row["chances"] for row in rows], want.softmax(1), rtol=1e-5)
    np.testing.assert_allclose([row["first"] for row in rows], want.sigmoid()[:, 0], rtol=1e-5)
    assert [row["class"] for row in rows] == want.argmax(1).tolist()
    extreme = spark.createDataFrame([([900.0, 900.0, -900.0],), ([],), (None,)], "v array<double>")
    got = [tuple(row) for row in extreme.select(argmax("v"), softmax("v")).collect()]
    assert got == [(0, [0.5, 0.5, 0.0]), (None, []), (None, None)]
