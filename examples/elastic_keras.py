"""Train with Keras' `fit` while ranks are killed, and come and go, on any of Keras' backends.

    farandole run -np 3 --min-np 1 --max-np 4 python examples/elastic_keras.py --epochs 100 --pause 0.02

Each rank prints its process: kill one by `kill -9`. The others go on with the last commit, and a new rank takes its
place.
"""

import argparse
import os
import time

import keras
from sklearn.datasets import load_digits

import farandole.keras as hvd

HELD_OUT, BATCH = 297, 120  # digits that are not trained on, and those of one step of all ranks
STEPS = 12  # of an epoch: 1,440 digits


class Report(keras.callbacks.Callback):
    """Prints the loss of each step on rank 0, and pauses."""

    def __init__(self, state: hvd.elastic.KerasState, pause: float) -> None:
        super().__init__()
        self._state, self._pause = state, pause

    def on_train_batch_end(self, batch: int, logs: dict[str, float]) -> None:
        if hvd.rank() == 0:
            step = self._state.epoch * STEPS + batch + 1
            print(f"step {step}: loss {float(logs['loss']):.4f}, {hvd.size()} ranks", flush=True)
        time.sleep(self._pause)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, for time to kill ranks")
    options = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(0)
    digits = load_digits()
    images, targets = (digits.data / 16).astype("float32"), digits.target
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )

    @hvd.elastic.run
    def train(state: hvd.elastic.KerasState) -> None:
        print(f"process {os.getpid()} is rank {hvd.rank()} of {hvd.size()}", flush=True)
        share = slice(hvd.rank(), STEPS * BATCH, hvd.size())
        model.fit(
            images[share],
            targets[share],
            batch_size=BATCH // hvd.size(),
            initial_epoch=state.epoch,
            epochs=options.epochs,
            callbacks=[
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.UpdateBatchStateCallback(state),
                Report(state, options.pause),
                # Last, because it saves what the others note.
                hvd.elastic.CommitStateCallback(state, batches_per_commit=1),
            ],
            verbose=0,
        )

    train(hvd.elastic.KerasState(model, epoch=0, batch=0))
    if hvd.rank() == 0:
        right = model.predict(images[-HELD_OUT:], verbose=0).argmax(1) == targets[-HELD_OUT:]
        print(f"accuracy on {HELD_OUT} other digits: {right.mean():.3f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
