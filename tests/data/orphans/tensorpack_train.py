"""Training of a linear model with tensorpack's HorovodTrainer; each rank prints its weights."""

import sys
from collections.abc import Iterator

import numpy as np
import tensorflow as tf
from tensorpack import ModelDesc, QueueInput, TrainConfig, launch_train_with_config
from tensorpack.callbacks import Callback
from tensorpack.dataflow import DataFromGenerator
from tensorpack.train import HorovodTrainer

tf1 = tf.compat.v1
tf1.disable_v2_behavior()
tf.global_variables = tf1.global_variables  # HorovodTrainer calls it by this name, which TensorFlow 2 lacks


class Line(ModelDesc):
    """Four weights that learn to sum."""

    def inputs(self):
        return [tf.TensorSpec([None, 4], tf.float32, "rows"), tf.TensorSpec([None, 1], tf.float32, "sums")]

    def build_graph(self, rows, sums):
        weights = tf1.get_variable("weights", [4, 1], initializer=tf1.random_normal_initializer())
        return tf.reduce_mean(tf.square(tf.matmul(rows, weights) - sums), name="cost")

    def optimizer(self):
        return tf1.train.GradientDescentOptimizer(0.5)


class Report(Callback):
    """Print the weights of this rank after the training."""

    _chief_only = False

    def _after_train(self):
        (weights,) = self.trainer.sess.run(tf1.trainable_variables())
        sys.stdout.write(f"weights: {[round(float(each), 3) for each in weights[:, 0]]}\n")


def batches() -> Iterator[list[np.ndarray]]:
    generator = np.random.default_rng()
    while True:
        rows = generator.random((32, 4), np.float32)
        yield [rows, rows.sum(1, keepdims=True)]


data = QueueInput(DataFromGenerator(batches))
config = TrainConfig(model=Line(), data=data, callbacks=[Report()], steps_per_epoch=50, max_epoch=2)
launch_train_with_config(config, HorovodTrainer())
