"""Callback that keeps the best model."""

import keras

from farandole.keras.callbacks.base import CallbackOfBoth


class BestModelCheckpoint(CallbackOfBoth, keras.callbacks.ModelCheckpoint):  # type: ignore[misc]  # Keras ships no types
    """A `ModelCheckpoint` that keeps only the best model, in `filepath`, which can be set later.

    Use it on one rank, after `MetricAverageCallback` in the list."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        *,
        filepath: str | None = None,
    ) -> None:
        # Keras checks the path in its constructor.
        path = filepath or ("best.weights.h5" if save_weights_only else "best.keras")
        super().__init__(
            path,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = filepath

    def on_train_begin(self, logs: object = None) -> None:
        """Raise `ValueError` if `filepath` is not set."""
        super().on_train_begin(logs)
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint: set its filepath before the training begins")
