"""Embeddings in TensorFlow: of large tables, ranks exchange only the rows that a batch has looked up.

    farandole run -np 2 python examples/tensorflow_embeddings.py
    farandole run -np 2 python examples/tensorflow_embeddings.py --dense

The data are generated: clicks of users on items, which depend on their tastes.
"""

import argparse

import numpy as np
import tensorflow as tf

import farandole.tensorflow as hvd

USERS, ITEMS, TASTES = 1000, 300, 2


def make_clicks(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return users, items, and whether the user clicked on the item. A few items have many users."""
    tastes = np.random.default_rng(0)
    users, items = tastes.standard_normal((USERS, TASTES)), tastes.standard_normal((ITEMS, TASTES))
    random = np.random.default_rng(seed)
    user = random.integers(USERS, size=rows, dtype=np.int32)
    item = (ITEMS * random.random(rows) ** 2).astype(np.int32)
    return user, item, ((users[user] * items[item]).sum(1) > 0).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", action="store_true", help="send whole tables, to compare")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=256, help="of one rank")
    options = parser.parse_args()

    hvd.init()
    tf.random.set_seed(hvd.rank())
    clicks = make_clicks(options.steps * options.batch_size, seed=1 + hvd.rank())
    users, items = (tf.Variable(tf.random.normal((rows, TASTES), stddev=0.1)) for rows in (USERS, ITEMS))
    memories = [tf.Variable(tf.fill(each.shape, 1e-9)) for each in (users, items)]
    hvd.broadcast_variables([users, items], root_rank=0)

    @tf.function
    def step(user: tf.Tensor, item: tf.Tensor, clicked: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            likely = tf.reduce_sum(tf.gather(users, user) * tf.gather(items, item), 1)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(clicked, likely))
        # The gradients are slices: row numbers and values. The reduced ones have the rows of all ranks.
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=options.dense)
        gradients = tape.gradient(loss, [users, items])
        for table, memory, gradient in zip((users, items), memories, gradients, strict=True):
            adagrad(table, memory, gradient)
        touched = tf.size(tf.unique(user)[0]) + tf.size(tf.unique(item)[0])
        return loss, touched

    touched = 0
    for number in range(options.steps):
        batch = slice(number * options.batch_size, (number + 1) * options.batch_size)
        loss, rows = step(*(tf.constant(column[batch]) for column in clicks))
        touched += int(rows)
        if number % 50 == 49:
            mean = hvd.allreduce(loss, name="loss")
            if hvd.rank() == 0:
                print(f"step {number + 1}: loss {float(mean):.4f}", flush=True)

    user, item, clicked = make_clicks(2000, seed=1000 + hvd.rank())
    likely = tf.reduce_sum(tf.gather(users, user) * tf.gather(items, item), 1)
    right = tf.reduce_mean(tf.cast((likely > 0) == (clicked > 0), tf.float32))
    accuracy = float(hvd.allreduce(right, name="right"))
    if hvd.rank() == 0:
        share = touched / options.steps / (USERS + ITEMS)
        print(f"a step touches {100 * share:.0f} % of the rows on each rank")
        print(f"accuracy on other clicks: {accuracy:.3f}", flush=True)
    hvd.shutdown()


def adagrad(table: tf.Variable, memory: tf.Variable, gradient: tf.Tensor | tf.IndexedSlices, lr: float = 0.3) -> None:
    """Make an Adagrad step for the rows of `table` that have a gradient; a row may occur in it several times."""
    if isinstance(gradient, tf.IndexedSlices):
        rows, places = tf.unique(gradient.indices)
        values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
        memory.scatter_add(tf.IndexedSlices(values**2, rows))
        table.scatter_sub(tf.IndexedSlices(lr * values * tf.math.rsqrt(tf.gather(memory, rows)), rows))
    else:
        memory.assign_add(gradient**2)
        table.assign_sub(lr * gradient * tf.math.rsqrt(memory))


if __name__ == "__main__":
    main()
