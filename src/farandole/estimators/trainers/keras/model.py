"""Serialization of Keras models, optimizers and losses, and conversion of columns to the inputs of models."""

import importlib
import io
import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from farandole.data import Number
from farandole.errors import ConfigError, DataError
from farandole.estimators.trainers.first_row import TOGETHER

if TYPE_CHECKING:
    # Importing these would import Keras, whose backend `choose_backend` chooses.
    from farandole.keras.backend import Model, Optimizer, Tensor, Variable
    from farandole.keras.generation import Generation

Array: TypeAlias = NDArray[np.generic]
T = TypeVar("T")
Structure: TypeAlias = T | tuple[T, ...] | dict[str, T]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The types and shapes in which a model takes feature columns; usable without the model."""

    columns: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, ...]  # of one row; None: as the column comes
    names: tuple[str, ...] | None = None  # of the columns' inputs, if the model takes a dictionary

    @classmethod
    def of(cls, model: "Model", columns: Sequence[str]) -> "Inputs":
        """Read them from a functional or sequential model; a subclassed one takes `floatx` in the columns' shapes.

        Inputs in a dictionary are those of the columns of their names or, if the names differ, in their sorted order.
        Raises `ConfigError` unless there are as many columns as inputs."""
        import keras

        given = _inputs_of(model)
        if given is None:
            floats = _generation_of(model).library.backend.floatx()
            return cls(columns=tuple(columns), dtypes=(floats,) * len(columns), shapes=(None,) * len(columns))
        if len(given) != len(columns):
            inputs = ", ".join(str(list(each.shape)) for each in given)
            raise ConfigError(
                "feature_cols",
                f"are {len(columns)} columns, the model has {len(given)} inputs ({inputs}); {TOGETHER}",
            )
        names = _input_names(model)
        if names is not None:
            by_name = dict(zip(names, given, strict=True))
            names = list(columns) if set(columns) == set(names) else names
            given = [by_name[name] for name in names]
        shapes = tuple(None if None in each.shape[1:] else tuple(each.shape[1:]) for each in given)
        dtypes = tuple(held_dtype(keras.backend.standardize_dtype(each.dtype)) for each in given)
        return cls(columns=tuple(columns), dtypes=dtypes, shapes=shapes, names=None if names is None else tuple(names))

    def arrays(self, columns: Mapping[str, NDArray[Number]]) -> Structure[Array]:
        """Return the model's input, a tuple or a dictionary if it takes several.

        Raises `DataError` for numbers that an integer type cannot hold and for shapes that do not fit."""
        return self.structured([self._array(place, columns[name]) for place, name in enumerate(self.columns)])

    def structured(self, each: Sequence[T]) -> Structure[T]:
        """Return one value per column in the structure of the model's input."""
        if self.names is not None:
            return dict(zip(self.names, each, strict=True))
        return each[0] if len(each) == 1 else tuple(each)

    def describe(self, kinds: Mapping[str, str]) -> str:
        """Return a text with the type of each column, and the type and shape of the input that it becomes."""
        each = zip(self.columns, self.dtypes, self.shapes, strict=True)
        return ", ".join(
            f"{name} {kinds[name]} as {dtype}" + ("" if shape is None else f" {['rows', *shape]}".replace("'", ""))
            for name, dtype, shape in each
        )

    def _array(self, place: int, values: NDArray[Number]) -> Array:
        name, dtype, shape = self.columns[place], self.dtypes[place], self.shapes[place]
        if (values.dtype == object) != (dtype == "string"):
            kind = "texts" if values.dtype == object else "numbers"
            raise DataError(name, f"holds {kind}, and the model takes {dtype}")
        if dtype == "string":
            return values if shape is None else values.reshape(len(values), *shape)
        with np.errstate(invalid="ignore"):  # a warning for NaN, which is refused below
            cast = values.astype(dtype)
        # Any float may round in another float. As an integer or a boolean it would lose its fraction or its size, and
        # NaN becomes a number.
        whole = values.dtype.kind in "iu" or cast.dtype.kind in "iub"
        if whole and not np.array_equal(cast.astype(values.dtype), values):
            raise DataError(name, f"holds numbers that {dtype} cannot hold; number them from 0")
        if shape is None:
            return cast
        if int(np.prod(shape)) != int(np.prod(values.shape[1:])):
            raise DataError(name, f"rows of shape {list(values.shape[1:])} do not fit the model's input {list(shape)}")
        return cast.reshape(len(values), *shape)


