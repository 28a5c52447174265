"""A training loop in TensorFlow: a gradient tape that averages over the ranks, within a `tf.function`.

farandole run -np 2 python examples/tensorflow_tape.py
"""

import argparse

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import farandole.tensorflow as hvd

HELD_OUT = 297  # digits that are not trained on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of one rank alone; several make fewer, together")
    parser.add_argument("--batch-size", type=int, default=32, help="of one rank")
    parser.add_argument("--lr", type=float, default=0.05, help="for the batch of one rank; multiplied by their number")
    options = parser.parse_args()

    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    digits = load_digits()
    images, targets = (digits.data / 16).astype("float32"), digits.target
    rows = tf.data.Dataset.from_tensor_slices((images[:-HELD_OUT], targets[:-HELD_OUT]))
    # Each rank reads its own part, in a new order in each pass.
    rows = rows.shard(hvd.size(), hvd.rank()).shuffle(len(images)).repeat().batch(options.batch_size)

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    optimizer = keras.optimizers.SGD(options.lr * hvd.size(), momentum=0.9)
    optimizer.build(model.trainable_variables)
    # All ranks begin with the weights of rank 0.
    hvd.broadcast_variables(model.variables + optimizer.variables, root_rank=0)

    @tf.function
    def step(images: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for number, (batch, wanted) in enumerate(rows.take(options.steps // hvd.size())):
        loss = step(batch, wanted)
        if number % 20 == 0:
            mean = hvd.allreduce(loss, name="loss")
            if hvd.rank() == 0:
                print(f"step {number}: loss {float(mean):.4f}", flush=True)

    # Each rank predicts its share of the held-out digits.
    mine = slice(len(images) - HELD_OUT + hvd.rank(), None, hvd.size())
    right = tf.reduce_sum(tf.cast(tf.argmax(model(images[mine]), 1) == targets[mine], tf.int32))
    accuracy = int(hvd.allreduce(right, op=hvd.Sum, name="right")) / HELD_OUT
    if hvd.rank() == 0:
        print(f"accuracy on {HELD_OUT} other digits: {accuracy:.3f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
