"""Loader for saved models that makes their optimizers distributed."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras

from farandole.core.operations.compression import Compressor
from farandole.keras.backend import Tensor
from farandole.keras.compression import Compression
from farandole.keras.optimizer import DistributedOptimizer

__all__ = ["load_model"]


def load_model(
    filepath: str | Path,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Compressor[Tensor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model saved with any optimizer, distributed or not, and keep the optimizer's state.

    `custom_optimizers` are classes that are not part of Keras. Raises `ValueError` for `legacy_opts`, which Keras 3
    does not have, and the errors of Keras."""
    if legacy_opts:
        raise ValueError(f"legacy_opts: Keras {keras.__version__} has no legacy optimizers")
    objects: dict[str, Any] = {}
    for kind in custom_optimizers or ():
        objects |= {kind.__name__: kind, keras.saving.get_registered_name(kind): kind}
    model = keras.saving.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return model
    if str(filepath).endswith((".h5", ".hdf5")):
        optimizer = _restore(optimizer, model, filepath)
    model.optimizer = DistributedOptimizer(optimizer, compression=compression)
    return model


def _restore(optimizer: Any, model: Any, filepath: str | Path) -> Any:
    """Return a new optimizer like `optimizer` with its state from an HDF5 file.

    Keras (3.15) builds the optimizer of such a file without variables, so it has no state and cannot train."""
    import h5py

    made = type(optimizer).from_config(optimizer.get_config())
    made.build(model.trainable_variables)
    with h5py.File(filepath) as file:
        group = file.get("optimizer_weights")
        saved = [] if group is None else [group[name][()] for name in _names(group.attrs)]
    if len(saved) == len(made.variables):  # else the file was written before the first step
        for variable, value in zip(made.variables, saved, strict=True):
            variable.assign(value)
    return made


def _names(attributes: Mapping[str, Any]) -> list[str]:
    """Return the names of an optimizer's variables. Keras splits a list that is too long for one attribute."""
    parts = [attributes["weight_names"]] if "weight_names" in attributes else []
    while f"weight_names{len(parts)}" in attributes:
        parts.append(attributes[f"weight_names{len(parts)}"])
    return [name.decode() if isinstance(name, bytes) else name for part in parts for name in part]