def outputs_of(given: object) -> "list[Tensor]":
    """Return a model's outputs as a list; those in a dictionary by their sorted names, as Keras takes their losses."""
    if isinstance(given, Mapping):
        return [given[name] for name in sorted(given)]
    return list(given) if isinstance(given, (list, tuple)) else [given]


def held_dtype(dtype: str) -> str:
    """Return the type in which Keras' backend holds integers of `dtype`; JAX cuts 64 bits to 32 by default."""
    import keras

    if dtype not in ("int64", "uint64") or keras.config.backend() != "jax":
        return dtype
    import jax

    held: str = jax.dtypes.canonicalize_dtype(dtype).name
    return held


def choose_backend(name: str) -> None:
    """Import Keras with the backend `name`. Raises `ConfigError` if the process has imported it with another one."""
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = name
    import keras

    if keras.config.backend() != name:
        raise ConfigError("model", f"is of Keras' {name} backend, but this process runs on {keras.config.backend()}")


def dump_model(model: "Model", custom_objects: Mapping[str, object] | None = None) -> bytes:
    """Return the model, in Keras' format, with its custom objects."""
    pickled: bytes = cloudpickle.dumps((model_file(model), all_custom_objects(model, custom_objects or {})))
    return pickled


def model_file(model: "Model") -> bytes:
    """Return the content of the model's `.keras` file."""
    with tempfile.TemporaryDirectory(prefix="farandole-keras-") as folder:
        path = Path(folder, "model.keras")
        model.save(path)
        return path.read_bytes()


def all_custom_objects(model: "Model", given: Mapping[str, object]) -> dict[str, object]:
    """Return the custom objects `given`, and the classes of the model's layers."""
    return {**_custom_classes(model), **given}


@dataclass(frozen=True)
class DumpedModel:
    """A compiled model by value, with optimizer, loss and metrics."""

    content: bytes

    @classmethod
    def of(cls, model: "Model") -> "DumpedModel":
        """Pickle the model, with the arguments of its `compile` in Keras' configuration."""
        if getattr(model, "optimizer", None) is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)  # otherwise Keras warns when it reads the model
        return cls(dump_model(model))

    def load(self) -> "Model":
        """Return the model, compiled."""
        content, custom_objects = cloudpickle.loads(self.content)
        return read_model(content, custom_objects, compiled=True)


def load_model(dumped: bytes) -> "Model":
    """Return the model in a result of `dump_model`, without optimizer and loss. Unpickles."""
    content, custom_objects = cloudpickle.loads(dumped)
    return read_model(content, custom_objects)


def read_model(content: bytes, custom_objects: Mapping[str, object], *, compiled: bool = False) -> "Model":
    """Return the model in a `.keras` file, of Keras 3 or of tf_keras."""
    with tempfile.TemporaryDirectory(prefix="farandole-keras-") as folder:
        path = Path(folder, "model.keras")
        path.write_bytes(content)
        with zipfile.ZipFile(path) as file:
            version = json.loads(file.read("metadata.json"))["keras_version"]
        library = importlib.import_module("tf_keras" if version.startswith("2.") else "keras")
        # safe_mode=False runs code in the file. Like a pickle, the file comes from the user's own program.
        return library.saving.load_model(path, custom_objects=dict(custom_objects), compile=compiled, safe_mode=False)


def dump_object(value: Any) -> object:
    """Return an optimizer, a loss, a metric, or a list or dict of such, in a form that is pickled by value.

    Keras' own pickles of these can be read only where custom classes are registered."""
    if isinstance(value, (list, tuple)):
        return [dump_object(each) for each in value]
    if isinstance(value, dict):
        return {name: dump_object(each) for name, each in value.items()}
    generation = _generation_of(value)
    if isinstance(value, generation.KINDS):
        schedule = {"learning_rate": generation.rate(value)} if generation.has_schedule(value) else {}
        return _FromConfig.of(value, schedule)
    if isinstance(value, generation.library.metrics.Metric):
        return _FromConfig.of(value, {})
    if isinstance(value, generation.library.losses.Loss):
        return _FromState(type(value), dict(vars(value)))
    return value


