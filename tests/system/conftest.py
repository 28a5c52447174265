"""The Spark session that most modules share."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def spark() -> Iterator["SparkSession"]:
    """Yield the session on local[2]."""
    from helpers.spark_session import local_session  # only where PySpark is installed

    with local_session() as started:
        yield started


@pytest.fixture
def mark() -> str:
    """Return a word for the environment of all processes of one test's ranks."""
    return uuid.uuid4().hex


@pytest.fixture(scope="module")
def warm_torch() -> None:
    """Make an optimizer before a test does: with the first one torch sets a variable of its compiler, for good."""
    torch = pytest.importorskip("torch")
    torch.optim.SGD(torch.nn.Linear(1, 1).parameters())


@pytest.fixture(scope="module")
def horovod_with_keras(frameworks: None) -> Iterator[None]:
    """Let farandole answer Horovod's names, where TensorFlow and Keras are installed."""
    import farandole.compat

    pytest.importorskip("tensorflow")
    pytest.importorskip("keras")
    farandole.compat.install()
    yield
    farandole.compat.uninstall()


@pytest.fixture
def scratch(spark: "SparkSession") -> Path:
    """Return the folder below which Spark keeps all its files."""
    return Path(spark.sparkContext.getConf().get("spark.local.dir") or "")
