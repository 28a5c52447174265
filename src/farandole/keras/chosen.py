"""The backend of this process, which Keras chooses when it is imported."""

import keras

from farandole.keras.backend import Backend

__all__ = ["backend"]


def backend() -> Backend:
    """Return the module for the backend that Keras runs on, and import its framework's binding.

    Raises `NotImplementedError` for a backend that cannot train."""
    # The other frameworks need not be installed, and take seconds to import.
    match name := keras.backend.backend():
        case "torch":
            from farandole.keras import on_torch

            return on_torch
        case "tensorflow":
            from farandole.keras import on_tensorflow

            return on_tensorflow
        case "jax":
            from farandole.keras import on_jax

            return on_jax
    raise NotImplementedError(f"Keras runs on {name}; farandole.keras works on its tensorflow, torch and jax backends")
