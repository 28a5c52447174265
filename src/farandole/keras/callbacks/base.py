"""Base of the callbacks, which prepares a model's optimizer before training."""

import logging
from typing import Any

import keras

from farandole.keras.optimizer import Distributed, Front, take_scaler_in_front

__all__ = ["Callback"]

log = logging.getLogger(__name__)


class Callback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
    """A callback that lets the model's optimizer exchange gradients when Keras has wrapped it."""

    def set_model(self, model: Any) -> None:
        """Keep the model, move a loss scaler in front of its optimizer, and switch XLA off if ranks communicate."""
        super().set_model(model)
        optimizer = getattr(model, "optimizer", None)
        if not isinstance(optimizer, Front) and isinstance(getattr(optimizer, "inner_optimizer", None), Distributed):
            # compile() has put a LossScaleOptimizer around a distributed optimizer.
            model.optimizer = optimizer = take_scaler_in_front(optimizer)
        exchanges = isinstance(optimizer, Front) and not optimizer._exchange.alone
        if exchanges and keras.backend.backend() == "tensorflow" and model.jit_compile:
            log.warning("%s: jit_compile is switched off, as XLA cannot compile collectives", model.name)
            model.jit_compile = False
