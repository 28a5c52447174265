"""Estimators without Spark: rows of pandas, Arrow and Parquet, ranks of this machine, and no Java."""

import math
import os
import re
import signal
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("torch")

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from farandole.errors import ConfigError, DataError
from helpers.by_value import sent_by_value

pytestmark = pytest.mark.native

by_value = sent_by_value(__name__)


@pytest.fixture(autouse=True)
def no_java(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    yield
    from pyspark import SparkContext

    assert SparkContext._gateway is None, "a Java process was started"


def rows(count: int = 40) -> pd.DataFrame:
    numbers = np.random.default_rng(3).normal(size=(count, 3)).astype(np.float32)
    labels = numbers @ np.array([1.0, -2.0, 0.5], np.float32)
    return pd.DataFrame({"x": list(numbers), "flag": numbers[:, 0] > 0, "y": labels})


def estimator(**more: Any) -> Any:
    import torch

    from farandole.estimators.torch import TorchEstimator

    torch.manual_seed(5)
    model = torch.nn.Linear(3, 1)
    given = {
        "num_proc": 2, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
        "loss": torch.nn.functional.mse_loss, "feature_cols": ["x"], "label_cols": ["y"], "batch_size": 4, "epochs": 2,
        "random_seed": 1, "verbose": 0,
    }  # fmt: skip
    return TorchEstimator(**{**given, **more})


def weights(fitted: Any) -> list[list[float]]:
    return [parameter.tolist() for parameter in fitted.getModel().parameters()]


@pytest.mark.slow
def test_fit_and_transform_rows_of_pandas() -> None:
    frame = rows()
    table = pa.table({name: pa.array(frame[name]) for name in frame.columns})
    fitted = estimator().fit(frame)
    assert len(fitted.history) == 2 and fitted.history[1]["loss"] < fitted.history[0]["loss"]

    predicted = fitted.transform(frame)
    assert list(predicted.columns) == ["x", "flag", "y", "y__output"] and len(predicted) == 40
    weight, bias = weights(fitted)
    want = np.stack(frame["x"]) @ np.array(weight[0]) + bias[0]
    np.testing.assert_allclose(predicted["y__output"], want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(fitted.transform(table)["y__output"], predicted["y__output"])
    with pytest.raises(DataError, match="'y__output': is among the columns already"):
        fitted.transform(predicted)


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", "b", "c"]])
def test_a_transform_needs_a_name_for_each_output(names: list[str]) -> None:
    import torch

    from farandole.estimators.torch import TorchModel

    fitted = TorchModel(model=torch.nn.Linear(3, 2), feature_columns=["x"], label_columns=["y", "z"])
    wanted = r"output_cols: must be a name for each label column \(y, z\), all different, got \['a'"
    with pytest.raises(ConfigError, match=wanted):
        fitted.setOutputCols(names).transform(rows())


@pytest.mark.parametrize(("name", "remedy"), [("model", "getModel()"), ("run_id", "getRunId()"), ("history", "read")])
def test_values_that_are_params_of_horovods_models_name_what_returns_them(name: str, remedy: str) -> None:
    import torch

    from farandole.estimators.torch import TorchModel

    fitted = TorchModel(model=torch.nn.Linear(1, 1), feature_columns=["x"], label_columns=["y"])
    with pytest.raises(ConfigError, match=f"{name}: is no Param of a fitted model.*{re.escape(remedy)}"):
        fitted.getOrDefault(name)
    assert not fitted.hasParam(name) and fitted.getOrDefault("label_columns") == ["y"]


def test_a_transform_takes_the_columns_that_fit_takes(tmp_path: Path) -> None:
    import torch

    from farandole.estimators.torch import TorchModel

    fitted = TorchModel(model=torch.nn.Linear(2, 1), feature_columns=["x"], label_columns=["y"], outputs=[("f", [1])])
    for column, kind in {
        "text": "string", "day": r"timestamp\[ns\]", "thing": "struct", "texts": "list<.*string>", "money": "decimal",
    }.items():  # fmt: skip
        frame = pd.DataFrame(
            {
                "text": ["1", "2"], "day": pd.to_datetime(["2026", "2027"]), "thing": [{"a": 1.0}] * 2,
                "texts": [["1"]] * 2, "money": [Decimal("1.5")] * 2,
            }
        ).rename(columns={column: "x"})  # fmt: skip
        with pytest.raises(DataError, match=f"column 'x': no tensor holds {kind}"):
            fitted.transform(frame)
    for rows_with_null in (pd.DataFrame({"x": [[1.0, None], [1.0, 2.0]]}), pa.table({"x": [[1, None], [1, 2]]})):
        with pytest.raises(DataError, match="column 'x': 1 of 2 rows are null or hold a null"):
            fitted.transform(rows_with_null)

    class Double(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    double = TorchModel(model=Double(), feature_columns=["x"], label_columns=["y"])
    table = pa.table({"x": [1.0, math.nan]})
    pq.write_table(table, tmp_path / "rows.parquet")
    for rows_with_nan in (table, tmp_path / "rows.parquet"):
        np.testing.assert_array_equal(double.transform(rows_with_nan)["y__output"], [2.0, math.nan])
    with pytest.raises(DataError, match="column 'x': 1 of 2 rows are null"):
        double.transform(table.to_pandas())
    sparse = {"type": 0, "size": 2, "indices": [1], "values": [3.0]}
    dense = {"type": 1, "size": None, "indices": None, "values": [0.0, 3.0]}
    kinds = {"type": pa.int8(), "size": pa.int32(), "indices": pa.list_(pa.int32()), "values": pa.list_(pa.float64())}
    vectors = pa.table({"x": pa.array([sparse, dense], pa.struct(list(kinds.items())))})
    predicted = TorchModel(model=Double(), feature_columns=["x"], label_columns=["y"]).transform(vectors)
    assert [each.tolist() for each in predicted["y__output"]] == [[0.0, 6.0], [0.0, 6.0]]


def test_a_model_without_parameters_predicts_for_a_table_of_arrow_types() -> None:
    import torch

    from farandole.estimators.torch import TorchModel

    class Total(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(1)

    # pandas notes these types of columns in the table, and cannot read its notes.
    kinds = {"x": pa.list_(pa.int32()), "tags": pa.map_(pa.string(), pa.int64()), "money": pa.decimal128(5, 2)}
    values = {"x": [[1, 2], [3, 4]], "tags": [[("a", 1)], []], "money": [Decimal("1.50"), Decimal("2.25")]}
    columns = {name: pd.Series(values[name], dtype=pd.ArrowDtype(kind)) for name, kind in kinds.items()}
    frame = pd.DataFrame({**columns, "count": pd.Series([None, 1], dtype="Int64")}).set_index(pd.Index(["a", "b"]))
    model = TorchModel(model=Total(), feature_columns=["x"], label_columns=["y"])
    for rows_of_arrow in (frame, pa.Table.from_pandas(frame)):
        predicted = model.transform(rows_of_arrow)
        assert predicted["y__output"].to_dict() == {"a": 3.0, "b": 7.0}
        assert predicted["count"].dtype == "Int64" and predicted["money"].to_list() == values["money"]
        assert [list(each) for each in predicted["x"]] == values["x"]


def test_wrong_rows_are_refused_before_ranks_start() -> None:
    with pytest.raises(DataError, match="column 'z': is not in the DataFrame, which has x, flag, y"):
        estimator(feature_cols=["z"]).fit(rows())
    with pytest.raises(TypeError, match=r"fit takes a Spark DataFrame, .* or the path or URL of .*, got list"):
        estimator().fit([1, 2])
    with pytest.raises(DataError, match="'y': Arrow cannot hold it"):
        estimator().fit(rows().assign(y=[object()] * 40))
    with pytest.raises(DataError, match=r"'y': Arrow cannot hold it: .* too large .*; make it numbers or arrays"):
        estimator().fit(rows().assign(y=[2**70] * 40))
    with pytest.raises(DataError, match="column 'z': is not in the DataFrame, which has x, flag, y"):
        estimator(feature_cols=["z"]).fit(rows().assign(text="\ud800"))
    with pytest.raises(DataError, match="there are no rows in the DataFrame"):
        estimator().fit(pd.DataFrame({"x": [], "flag": [], "y": []}))
    with pytest.raises(ConfigError, match="dataset: is an empty path"):
        estimator().fit("")
    with pytest.raises(DataError, match="'y': is the name of several columns; give each its own"):
        estimator().fit(pd.concat([rows(), rows()[["y"]]], axis="columns"))


@pytest.mark.slow
def test_columns_that_the_model_does_not_take_are_left_alone() -> None:
    """Also those that neither Arrow nor Parquet can hold, and frames with one name twice."""
    frame = rows(5).set_axis([*"vwxyz"], axis="index")
    frame = frame.assign(
        thing=[{"a": 1, 2: 3}, object(), 1, "x", None],
        shop=pd.Categorical([*"abcab"]),
        day=pd.date_range("2026", periods=5),
    )
    frame = pd.concat(
        [frame, pd.DataFrame({7: pd.array([1, None, 3, 4, 5], "Int64"), "i": 1j}, index=frame.index)], axis=1
    )
    frame.insert(0, "day", "twice", allow_duplicates=True)
    fitted = estimator(epochs=1).fit(frame)
    predicted = fitted.transform(frame)
    pd.testing.assert_frame_equal(predicted.drop(columns=["y__output"]), frame)
    assert weights(estimator(epochs=1).fit(rows(5))) == weights(fitted)
    with pytest.raises(DataError, match="'x': is not among the columns, which are day, flag"):
        fitted.transform(frame.drop(columns=["x"]))
    with pytest.raises(DataError, match="'x': 1 of 5 rows are null"):
        fitted.transform(frame.assign(x=[*frame["x"][:-1], None]))


def test_a_job_of_spark_says_that_java_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.sql import SparkSession

    from farandole.spark import HorovodRunner

    def fail(builder: object) -> None:  # as PySpark does, which leaves a pipe open
        raise RuntimeError("[JAVA_GATEWAY_EXITED] Java gateway process exited before sending its port number.")

    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", fail)
    with pytest.raises(ConfigError, match=r"JAVA_HOME: is /nonexistent, .* Java 17 or newer. HorovodRunner\(np=-2\)"):
        HorovodRunner(np=2).run(rows)
    assert len(HorovodRunner(np=-1).run(rows, count=3)) == 3


def test_nothing_of_spark_is_ignored() -> None:
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    from farandole.estimators.backend import SparkBackend

    profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(1)).build
    backend = SparkBackend(num_proc=2, ranks_per_task=2)
    for given in ({"resource_profile": profile}, {"ranks_per_task": 2}, {"num_proc": None, "backend": backend}):
        with pytest.raises(ConfigError, match="is for tasks of Spark; the ranks of a fit without Spark are processes"):
            estimator(**given).fit(rows())
    with pytest.raises(ConfigError, match="ranks_per_task: is set, and given to the backend as well; set one of them"):
        estimator(num_proc=None, backend=backend, ranks_per_task=4).fit(rows())


def test_rows_of_a_flyte_directory_are_read_where_they_lie(tmp_path: Path) -> None:
    from farandole.estimators.local_rows import as_files, as_frame, is_local

    class Remote(os.PathLike[str]):
        remote_source = str(tmp_path / "there")

        def __fspath__(self) -> str:
            raise AssertionError("this downloads all files")

    (tmp_path / "there").mkdir()
    pd.DataFrame({"n": range(8)}).to_parquet(tmp_path / "there" / "rows.parquet")
    assert is_local(Remote()) and len(as_frame(Remote())) == 8
    with as_files(Remote(), ["n"]) as place:
        assert place == Remote.remote_source


@pytest.mark.slow
def test_ranks_run_again_and_no_rows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from farandole.estimators.store import Store

    died, scratch = tmp_path / "died", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("LOCAL_DIRS", str(scratch))

    class Dies:
        def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
            if epoch == 1 and "RANK" not in os.environ and os.environ["HOROVOD_RANK"] == "1" and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    store = Store.create(str(tmp_path / "store"))
    mine = estimator(store=store, run_id="again", callbacks=[Dies()])
    fitted = mine.fit(pa.Table.from_pandas(rows()), {mine.epochs: 3})
    assert died.exists() and [record["epoch"] for record in fitted.history] == [1, 2, 3]
    assert list(scratch.iterdir()) == []


class Here:
    """A backend whose only rank is this process; `size` is what it says."""

    def __init__(self, size: int = 1, given: Any = None) -> None:
        self.size, self.given = size, given

    def num_processes(self) -> int:
        return self.size

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> Any:
        assert kwargs is None and isinstance(env, dict)
        values = [fn(*args)] * self.size
        return values if self.given is None else self.given


@pytest.mark.slow
def test_a_backend_of_the_users_own_runs_the_ranks() -> None:
    fitted = estimator(num_proc=None, backend=Here()).fit(rows())
    assert weights(fitted) == weights(estimator(num_proc=1).fit(rows()))
    with pytest.raises(ConfigError, match=r"^backend: its processes are ranks of a job of 1, and num_processes"):
        estimator(num_proc=None, backend=Here(2)).fit(rows())
    with pytest.raises(ConfigError, match=r"^backend: Here.run must return the function's 1 values by rank"):
        estimator(num_proc=None, backend=Here(given="all is well")).fit(rows())
    with pytest.raises(ConfigError, match="those of a backend of your own are its processes"):
        estimator(num_proc=None, backend=Here(), ranks_per_task=2).fit(rows())


@pytest.mark.slow
def test_a_run_of_another_model_or_fit_is_refused_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from farandole.estimators import estimator as base
    from farandole.estimators.run_lock import RunLock
    from farandole.estimators.store import Store

    store = Store.create(str(tmp_path))
    estimator(num_proc=1, store=store, run_id="one", epochs=1).fit(rows())
    monkeypatch.setattr(base, "run_training_job", lambda *_, **__: pytest.fail("ranks have started"))
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    other = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05)}
    for epochs in (1, 2):
        with pytest.raises(
            ConfigError, match=rf"^run_id: the checkpoint of 'one' in {tmp_path}/runs/one is of another"
        ):
            estimator(num_proc=1, store=store, run_id="one", epochs=epochs, **other).fit(rows())
    with RunLock(store, store.get_run_path("one")), pytest.raises(ConfigError, match="belongs to a fit of process"):
        estimator(num_proc=1, store=store, run_id="one").fit(rows())
