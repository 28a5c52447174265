import horovod.tensorflow.keras as hvd
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
opt = tf.optimizers.Adam(0.001 * hvd.size())
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])
# This trains one step together with the others: those that are there make it in their reset.
model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)
state = hvd.elastic.KerasState(model, batch=0, epoch=0)


def on_state_reset():
    state.model.optimizer.learning_rate.assign(0.001 * hvd.size())
    state.model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)


state.register_reset_callbacks([on_state_reset])


class Show(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        show(hvd, state.epoch * 1000 + state.batch)

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = bool(hvd.allreduce(is_over(), name="over", op=hvd.Sum))


callbacks = [
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    Show(),
    hvd.elastic.CommitStateCallback(state),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))


@hvd.elastic.run
def train(state):
    state.model.fit(
        dataset, steps_per_epoch=60 // hvd.size(), epochs=10_000 - state.epoch, callbacks=callbacks, verbose=0
    )


train(state)
done(model.get_weights())
