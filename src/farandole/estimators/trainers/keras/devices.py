"""The device of a rank that trains with Keras, on each of its backends."""

import ctypes
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import keras

from farandole.errors import ConfigError
from farandole.estimators.trainers.gpus import gpus_seen, seen_by_torch


def visible_gpus() -> tuple[int, str]:
    """Return how many GPUs Keras' backend sees, and a text about them; a `Look`."""
    backend = keras.config.backend()
    if backend == "torch":
        return seen_by_torch()
    if backend == "tensorflow":
        import tensorflow as tf

        return gpus_seen("TensorFlow", len(tf.config.list_physical_devices("GPU")))
    if not any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return 0, "JAX has no plugin for CUDA"
    return gpus_seen("NVIDIA's driver", _seen_by_driver())


def own_device(gpu: int | None) -> AbstractContextManager[object]:
    """Restrict the rank to the GPU with the index `gpu`, or to the CPU for None. Enter the result before computing.

    Raises `ConfigError` if TensorFlow has started its devices already."""
    backend = keras.config.backend()
    if backend == "torch":
        import torch

        if gpu is None:
            return keras.device("cpu:0") if torch.cuda.is_available() else nullcontext()
        torch.cuda.set_device(gpu)
    elif backend == "tensorflow":
        _show_to_tensorflow(gpu)
    elif gpu is not None:
        _set_for_jax("jax_cuda_visible_devices", str(gpu))
    elif visible_gpus()[0]:
        _set_for_jax("jax_platforms", "cpu")
    return nullcontext()


def _show_to_tensorflow(gpu: int | None) -> None:
    import tensorflow as tf

    there = tf.config.list_physical_devices("GPU")
    if not there:
        return
    own = [] if gpu is None else [there[gpu]]
    try:
        for each in own:
            tf.config.experimental.set_memory_growth(each, True)  # otherwise TensorFlow takes all memory of the GPU
        tf.config.set_visible_devices(own, "GPU")
    except RuntimeError as error:
        raise ConfigError("use_gpu", f"comes too late, as TensorFlow has started its devices: {error}") from error


def _set_for_jax(name: str, value: str) -> None:
    import jax

    config: Any = jax.config
    config.update(name, value)


def _seen_by_driver() -> int:
    """Return how many GPUs the process sees, without starting JAX, which would take all of them."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0
