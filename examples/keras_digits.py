"""Train on handwritten digits with Keras' `fit`, by Horovod's optimizer and callbacks, on any of Keras' backends.

farandole run -np 2 python examples/keras_digits.py
KERAS_BACKEND=torch farandole run -np 2 python examples/keras_digits.py
"""

import argparse
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

import farandole.keras as hvd

HELD_OUT = 297  # digits that are not trained on


def shares(rank: int, size: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return this rank's images and targets for training and for validation, as many as every other rank's."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype("float32")
    parts = slice(None, -HELD_OUT), slice(-HELD_OUT, None)
    train, held_out = ((images[part], digits.target[part]) for part in parts)

    def share(values: np.ndarray) -> np.ndarray:
        return values[: len(values) // size * size][rank::size]

    return tuple(map(share, train)), tuple(map(share, held_out))


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of one rank")
    parser.add_argument("--lr", type=float, default=0.02, help="for the batch of one rank; multiplied by their number")
    parser.add_argument("--checkpoint", type=Path, help="where rank 0 keeps the model after each epoch: FILE.keras")
    options = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    train, held_out = shares(hvd.rank(), hvd.size())

    model = make_model()
    optimizer = keras.optimizers.SGD(options.lr * hvd.size(), momentum=0.9)
    model.compile(
        optimizer=hvd.DistributedOptimizer(optimizer),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # all ranks begin with the weights of rank 0
        hvd.callbacks.MetricAverageCallback(),  # before callbacks that look at metrics
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=options.lr * hvd.size(), warmup_epochs=2),
    ]
    if options.checkpoint is not None and hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(options.checkpoint))
    history = model.fit(
        *train,
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation_data=held_out,
        callbacks=callbacks,
        verbose=0,
    ).history
    if hvd.rank() == 0:
        for epoch, loss in enumerate(history["loss"]):
            print(f"epoch {epoch}: loss {loss:.4f}")
        print(f"accuracy on {HELD_OUT} other digits: {history['val_accuracy'][-1]:.3f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
