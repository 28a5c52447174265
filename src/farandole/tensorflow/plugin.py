"""Loader for the shared library with the TensorFlow operations."""

import ctypes
import functools
from types import ModuleType

import tensorflow as tf

from farandole.core.plugins import core_table, plugin_path


@functools.cache
def operations() -> ModuleType:
    """Load the library at the first call, and return TensorFlow's functions for its operations.

    Raises `ImportError` if this TensorFlow is too old or built differently, or if the process holds another copy of the
    library."""
    path = plugin_path("tensorflow")
    if not path.exists():
        raise ImportError(f"farandole was built without its TensorFlow plugin: there is no {path}")
    functions: ModuleType = tf.load_op_library(str(path))
    connect = ctypes.CDLL(str(path)).farandole_tensorflow_connect
    connect.argtypes, connect.restype = [ctypes.c_void_p], ctypes.c_char_p
    missing = connect(core_table())
    if missing is not None:
        raise ImportError(f"farandole's operations need {missing.decode()} (TensorFlow {tf.__version__})")
    return functions
