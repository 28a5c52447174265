"""Parameters of the estimators that shape rows and steps: each one's effect on an embedded Spark, with real ranks."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("torch")
if importlib.util.find_spec("farandole._native") is None:
    pytest.skip("the native core is not built", allow_module_level=True)

import numpy as np
import torch
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import Vectors
from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder
from pyspark.sql import SparkSession
from torch import Tensor, nn

import farandole
from farandole.errors import ConfigError, DataError
from farandole.estimators.backend import Backend
from farandole.estimators.store import Store
from farandole.estimators.torch import TorchEstimator, TorchModel
from helpers.estimator_rows import plain_step

pytestmark = [pytest.mark.spark, pytest.mark.slow]

# PySpark closes no pool of threads of a CrossValidator, and Python warns of it.
UNCLOSED_POOL = "ignore:Exception ignored in. <function Pool.__del__:pytest.PytestUnraisableExceptionWarning"


@pytest.fixture(scope="module", autouse=True)
def warm_torch() -> None:
    # The first optimizer makes torch set a variable of its compiler, for good.
    torch.optim.SGD(nn.Linear(1, 1).parameters())


def lines(folder: Path, name: str) -> list[str]:
    return [line for path in sorted(folder.glob(f"{name}-*")) for line in path.read_text().splitlines()]


def noting(folder: Path) -> Callable[..., None]:
    # Made in a function, so that it is pickled by value: ranks cannot import this file.
    def note(name: str, line: object) -> None:
        import os

        with (folder / f"{name}-{os.getpid()}").open("a") as out:
            out.write(f"{line}\n")

    return note


def summing(folder: Path) -> nn.Module:
    note = noting(folder)

    class Summing(nn.Module):
        """Learns the bias alone; leaves a line for each batch: what it holds."""

        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor, vector: Tensor) -> Tensor:
            if not torch.is_inference_mode_enabled():  # else it is the row that is tried before training
                kind = "train" if self.training else "val"
                for row, other in zip(x.tolist(), vector.tolist(), strict=True):
                    note(kind, f"{len(x)} {row} {other}")
            return x.sum(1) + vector.sum(1) + self.bias

    return Summing()


def test_a_function_of_rows_and_compressed_vectors(spark: SparkSession, tmp_path: Path) -> None:
    rows = [({"id": n}, f"w{n}", Vectors.sparse(1000, [n], [1.0]), float(n % 5)) for n in range(23)]
    data = spark.createDataFrame(rows, ["map", "word", "vector", "y"])
    note = noting(tmp_path)

    def measured(row: dict[str, Any]) -> dict[str, Any]:
        note("row", f"{row['map']['id']} {type(row['word']).__name__} {row['vector'].shape}")
        return {"x": [len(row["word"]), row["map"]["id"]], "vector": row["vector"][:3], "y": row["y"]}

    model = summing(tmp_path)
    settings: dict[str, Any] = {
        "num_proc": 2, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.0),
        "loss": nn.functional.mse_loss, "feature_cols": ["x", "vector"], "label_cols": ["y"], "verbose": 0,
        "batch_size": 4, "val_batch_size": 2, "epochs": 2, "validation": 0.3, "random_seed": 5,
        "transformation_fn": measured, "transformation_removed_fields": ["word", "map"], "compress_sparse_cols": True,
        "transformation_edit_fields": [("x", np.float32, (2,), False), ("vector", np.float32, (3,), False)],
    }  # fmt: skip
    fitted = TorchEstimator(**settings).fit(data)
    train, val = lines(tmp_path, "train"), lines(tmp_path, "val")
    want = {f"[{float(len(f'w{n}'))}, {float(n)}] {[float(n == place) for place in range(3)]}" for n in range(23)}
    seen = {each.partition(" ")[2] for each in train + val}
    assert seen == want
    assert len(train) + len(val) == 2 * 23 and len(set(train) | set(val)) <= 2 * 23
    assert {each[0] for each in val} <= {"1", "2"}, "val_batch_size"
    assert "4" in {each[0] for each in train}
    made = lines(tmp_path, "row")
    assert {each.partition(" ")[2] for each in made} == {"str (1000,)"}
    assert len(made) == 2 * 23 + 4, "once per epoch, and each rank's first row twice before training"
    assert [record["epoch"] for record in fitted.history] == [1, 2]

    batches = sorted(path.read_text() for path in tmp_path.glob("train-*"))
    for path in tmp_path.iterdir():
        path.unlink()
    TorchEstimator(**settings, inmemory_cache_all=True).fit(data)
    again = sorted(path.read_text() for path in tmp_path.glob("train-*"))
    assert again == batches, "the same batches in the same order"
    assert len(lines(tmp_path, "row")) == 23 + 2, "once for all epochs"

    with pytest.raises(ConfigError, match="fails on the first row of rank 0: KeyError: 'nothing'"):
        TorchEstimator(**(settings | {"transformation_fn": lambda row: row["nothing"]})).fit(data)
    with pytest.raises(DataError, match="column 'x': is not in the DataFrame"):
        TorchEstimator(**(settings | {"transformation_edit_fields": None})).fit(data)


def line() -> nn.Module:
    model = nn.Linear(2, 1)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    return model


def test_own_steps_losses_made_on_ranks_and_callbacks(spark: SparkSession, tmp_path: Path) -> None:
    """Three rows on two ranks, one by one: in the second step a rank has none."""
    data = spark.createDataFrame([([float(n), 1.0], n / 3, 1.0 + n) for n in range(3)], ["x", "y", "w"])
    note = noting(tmp_path)

    def fit(**changes: Any) -> TorchModel:
        model = line()
        return TorchEstimator(
            num_proc=2, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), feature_cols=["x"],
            label_cols=["y"], sample_weight_col="w", batch_size=1, epochs=3, random_seed=2, verbose=0, **changes,
        ).fit(data)  # fmt: skip

    def step(model: Any, optimizer: Any, transform_outputs: Any, loss_fn: Any, inputs: Any, *others: Any) -> Any:
        note("step", len(inputs[0]))
        return plain_step(model, optimizer, transform_outputs, loss_fn, inputs, *others)

    class Unpicklable:
        reduction = "mean"

        def __reduce__(self) -> Any:
            raise TypeError("cannot be pickled")

        def __call__(self, output: Tensor, label: Tensor, reduction: str = "mean") -> Tensor:
            return nn.functional.mse_loss(output, label, reduction=reduction)

    class Stopping:
        def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
            import farandole.torch as hvd

            note("epoch", f"{epoch} {logs['loss']}")
            self.stop_training = epoch == 1 and hvd.rank() == 1

    want = fit(loss=nn.functional.mse_loss, callbacks=[Stopping()])
    assert len(want.history) == 2, "one rank's callback stops all"
    assert sorted(lines(tmp_path, "epoch")) == sorted(
        2 * [f"{epoch} {record['loss']}" for epoch, record in enumerate(want.history)]
    )
    got = fit(loss_constructors=lambda **_: Unpicklable(), train_minibatch_fn=step, callbacks=[Stopping()])
    for one, other in zip(want.getModel().parameters(), got.getModel().parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert [record["loss"] for record in got.history] == pytest.approx([record["loss"] for record in want.history])
    assert len(lines(tmp_path, "step")) == 2 * 2 * 2, "each rank in each step, also without rows"


def test_rows_of_a_store_reach_the_ranks_without_spark(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(f"file://{tmp_path}/store")
    rows = [(Vectors.sparse(4, [n % 4], [float(n)]), [float(n), 0.5], float(n)) for n in range(17)]
    data = spark.createDataFrame(rows, ["vector", "x", "y"])
    data.where("y < 12").coalesce(1).write.parquet(store.get_train_data_path(2))
    data.where("y >= 12").write.parquet(store.get_val_data_path(2))
    monkeypatch.setattr(SparkSession, "read", property(lambda session: pytest.fail("rows were read by Spark")))
    notes = tmp_path / "notes"
    notes.mkdir()
    model = summing(notes)
    estimator = TorchEstimator(
        num_proc=2, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), loss=nn.functional.mse_loss,
        feature_cols=["x", "vector"], label_cols=["y"], store=store, run_id="stored", batch_size=3, verbose=0,
        random_seed=1,
    )  # fmt: skip
    fitted = estimator.fit_on_parquet({estimator.epochs: 2}, dataset_idx=2)
    text = [f"[{float(n)}, 0.5] {[float(n) if n % 4 == place else 0.0 for place in range(4)]}" for n in range(17)]
    for kind, want in (("train", text[:12]), ("val", text[12:])):
        assert sorted(each.partition(" ")[2] for each in lines(notes, kind)) == sorted(2 * want)
    assert [record["epoch"] for record in fitted.history] == [1, 2]
    assert fitted.history[0]["val_loss"] == pytest.approx(np.mean([(n + 0.5 + n - n) ** 2 for n in range(12, 17)]))
    with pytest.raises(DataError, match="column 'z': is not in the DataFrame"):
        estimator.fit_on_parquet({estimator.feature_cols: ["z"]}, dataset_idx=2)
    ragged = [(Vectors.sparse(4 + n // 15, [0], [1.0]), *row[1:]) for n, row in enumerate(rows)]
    data = spark.createDataFrame(ragged, ["vector", "x", "y"])
    data.coalesce(1).write.parquet(store.get_train_data_path(3))
    with pytest.raises(DataError, match="column 'vector': vectors of 4 to 5 numbers; a tensor needs one length"):
        estimator.fit_on_parquet({estimator.run_id: "ragged"}, dataset_idx=3)


def two_heads(folder: Path) -> nn.Module:
    note = noting(folder)

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.number, self.square = nn.Linear(2, 1, bias=False), nn.Linear(2, 4, bias=False)
            for parameter in self.parameters():
                nn.init.constant_(parameter, 0.5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            if not torch.is_inference_mode_enabled():
                note("train" if self.training else "val", len(x))
            return self.number(x), self.square(x).reshape(-1, 2, 2)

    return TwoHeads()


def test_two_outputs_with_weights_shapes_and_numbers_of_steps(spark: SparkSession, tmp_path: Path) -> None:
    note = noting(tmp_path)

    def compared(output: Tensor, label: Tensor, reduction: str = "mean") -> Tensor:
        note("label", f"{output.dim()} {tuple(label.shape[1:])}")
        return nn.functional.mse_loss(output, label, reduction=reduction)

    rows = [([float(n % 3), 1.0], n / 4, [float(n % k) for k in (1, 2, 3, 4)], n % 3 + 0.5, n >= 8) for n in range(14)]
    data = spark.createDataFrame(rows, ["x", "y", "square", "w", "held"])
    model, rate = two_heads(tmp_path), 2.0**-6
    fitted = TorchEstimator(
        num_proc=2, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=rate / 2), loss=compared,
        loss_weights=[0.25, 0.75], feature_cols=["x"], label_cols=["y", "square"], label_shapes=[[-1, 1], [-1, 2, 2]],
        sample_weight_col="w", validation="held", batch_size=50, val_batch_size=2, epochs=2, train_steps_per_epoch=3,
        validation_steps_per_epoch=1, verbose=0,
    ).fit(data)  # fmt: skip
    x, y, square, w = (np.array([row[place] for row in rows[:8]]) for place in range(4))
    weights = [np.full((1, 2), 0.5), np.full((4, 2), 0.5)]
    for _ in range(2 * 3):  # each step has all rows
        for share, weight, label in zip((0.25, 0.75), weights, (y[:, None], square), strict=True):
            error = (x @ weight.T - label) * w[:, None]
            weight -= rate * share * 2 * error.T @ x / label.size
    state = fitted.getModel().state_dict()
    np.testing.assert_allclose(state["number.weight"], weights[0], rtol=1e-5)
    np.testing.assert_allclose(state["square.weight"], weights[1], rtol=1e-5)
    assert [record["steps"] for record in fitted.history] == [3, 3]
    assert len(lines(tmp_path, "train")) == 2 * 2 * 3
    assert lines(tmp_path, "val") == ["2"] * 4, "each rank validates one batch of two rows per epoch"
    assert set(lines(tmp_path, "label")) == {"2 (1,)", "3 (2, 2)"}


@pytest.mark.filterwarnings(UNCLOSED_POOL)
def test_a_cross_validator_chooses_among_pipelines(spark: SparkSession, tmp_path: Path) -> None:
    rows = [(float(n % 5), 1.0, (n % 5) / 2 + 0.25) for n in range(24)]
    data = spark.createDataFrame(rows, ["a", "b", "y"])
    model = line()
    estimator = TorchEstimator(
        num_proc=1, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.02), loss=nn.functional.mse_loss,
        feature_cols=["x"], label_cols=["y"], batch_size=4, random_seed=1, verbose=0,
        store=Store.create(str(tmp_path / "store")),
    )  # fmt: skip
    pipeline = Pipeline(stages=[VectorAssembler(inputCols=["a", "b"], outputCol="x"), estimator])
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 3]).build()
    evaluator = RegressionEvaluator(predictionCol="y__output", labelCol="y")
    validator = CrossValidator(
        estimator=pipeline, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, seed=3, parallelism=1
    )
    chosen = validator.fit(data)
    assert chosen.avgMetrics[1] < chosen.avgMetrics[0]
    best = chosen.bestModel.stages[-1]
    assert [record["epoch"] for record in best.history] == [1, 2, 3]
    runs = [path.name for path in (tmp_path / "store/runs").iterdir()]
    assert len(runs) == 5, "each fit is a run of its own"
    assert evaluator.evaluate(chosen.transform(data)) < chosen.avgMetrics[0]
    chosen.save(str(tmp_path / "chosen"))
    again = CrossValidatorModel.load(str(tmp_path / "chosen"))
    assert again.bestModel.stages[-1].history == best.history


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpus_that_are_asked_for_and_missing_end_the_fit_on_the_ranks(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.createDataFrame([(1.0, 2.0), (2.0, 3.0)], "x double, y double")
    model = summing(tmp_path)
    estimator = TorchEstimator(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.functional.mse_loss,
        feature_cols=["x"], label_cols=["y"], num_proc=2, max_attempts=1, verbose=0, use_gpu=True,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"^use_gpu: is True, but rank 0, local rank 0 on \S+ has no GPU of its own"):
        estimator.fit(frame)
    assert list(tmp_path.iterdir()) == []  # no rank has used the model


class OfThisMachine(Backend):
    """A user's backend, which starts ranks without Spark."""

    def num_processes(self) -> int:
        return 2

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> list[Any]:
        return farandole.run(fn, args, kwargs, num_proc=2, env=env)


def test_the_ranks_of_a_users_own_backend_get_the_same_rows(spark: SparkSession, tmp_path: Path) -> None:
    rows = [(Vectors.dense([n % 5, 1.0]), (n % 5) / 2 + 0.25) for n in range(24)]
    data = spark.createDataFrame(rows, ["x.y", "y"])
    store = Store.create(str(tmp_path))

    def fit(**changes: Any) -> list[Any]:
        torch.manual_seed(3)
        model = line()
        fitted = TorchEstimator(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.02), loss=nn.functional.mse_loss,
            feature_cols=["x.y"], label_cols=["y"], batch_size=4, random_seed=1, verbose=0, **changes,
        ).fit(data)  # fmt: skip
        return [each.tolist() for each in fitted.getModel().parameters()]

    assert fit(backend=OfThisMachine(), store=store) == fit(num_proc=2)
    assert [each.name for each in tmp_path.iterdir()] == ["runs"], "the rows are removed"
    with pytest.raises(ConfigError, match="store: is not set; the ranks of a backend of your own read"):
        fit(backend=OfThisMachine())
