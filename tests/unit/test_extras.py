"""Imports of farandole's modules where the package that they need is not installed."""

import subprocess
import sys

import pytest

from farandole.extras import importing
from helpers.installed import require

# Runs a statement as where a package is not installed, and prints the error that it ends in.
HIDDEN = """
import sys

class Hider:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hider())
try:
    exec(sys.argv[2])
except ImportError as error:
    print(f"{type(error).__name__}: {error}")
"""

STATEMENTS = [
    ("torch", "import farandole.torch", "farandole.torch needs PyTorch", "torch"),
    ("torch", "import farandole.torch.data", "farandole.torch needs PyTorch", "torch"),
    ("tensorflow", "import farandole.tensorflow", "farandole.tensorflow needs TensorFlow", "tensorflow"),
    ("keras", "import farandole.keras", "farandole.keras needs Keras", "keras"),
    ("jax", "import farandole.jax", "farandole.jax needs JAX", "jax"),
    ("pyarrow", "from farandole.data import make_batch_reader", "farandole.data needs PyArrow", "data"),
    ("fsspec", "from farandole.data import ParquetSource", "farandole.data needs fsspec", "data"),
    (
        "deltalake",
        "from farandole.data import DeltaSource; DeltaSource('.')",
        "farandole.data needs deltalake",
        "delta",
    ),
    (
        "pyiceberg",
        "from farandole.data import IcebergSource; IcebergSource('.')",
        "farandole.data needs PyIceberg",
        "iceberg",
    ),
    ("pyspark", "from farandole.spark import HorovodRunner", "farandole.spark needs PySpark", "spark"),
    ("pyspark", "from farandole.spark import run", "farandole.spark needs PySpark", "spark"),
    ("pyspark", "import farandole.spark.torch", "farandole.spark.torch needs PySpark", "spark"),
    ("pyspark", "import farandole.spark.keras", "farandole.spark.keras needs PySpark", "spark"),
    (
        "lightning",
        "from farandole.lightning import FarandoleStrategy",
        "farandole.lightning needs Lightning",
        "lightning",
    ),
    ("pyspark", "import farandole.spark.lightning", "farandole.spark.lightning needs PySpark", "spark"),
    (
        "lightning_utilities",
        "import farandole.spark.lightning",
        "farandole.spark.lightning needs Lightning",
        "lightning",
    ),
    ("pyspark", "import farandole.spark.converter", "farandole.spark.converter needs PySpark", "spark"),
    ("ray", "from farandole.ray import RayExecutor", "farandole.ray needs Ray", "ray"),
    ("flytekit", "import farandole.integrations.flyte", "farandole.integrations.flyte needs Flytekit", "flyte"),
    (
        "prometheus_client",
        "import farandole.integrations.prometheus",
        "farandole.integrations.prometheus needs Prometheus' client",
        "prometheus",
    ),
    ("fsspec", "import farandole.spark.store", "farandole.spark.store needs fsspec", "spark"),
]
# Packages that a statement loads before the one that it misses.
FIRST = {
    "import farandole.integrations.flyte": ["flytekitplugins"],
    "import farandole.spark.torch": ["pandas", "torch"],
    "import farandole.spark.keras": ["keras", "pandas"],
    "from farandole.lightning import FarandoleStrategy": ["torch", "torchmetrics"],
    "import farandole.spark.lightning": ["pandas", "torch", "lightning_utilities"],
    "from farandole.data import ParquetSource": ["pyarrow"],
    "from farandole.data import DeltaSource; DeltaSource('.')": ["fsspec", "pyarrow"],
    "from farandole.data import IcebergSource; IcebergSource('.')": ["fsspec", "pyarrow"],
}


@pytest.mark.parametrize(("package", "statement", "need", "extra"), STATEMENTS, ids=lambda value: value.split(" ")[-1])
def test_a_missing_package_is_told_in_one_sentence(package: str, statement: str, need: str, extra: str) -> None:
    require(*FIRST.get(statement, []))
    command = [sys.executable, "-c", HIDDEN, package, statement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"MissingExtra: {need}: pip install 'farandole[{extra}]'\n", done.stderr


def test_other_failures_of_an_import_pass_through() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'torch\.no_such_module'"), importing("farandole.x"):
        raise ModuleNotFoundError("No module named 'torch.no_such_module'", name="torch.no_such_module")
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'"), importing("farandole.x"):
        import no_such_package  # noqa: F401
