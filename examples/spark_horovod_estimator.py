"""The MNIST notebook of Databricks' HorovodEstimator, with smaller digits, and without the removed `tf.estimator`.

python -m farandole.compat examples/spark_horovod_estimator.py
"""

import argparse
import tempfile

import horovod.tensorflow as hvd
import tensorflow.compat.v1 as tf
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from sparkdl.estimators.horovod_estimator.estimator import HorovodEstimator

from farandole.tensorflow import estimator

HELD_OUT = 297
SERVING = tf.saved_model.signature_constants.DEFAULT_SERVING_SIGNATURE_DEF_KEY


def variable(name, shape):
    return tf.get_variable(name, shape, initializer=tf.glorot_uniform_initializer())


def model_fn(features, labels, mode, params):
    # Each row has the pixels of an image as a flat array.
    images = tf.reshape(features["image"], [-1, 8, 8, 1])
    hidden = tf.nn.relu(tf.nn.conv2d(images, variable("conv", [3, 3, 1, 16]), padding="SAME"))
    hidden = tf.reshape(tf.nn.max_pool2d(hidden, 2, 2, "SAME"), [-1, 4 * 4 * 16])
    hidden = tf.nn.relu(tf.matmul(hidden, variable("dense", [4 * 4 * 16, 64])))
    if mode == estimator.ModeKeys.TRAIN:
        hidden = tf.nn.dropout(hidden, rate=0.2)
    logits = tf.matmul(hidden, variable("logits", [64, 10]))
    predictions = {"classes": tf.argmax(logits, axis=1), "probabilities": tf.nn.softmax(logits)}

    if mode == estimator.ModeKeys.PREDICT:
        outputs = {SERVING: estimator.export.PredictOutput(predictions)}
        return estimator.EstimatorSpec(mode, predictions=predictions, export_outputs=outputs)

    loss = tf.losses.sparse_softmax_cross_entropy(labels=labels, logits=logits)
    if mode == estimator.ModeKeys.TRAIN:
        # Scale the learning rate by the number of processes, and average their gradients.
        optimizer = tf.train.MomentumOptimizer(params["learning_rate"] * hvd.size(), momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer)
        train_op = optimizer.minimize(loss, global_step=tf.train.get_global_step())
        return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
    metrics = {"accuracy": tf.metrics.accuracy(labels=labels, predictions=predictions["classes"])}
    return estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)


def main(steps, model_dir):
    spark = SparkSession.builder.getOrCreate()
    digits = load_digits()
    pixels, labels = (digits.data / 16).tolist(), digits.target.tolist()
    rows = [(image, label, place % 10 == 0) for place, (image, label) in enumerate(zip(pixels, labels, strict=True))]
    schema = "image array<float>, label_col bigint, isVal boolean"
    train_df = spark.createDataFrame(rows[:-HELD_OUT], schema)
    test_df = spark.createDataFrame(rows[-HELD_OUT:], schema)

    est = HorovodEstimator(
        modelFn=model_fn,
        featureMapping={"image": "image"},
        modelDir=model_dir,
        labelCol="label_col",
        batchSize=32,
        maxSteps=steps,
        isValidationCol="isVal",
        modelFnParams={"learning_rate": 0.02},
        saveCheckpointsSecs=30,
    )
    transformer = est.fit(train_df)
    predicted = transformer.transform(test_df)
    right = predicted.where("classes = label_col").count() / predicted.count()
    print(f"accuracy on {HELD_OUT} other digits: {right:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--model-dir", default="")
    options = parser.parse_args()
    main(options.steps, options.model_dir or tempfile.mkdtemp(prefix="horovod_estimator-"))
