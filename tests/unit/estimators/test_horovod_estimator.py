"""What `HorovodEstimator` accepts, before there is any Spark session."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("fsspec")
pytest.importorskip("tensorflow")

from farandole.errors import ConfigError
from farandole.estimators.predictions.tensorflow import GraphPredictor, output_type
from farandole.estimators.run_lock import RunLock
from farandole.estimators.store import Store
from farandole.estimators.tensorflow import HorovodEstimator, TFInputGraph, TFTransformer
from farandole.estimators.trainers.model_fn.frozen_graph import FrozenGraph, Port
from helpers.hadoop import hadoop_in_memory


def test_the_folder_keeps_its_host() -> None:
    url = "hdfs://namenode:8020/user/jane:a@corp.com/run"
    with hadoop_in_memory():
        folder = HorovodEstimator(modelDir=url).getModelDir()
        assert folder == url and Store.create(folder).storage_options == {"host": "namenode", "port": 8020}


def test_a_relative_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert HorovodEstimator(modelDir="run").getModelDir() == f"{tmp_path}/run"
    assert HorovodEstimator(modelDir="file:///data/run").getModelDir() == "/data/run"


def test_fits_of_a_grid_do_not_share_a_folder(tmp_path: Path) -> None:
    estimator = HorovodEstimator(modelDir=str(tmp_path))
    own = [{estimator.modelDir: str(tmp_path / name)} for name in ("one", "two")]
    for shared in ([{}], [{estimator.batchSize: 4}, {estimator.batchSize: 8}], [*own, {}], [*own, own[0]]):
        with pytest.raises(ConfigError, match="modelDir: holds one run, which each of several fits would resume"):
            estimator.fitMultiple(None, shared)  # type: ignore[arg-type]
    assert estimator.fitMultiple(None, own)  # type: ignore[arg-type]


def test_another_fit_does_not_train_in_the_same_folder(tmp_path: Path) -> None:
    with (
        RunLock(Store.create(str(tmp_path)), str(tmp_path)),
        pytest.raises(ConfigError, match=rf"^modelDir: the run in {tmp_path} belongs to a fit of process"),
    ):
        HorovodEstimator(modelDir=str(tmp_path))._fit(None)  # type: ignore[arg-type]


def test_a_local_folder_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.estimators.store._MOUNT", str(tmp_path))
    folder = HorovodEstimator(modelDir="dbfs:/Users/jane@corp.com/run").getModelDir()
    assert folder == f"{tmp_path}/Users/jane@corp.com/run"
    assert HorovodEstimator(modelDir="/data/jane:a@corp.com/key=1").getModelDir() == "/data/jane:a@corp.com/key=1"


def test_a_folder_with_credentials_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^modelDir: 'sftp://\*\*\*:\*\*\*@host/run' holds credentials"):
        HorovodEstimator(modelDir="sftp://me:secret@host/run")


def test_an_input_takes_one_column() -> None:
    x, y = (Port(tensor=f"{name}:0", dtype="float32", shape=()) for name in "xy")
    frozen = FrozenGraph(graph=b"", inputs={"x": x}, outputs={"y": y})
    transformer = TFTransformer(
        tfInputGraph=TFInputGraph(frozen), inputMapping={"a": "x", "b": "x:0"}, outputMapping={"y": "y"}
    )
    with pytest.raises(ConfigError, match="inputMapping: maps several columns to x; map one to each input"):
        transformer._transform(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16"])
def test_small_integers_become_columns_of_int(kind: str) -> None:
    import tensorflow as tf

    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(kind, [None], name="x")
        frozen = TFInputGraph.fromGraph(graph, session, ["x"], [tf.identity(x, name="y").name]).frozen
    ((name, port),) = frozen.outputs.items()
    predictor = GraphPredictor(names=("y",), frozen=frozen, inputs=[("x", "x:0")], outputs_of_graph=[name])
    (made,) = predictor.load()([np.array([0, np.iinfo(kind).max], kind)])
    assert output_type(port) == "int" and made.dtype == np.int32
    assert made.tolist() == [0, np.iinfo(kind).max]
