"""Train in TensorFlow while ranks are killed, and come and go; the traced step goes on with the ranks that there are.

    farandole run -np 3 --min-np 1 --max-np 4 python examples/elastic_tensorflow.py --steps 2000 --pause 0.02

Each rank prints its process: kill one by `kill -9`. The others go on with the last commit, and a new rank takes its
place.
"""

import argparse
import os
import time

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import farandole.tensorflow as hvd

HELD_OUT, BATCH = 297, 120  # digits that are not trained on, and those of one step of all ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, for time to kill ranks")
    options = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(0)
    digits = load_digits()
    images, targets = (digits.data / 16).astype("float32"), digits.target
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)

    @tf.function(reduce_retracing=True)
    def step(images: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @hvd.elastic.run
    def train(state: hvd.elastic.TensorFlowKerasState) -> None:
        print(f"process {os.getpid()} is rank {hvd.rank()} of {hvd.size()}", flush=True)
        while state.step < options.steps:
            order = np.random.default_rng(state.step).permutation(len(images) - HELD_OUT)
            mine = order[:BATCH][hvd.rank() :: hvd.size()]
            loss = hvd.allreduce(step(images[mine], targets[mine]), name="loss")
            state.step += 1
            state.commit()
            if hvd.rank() == 0:
                print(f"step {state.step}: loss {float(loss):.4f}, {hvd.size()} ranks", flush=True)
            time.sleep(options.pause)

    train(hvd.elastic.TensorFlowKerasState(model, optimizer, step=0))
    if hvd.rank() == 0:
        right = tf.argmax(model(images[-HELD_OUT:]), 1) == targets[-HELD_OUT:]
        print(
            f"accuracy on {HELD_OUT} other digits: {float(tf.reduce_mean(tf.cast(right, tf.float32))):.3f}", flush=True
        )
    hvd.shutdown()


if __name__ == "__main__":
    main()
