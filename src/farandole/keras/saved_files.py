"""Loader for models that Keras 3 has saved, and functions that make the optimizer of a saved model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType
from zipfile import ZipFile

import keras

from farandole.keras.backend import Model, Optimizer


def load(filepath: str | Path, objects: Mapping[str, object]) -> Model:
    """See `Generation`."""
    model = keras.saving.load_model(filepath, custom_objects=with_maker(filepath, objects))
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and str(filepath).endswith((".h5", ".hdf5")):
        model.optimizer = _restore(optimizer, model, filepath)
    return model


def with_maker(filepath: str | Path, objects: Mapping[str, object]) -> dict[str, object]:
    """Return `objects` with a class in place of the function that makes the optimizer of the file, if there is one."""
    held = dict(objects)
    if any(isinstance(each, FunctionType) for each in held.values()):
        name = _name_of_optimizer(filepath)
        if isinstance(maker := held.get(name), FunctionType):
            held[name] = _class_that_calls(maker)
    return held


def _class_that_calls(maker: FunctionType) -> type:
    """Return a class whose `from_config` calls `maker`, because Keras accepts only classes here."""

    def from_config(config: Mapping[str, object], *args: object, **kwargs: object) -> object:
        return maker(**config)

    return type(maker.__name__, (), {"from_config": staticmethod(from_config)})


def _name_of_optimizer(filepath: str | Path) -> str:
    """Return the name of the optimizer's class in a file; "" without an optimizer, and for a folder of Keras 2."""
    if Path(filepath).is_dir():
        return ""
    if str(filepath).endswith((".h5", ".hdf5")):
        import h5py

        with h5py.File(filepath) as file:
            compiled = json.loads(file.attrs.get("training_config", "{}"))
            saved = compiled.get("optimizer_config")
    else:
        with ZipFile(filepath) as parts:
            compiled = json.loads(parts.read("config.json")).get("compile_config") or {}
            saved = compiled.get("optimizer")
    return str(saved["class_name"]) if isinstance(saved, dict) else ""


def _restore(optimizer: Optimizer, model: Model, filepath: str | Path) -> Optimizer:
    """Return a new optimizer like `optimizer` with its state from an HDF5 file.

    Keras (3.15) builds the optimizer of such a file without variables, so it has no state and cannot train."""
    import h5py

    made = type(optimizer).from_config(optimizer.get_config())
    made.build(model.trainable_variables)
    with h5py.File(filepath) as file:
        group = file.get("optimizer_weights")
        saved = [] if group is None else [group[name][()] for name in _names(group.attrs)]
    if len(saved) == len(made.variables):  # otherwise the file was written before the first step
        for variable, value in zip(made.variables, saved, strict=True):
            variable.assign(value)
    return made


def _names(attributes: Mapping[str, Sequence[str | bytes]]) -> list[str]:
    """Return the names of an optimizer's variables. Keras splits a list that is too long for one attribute."""
    parts = [attributes["weight_names"]] if "weight_names" in attributes else []
    while f"weight_names{len(parts)}" in attributes:
        parts.append(attributes[f"weight_names{len(parts)}"])
    return [name.decode() if isinstance(name, bytes) else name for part in parts for name in part]
