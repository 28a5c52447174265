"""Imports of packages that an extra of farandole installs."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from farandole.errors import MissingExtra

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
    "mxnet": ("MXNet", "mxnet"),
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


def prepare_mxnet() -> None:
    """Give NumPy the name `bool` again, with a warning, if MXNet is about to be imported and needs it.

    MXNet 1.9 and 2.0b1 read `numpy.bool`, which NumPy 1.24 to 1.26 lack."""
    import numpy

    if (1, 24) <= tuple(map(int, numpy.__version__.split(".")[:2])) < (2, 0) and "bool" not in vars(numpy):
        warnings.warn(
            f"MXNet needs numpy.bool, which NumPy {numpy.__version__} lacks: it is numpy.bool_ from now on",
            stacklevel=2,
        )
        setattr(numpy, "bool", numpy.bool_)  # noqa: B010  # NumPy's types do not know this old name
