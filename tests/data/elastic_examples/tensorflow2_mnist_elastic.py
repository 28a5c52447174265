import horovod.tensorflow as hvd
import tensorflow as tf
from common import digits, done, is_over, show

hvd.init()
images, labels = digits(2048)
dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(images[..., tf.newaxis] / 255.0, tf.float32), tf.cast(labels, tf.int64))
)
dataset = dataset.repeat().shuffle(1000).batch(16)
model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(4, [3, 3], activation="relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Dropout(0.25),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()
lr = 0.001
opt = tf.optimizers.Adam(lr * hvd.size())


@tf.function
def training_step(images, labels, allreduce=True):
    with tf.GradientTape() as tape:
        value = loss(labels, model(images, training=True))
    if allreduce:
        tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(value, model.trainable_variables)
    opt.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return value


for images, labels in dataset.take(1):
    training_step(images, labels, allreduce=False)


@hvd.elastic.run
def train(state):
    start = state.batch
    for index, (images, labels) in enumerate(dataset.skip(state.batch).take(100_000 // hvd.size())):
        state.batch = start + index
        training_step(images, labels)
        show(hvd, state.batch)
        state.commit()
        if hvd.allreduce(tf.constant(is_over()), op=hvd.Max).numpy():
            return


def on_state_reset():
    opt.learning_rate.assign(lr * hvd.size())


state = hvd.elastic.TensorFlowKerasState(model, opt, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
if hvd.rank() == 0:
    tf.train.Checkpoint(model=model, optimizer=opt).save("./checkpoints")
done(model.get_weights())
