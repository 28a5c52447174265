"""Loader for saved models that makes their optimizers distributed."""

import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import keras

from farandole.core.operations.compression import Compressor
from farandole.keras.backend import Model, Tensor
from farandole.keras.compression import Compression
from farandole.keras.front import Front
from farandole.keras.generation import generation_of_files
from farandole.keras.optimizer import DistributedOptimizer

if TYPE_CHECKING:
    import h5py


def load_model(
    filepath: "str | Path | h5py.File",
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, object] | None = None,
    compression: Compressor[Tensor] = Compression.none,
    legacy_opts: bool = False,
) -> Model:
    """Load a model saved with any optimizer, distributed or not, and keep the optimizer's state.

    `filepath` is a path or an open `h5py.File`. It loads files of Keras 2 if `tf.keras` is tf_keras.
    `custom_optimizers` are classes that are not part of Keras. `custom_objects` may map the name of the optimizer's
    class to a function that makes the optimizer from its config; a distributed optimizer that it returns is used as it
    is. `legacy_opts` is an argument of Horovod's: tf_keras loads a legacy optimizer if one was saved. Raises
    `ValueError` for `legacy_opts` with Keras 3, which has no legacy optimizers, and the errors of Keras."""
    generation = generation_of_files()
    if legacy_opts and not generation.has_legacy:
        raise ValueError(f"legacy_opts: Keras {keras.__version__} has no legacy optimizers")
    objects: dict[str, object] = {}
    for kind in custom_optimizers or ():
        objects |= {kind.__name__: kind, keras.saving.get_registered_name(kind): kind}
    objects |= custom_objects or {}
    with _path_of(filepath) as path:
        model = generation.load(path, objects)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not isinstance(optimizer, Front):
        model.optimizer = DistributedOptimizer(optimizer, compression=compression)
    return model


@contextmanager
def _path_of(given: "str | Path | h5py.File") -> Iterator[str | Path]:
    """Yield a path as it is, and for an open `h5py.File` the path of a copy: it may be in memory only."""
    h5py = sys.modules.get("h5py")
    if h5py is None or not isinstance(given, h5py.File):
        yield given
        return
    given.flush()
    with tempfile.TemporaryDirectory(prefix="farandole-keras-") as folder:
        path = Path(folder, "model.h5")
        path.write_bytes(given.id.get_file_image())
        yield path
