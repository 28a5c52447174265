"""The shared library that adds our operations to TensorFlow."""

import ctypes
import functools
from types import ModuleType

import tensorflow as tf

from farandole.core.plugins import core_table, plugin_path

__all__ = ["operations"]


@functools.cache
def operations() -> ModuleType:
    """Return TensorFlow's functions for our operations; the library is loaded at the first call.

    Raises `ImportError` where this TensorFlow is too old or built in another way, and where another copy of the library
    is in the process."""
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
