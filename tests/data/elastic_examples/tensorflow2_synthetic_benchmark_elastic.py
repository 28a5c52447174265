import timeit

import horovod.tensorflow as hvd
import tensorflow as tf
from common import done, is_over, show

hvd.init()
lr = 0.01
model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(4, 3, strides=4, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(1000, activation="softmax"),
    ]
)
opt = tf.optimizers.SGD(lr * hvd.size())
data = tf.random.uniform([8, 64, 64, 3])
target = tf.random.uniform([8, 1], minval=0, maxval=999, dtype=tf.int64)


@tf.function
def train_one_batch(allreduce=True):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.losses.sparse_categorical_crossentropy(target, model(data, training=True)))
    if allreduce:
        tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
    gradients = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def benchmark_step(state):
    train_one_batch()
    state.batch += 1
    state.steps += 1
    show(hvd, state.steps)
    if state.batch == 2:
        state.batch = 0
        state.commit()


train_one_batch(allreduce=False)


@hvd.elastic.run
def run_benchmark(state):
    if not state.warm:
        timeit.timeit(lambda: benchmark_step(state), number=2)
        state.warm = True
        state.commit()
    for number in range(state.iter, 10_000):
        time = timeit.timeit(lambda: benchmark_step(state), number=3)
        state.img_secs.append(8 * 3 / time)
        state.iter = number
        state.commit()
        if hvd.allreduce(tf.constant(is_over()), op=hvd.Max).numpy():
            return


def on_state_reset():
    opt.learning_rate.assign(lr * hvd.size())


state = hvd.elastic.TensorFlowKerasState(model, opt, img_secs=[], iter=0, batch=0, warm=False, steps=0)
state.register_reset_callbacks([on_state_reset])
run_benchmark(state)
done(model.get_weights())
