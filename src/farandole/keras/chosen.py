"""The backend of this process, which Keras chooses when it is imported."""

from importlib import import_module
from typing import cast

import keras

from farandole.keras.backend import Backend

_BACKENDS = ("tensorflow", "torch", "jax")


def backend() -> Backend:
    """Return the module for the backend that Keras runs on, and import its framework's binding.

    Raises `NotImplementedError` for a backend that cannot train."""
    name = keras.backend.backend()
    if name not in _BACKENDS:
        raise NotImplementedError(
            f"Keras runs on {name}; farandole.keras works on its tensorflow, torch and jax backends"
        )
    # By name and late: the other frameworks need not be installed, and take seconds to import.
    return cast(Backend, import_module(f"farandole.keras.on_{name}"))
