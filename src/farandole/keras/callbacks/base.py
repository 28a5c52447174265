"""Base of the callbacks, which prepares a model's optimizer before training."""

import logging

import keras

from farandole.keras.backend import Model
from farandole.keras.front import Front
from farandole.keras.keras_3 import Distributed, take_scaler_in_front

log = logging.getLogger(__name__)

# In the parameters of `fit`, which its callbacks share: batches of its first epoch that an elastic job did before.
BATCHES_BEFORE = "batches_before"


class CallbackOfBoth(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
    """A callback of Keras 3 that `fit` of tf_keras, which is Keras 2, takes too."""

    # Keras 2 calls these methods, to skip the hooks of batches that no callback needs.
    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return self._overrides("on_test_batch_begin", "on_test_batch_end")

    def _implements_predict_batch_hooks(self) -> bool:
        return self._overrides("on_predict_batch_begin", "on_predict_batch_end")

    def _overrides(self, *names: str) -> bool:
        return any(getattr(type(self), name) is not getattr(keras.callbacks.Callback, name) for name in names)


class Callback(CallbackOfBoth):
    """A callback that lets the model's optimizer exchange gradients when Keras has wrapped it."""

    def set_model(self, model: Model) -> None:
        """Keep the model, move a loss scaler in front of its optimizer, and switch XLA off if ranks communicate."""
        super().set_model(model)
        optimizer = getattr(model, "optimizer", None)
        if not isinstance(optimizer, Front) and isinstance(getattr(optimizer, "inner_optimizer", None), Distributed):
            # compile() has put a LossScaleOptimizer around a distributed optimizer.
            model.optimizer = optimizer = take_scaler_in_front(optimizer)
        # A scaler of Keras 2 may stay around it: the ranks' gradients are reduced before it checks for infinities.
        front = optimizer if isinstance(optimizer, Front) else getattr(optimizer, "inner_optimizer", None)
        exchanges = isinstance(front, Front) and not front._exchange.alone
        if exchanges and keras.backend.backend() == "tensorflow" and model.jit_compile:
            log.warning("%s: jit_compile is switched off, as XLA cannot compile collectives", model.name)
            model.jit_compile = False
