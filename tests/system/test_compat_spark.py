"""`horovod.spark.run` and `sparkdl.HorovodRunner`: the ranks of a Spark job answer `import horovod` too."""

import importlib
import importlib.util
import io
import re
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("torch")
if importlib.util.find_spec("farandole._native") is None:
    pytest.skip("the native core is not built", allow_module_level=True)

from pyspark.sql import SparkSession

from farandole.compat import install, uninstall
from farandole.errors import ConfigError, PicklingError
from helpers.spark_session import last_job

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(240)]


# The session is older than the answers, so that nothing of them reaches executors through the environment.
@pytest.fixture(autouse=True)
def installed(spark: SparkSession) -> Iterator[None]:
    install()
    yield
    uninstall()


def make_train() -> Callable[[float], tuple[int, float]]:
    """A function as of a notebook, which no rank can import."""

    def train(more: float) -> tuple[int, float]:
        import os

        import horovod.torch as hvd
        import torch
        from sparkdl.horovod import log_to_driver

        hvd.init()
        assert "RANK" not in os.environ and "FARANDOLE_TORCH_STORE" in os.environ
        log_to_driver(f"rank {hvd.rank()} of {hvd.size()}")
        return hvd.rank(), hvd.allreduce(torch.tensor(hvd.rank() + more), op=hvd.Sum, name="w").item()

    return train


def test_horovod_spark_run(spark: SparkSession) -> None:
    horovod_spark = importlib.import_module("horovod.spark")
    assert horovod_spark.run(make_train(), (1.0,), num_proc=2) == [(0, 3.0), (1, 3.0)]
    assert last_job(spark)["description"] == "farandole.spark.run: train"


def test_lines_of_horovod_spark_run(spark: SparkSession) -> None:
    """Programs read Horovod's prefix, in the files that they have named."""
    horovod_spark = importlib.import_module("horovod.spark")

    def talk() -> None:
        import sys

        print("one\n[7] two", flush=True)
        print("three", file=sys.stderr, flush=True)

    files = {"stdout": io.StringIO(), "stderr": io.StringIO()}
    horovod_spark.run(talk, num_proc=1, prefix_output_with_timestamp=True, **files)
    time = "[A-Z][a-z]{2} [A-Z][a-z]{2} [0-9]{2} [0-9:]{8} [0-9]{4}"
    lines = files["stdout"].getvalue()
    assert re.fullmatch(rf"{time}\[0\]<stdout>:one\n{time}\[0\]<stdout>:\[7\] two\n", lines), lines
    assert re.search(rf"^{time}\[0\]<stderr>:three$", files["stderr"].getvalue(), re.MULTILINE)


def test_the_backend(spark: SparkSession) -> None:
    backends = importlib.import_module("horovod.spark.common.backend")
    assert backends.default_num_proc() == 2
    backend = backends.SparkBackend(env={"A": "1"}, verbose=0)
    assert backend.num_processes() == 2

    def variables() -> tuple[str, str]:
        import os

        return os.environ["A"], os.environ["B"]

    assert backend.run(variables, env={"B": "2"}) == [("1", "2")] * 2
    for call in (backends.Backend().num_processes, lambda: backends.Backend().run(print)):
        with pytest.raises(NotImplementedError):
            call()


@pytest.mark.parametrize("np", [2, -2])
def test_horovod_runner(spark: SparkSession, np: int, capfd: pytest.CaptureFixture[str]) -> None:
    import horovod.torch as hvd  # a module of this program, which the function refers to
    from sparkdl import HorovodRunner

    train = make_train()

    def main(more: float) -> object:
        import horovod

        assert hvd.mpi_built() is False and horovod.__version__ == "0.28.1"
        return train(more)

    assert HorovodRunner(np=np).run(main, more=0.5) == (0, 2.0)
    seen = capfd.readouterr()
    assert "rank 1 of 2" in seen.out
    assert "The global names read or written to by the pickled function are {" in seen.err
    if np > 0:
        assert last_job(spark)["description"] == "HorovodRunner: main"


def test_what_cannot_be_sent_is_named(spark: SparkSession) -> None:
    import threading

    from sparkdl import HorovodRunner

    lock = threading.Lock()

    def main() -> object:
        return lock

    with pytest.raises(PicklingError, match="closure variable 'lock'"):
        HorovodRunner(np=2).run(main)


def test_estimators_and_stores(spark: SparkSession) -> None:
    from horovod.spark.common.backend import SparkBackend
    from horovod.spark.common.store import LocalStore, Store
    from horovod.spark.torch import TorchEstimator

    import farandole.estimators.torch

    assert TorchEstimator is farandole.spark.torch.TorchEstimator
    assert isinstance(Store.create("/tmp"), LocalStore)
    backend = SparkBackend(num_proc=2)
    assert TorchEstimator(backend=backend).getBackend() is backend
    with pytest.raises(ConfigError, match="must be a SparkBackend, or an object with the methods run and"):
        TorchEstimator(backend=object())
