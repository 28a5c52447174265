"""Imports of packages that an extra of farandole installs."""

from collections.abc import Iterator
from contextlib import contextmanager

from farandole.errors import MissingExtra

__all__ = ["importing"]

# By package: its title, and the extras that install it.
_EXTRAS = {
    "PIL": ("Pillow", "images"),
    "deltalake": ("deltalake", "delta"),
    "flyteidl": ("Flytekit", "flyte"),
    "flytekit": ("Flytekit", "flyte"),
    "flytekitplugins": ("Flytekit", "flyte"),
    "flytekitplugins.kfmpi": ("Flytekit's plug-in for MPI", "flyte"),
    "fsspec": ("fsspec", "data", "spark"),
    "jax": ("JAX", "jax"),
    "jaxlib": ("JAX", "jax"),
    "keras": ("Keras", "keras"),
    "lightning": ("Lightning", "lightning"),
    "lightning_utilities": ("Lightning", "lightning"),
    "matplotlib": ("Matplotlib", "plots"),
    "mlflow": ("MLflow", "mlflow"),
    "pandas": ("pandas", "spark"),
    "prometheus_client": ("Prometheus' client", "prometheus"),
    "py4j": ("PySpark", "spark"),
    "pyarrow": ("PyArrow", "data", "spark"),
    "pyiceberg": ("PyIceberg", "iceberg"),
    "pyspark": ("PySpark", "spark"),
    "ray": ("Ray", "ray"),
    "tensorflow": ("TensorFlow", "tensorflow"),
    "torch": ("PyTorch", "torch"),
    "torchmetrics": ("Lightning", "lightning"),
}


@contextmanager
def importing(module: str) -> Iterator[None]:
    """Raise `MissingExtra` where an import within the block fails because an extra's package is not installed.

    `module` is the module of farandole that imports. Other failures pass through, such as those of an old package."""
    try:
        yield
    except MissingExtra:
        raise
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        title, *extras = _EXTRAS[error.name]
        own = module.split(".")[1]
        raise MissingExtra(module, title, own if own in extras else extras[0], error.name) from None
