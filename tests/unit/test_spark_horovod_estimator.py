"""What `HorovodEstimator` accepts, before there is any Spark session."""

from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("fsspec")
pytest.importorskip("tensorflow")

from farandole.errors import ConfigError
from farandole.spark.store import Store
from farandole.spark.tensorflow import HorovodEstimator
from helpers.hadoop import hadoop_in_memory


def test_the_folder_keeps_its_host() -> None:
    url = "hdfs://namenode:8020/user/run"
    with hadoop_in_memory():
        folder = HorovodEstimator(modelDir=url).getModelDir()
        assert folder == url and Store.create(folder).storage_options == {"host": "namenode", "port": 8020}


def test_a_relative_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert HorovodEstimator(modelDir="run").getModelDir() == f"{tmp_path}/run"
    assert HorovodEstimator(modelDir="file:///data/run").getModelDir() == "/data/run"


def test_a_folder_with_credentials_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^modelDir: 'sftp://\*\*\*:\*\*\*@host/run' holds credentials"):
        HorovodEstimator(modelDir="sftp://me:secret@host/run")