def load_object(value: object) -> Any:
    """Return new objects like those that `dump_object` was given."""
    if isinstance(value, list):
        return [load_object(each) for each in value]
    if isinstance(value, dict):
        return {name: load_object(each) for name, each in value.items()}
    if isinstance(value, _FromConfig):
        return value.kind.from_config(value.config)
    if isinstance(value, _FromState):
        made = value.kind.__new__(value.kind)
        vars(made).update(value.state)
        return made
    return value


def dump_state(weights: Sequence[Array], optimizer: Sequence[Array] | None, best: float | None = None) -> bytes:
    """Return arrays in NumPy's format, those of types that NumPy does not have, such as bfloat16, as float32."""
    named = {f"weights{place}": each for place, each in enumerate(weights)}
    named |= {f"optimizer{place}": each for place, each in enumerate(optimizer or ())}
    named = {name: each.astype(np.float32) if each.dtype.isbuiltin == 2 else each for name, each in named.items()}
    if best is not None:
        named["best"] = np.array(best)
    file = io.BytesIO()
    np.savez(file, **named)  # type: ignore[arg-type]
    return file.getvalue()


def load_state(state: bytes) -> tuple[list[Array], list[Array], float | None]:
    """Return what `dump_state` was given, without unpickling anything; no variables if it had no optimizer."""
    with np.load(io.BytesIO(state), allow_pickle=False) as held:
        best = float(held["best"]) if "best" in held else None
        return _numbered(held, "weights"), _numbered(held, "optimizer"), best


@dataclass(frozen=True)
class _FromConfig:
    kind: type[Any]
    config: dict[str, object]

    @classmethod
    def of(cls, value: Any, changes: dict[str, object]) -> "_FromConfig":
        return cls(type(value), value.get_config() | changes)


@dataclass(frozen=True)
class _FromState:
    kind: Any
    state: dict[str, object]


def optimizer_variables(optimizer: "Optimizer", trained: "Sequence[Variable]") -> "list[Variable]":
    """Return the variables of an optimizer, which it builds if needed, with that of the learning rate."""
    generation = _generation_of(optimizer)
    held = generation.build(optimizer, trained)
    rate = [] if generation.has_schedule(optimizer) else [generation.rate(optimizer)]
    return held + [each for each in rate if not any(each is one for one in held)]


def _generation_of(value: object) -> "Generation":
    from farandole.keras.generation import generation_of  # imports Keras, whose backend `choose_backend` chooses

    return generation_of(value)


def _numbered(held: Mapping[str, Array], name: str) -> list[Array]:
    count = sum(each.startswith(name) for each in held)
    return [held[f"{name}{place}"] for place in range(count)]


def _inputs_of(model: "Model") -> "list[Tensor] | None":
    try:
        return list(model.inputs)
    except (AttributeError, TypeError, ValueError):
        return None  # a subclassed model has no symbolic inputs


def _input_names(model: "Model") -> list[str] | None:
    """Return the names of inputs in a dictionary, in the order of `_inputs_of`; None if they are in no dictionary."""
    given = getattr(model, "_inputs_struct", getattr(model, "_nested_inputs", None))  # the latter of Keras 2
    flat = isinstance(given, Mapping) and not any(isinstance(each, (Mapping, list, tuple)) for each in given.values())
    return sorted(given) if given is not None and flat else None


def _custom_classes(model: "Model") -> dict[str, type]:
    """Return the classes of the model and its layers that are not Keras' own, under all names that Keras looks for."""
    found: dict[str, type] = {}
    library = _generation_of(model).library
    for kind in {type(layer) for layer in model._flatten_layers()}:
        if kind.__module__.partition(".")[0] != library.__name__:
            found |= {kind.__name__: kind, library.saving.get_registered_name(kind): kind}
    return found
