"""An unchanged TensorFlow 1 program, with sessions and hooks, for Horovod and HorovodRunner.

horovodrun -np 2 python examples/tensorflow_v1_session.py
python -m farandole.compat examples/tensorflow_v1_session.py --runner 2
"""

import argparse

HELD_OUT = 297


def train(learning_rate, steps, batch_size, checkpoint_dir=None):
    import horovod.tensorflow as hvd
    import numpy as np
    import tensorflow.compat.v1 as tf
    from sklearn.datasets import load_digits

    def dense(inputs, name, units):
        with tf.variable_scope(name):
            width = int(inputs.shape[-1])
            kernel = tf.get_variable("kernel", [width, units], initializer=tf.glorot_uniform_initializer())
            bias = tf.get_variable("bias", [units], initializer=tf.zeros_initializer())
        return tf.matmul(inputs, kernel) + bias

    def network(images):
        with tf.variable_scope("network", reuse=tf.AUTO_REUSE):
            return dense(tf.nn.relu(dense(images, "hidden", 64)), "logits", 10)

    tf.disable_eager_execution()
    hvd.init()

    # Pin the GPU that belongs to this process.
    config = tf.ConfigProto(intra_op_parallelism_threads=1)
    config.gpu_options.allow_growth = True
    config.gpu_options.visible_device_list = str(hvd.local_rank())

    # Each process trains on its own shard.
    digits = load_digits()
    images, targets = (digits.data / 16).astype(np.float32), digits.target
    train_images, train_targets = (each[:-HELD_OUT][hvd.rank() :: hvd.size()] for each in (images, targets))
    test_images, test_targets = (each[-HELD_OUT:] for each in (images, targets))

    image = tf.placeholder(tf.float32, [None, 64], name="image")
    target = tf.placeholder(tf.int64, [None], name="target")
    loss = tf.losses.sparse_softmax_cross_entropy(target, network(image))
    right = tf.equal(tf.argmax(network(test_images), 1), test_targets)
    accuracy = hvd.allreduce(tf.reduce_mean(tf.cast(right, tf.float32)), name="accuracy")

    # Scale the learning rate by the number of processes, and average their gradients.
    optimizer = tf.train.MomentumOptimizer(learning_rate * hvd.size(), 0.9)
    optimizer = hvd.DistributedOptimizer(optimizer)
    global_step = tf.train.get_or_create_global_step()
    train_op = optimizer.minimize(loss, global_step=global_step)

    hooks = [
        # All processes start with the variables of rank 0, which are new or from a checkpoint.
        hvd.BroadcastGlobalVariablesHook(0),
        tf.train.StopAtStepHook(last_step=steps // hvd.size()),
    ]
    # Save checkpoints only on rank 0, so that processes do not overwrite each other's.
    checkpoint_dir = checkpoint_dir if hvd.rank() == 0 else None
    random = np.random.RandomState(hvd.rank())
    reached = 0.0
    with tf.train.MonitoredTrainingSession(checkpoint_dir=checkpoint_dir, hooks=hooks, config=config) as session:
        while not session.should_stop():
            rows = random.randint(len(train_images), size=batch_size)
            fed = {image: train_images[rows], target: train_targets[rows]}
            _, step, value, reached = session.run([train_op, global_step, loss, accuracy], feed_dict=fed)
            if step % 20 == 0 and hvd.rank() == 0:
                print(f"step {step}: loss {value:.4f}", flush=True)
    return float(reached)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--checkpoint-dir")
    parser.add_argument("--runner", type=int, metavar="NP", help="use HorovodRunner")
    options = vars(parser.parse_args())
    runner = options.pop("runner")
    if runner is None:
        accuracy = train(**options)
    else:
        from sparkdl import HorovodRunner

        accuracy = HorovodRunner(np=runner).run(train, **options)
    print(f"accuracy on {HELD_OUT} other digits: {accuracy:.3f}")
