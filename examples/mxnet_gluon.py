"""Digits with MXNet's Gluon: an unchanged program for Horovod, whose imports farandole answers.

horovodrun -np 2 python examples/mxnet_gluon.py
"""

import argparse

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

parser = argparse.ArgumentParser(description="Gluon example for Horovod")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.02, help="of one rank")
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
args = parser.parse_args()

# Rows of three pixels, as octal numbers.
FONT = ["75557", "26227", "71747", "71717", "55711", "74717", "74757", "71111", "75757", "75717"]


def make_digits(rows, seed):
    """Return noisy images of digits at random places, and the digits."""
    random = np.random.default_rng(seed)
    digits = random.integers(0, 10, rows)
    images = random.normal(0, 0.2, (rows, 1, 12, 12)).astype("float32")
    for image, digit in zip(images, digits, strict=True):
        pixels = np.array([[int(row) >> shift & 1 for shift in (2, 1, 0)] for row in FONT[digit]])
        top, left = random.integers(0, 2), random.integers(0, 6)
        image[0, top : top + 10, left : left + 6] += pixels.repeat(2, 0).repeat(2, 1)
    return images, digits.astype("float32")


def evaluate(net, data):
    metric = mx.metric.Accuracy()
    data.reset()
    for batch in data:
        metric.update(batch.label, [net(batch.data[0])])
    return metric.get()[1]


hvd.init()
mx.random.seed(hvd.rank())

# Each rank trains on its own rows.
images, digits = make_digits(2000, seed=1)
mine = slice(hvd.rank(), None, hvd.size())
train_data = mx.io.NDArrayIter(images[mine], digits[mine], args.batch_size, shuffle=True, last_batch_handle="discard")
test_data = mx.io.NDArrayIter(*make_digits(500, seed=2), args.batch_size)

net = gluon.nn.HybridSequential()
net.add(
    gluon.nn.Conv2D(16, 3, activation="relu"),
    gluon.nn.MaxPool2D(),
    gluon.nn.Flatten(),
    gluon.nn.Dense(64, activation="relu"),
    gluon.nn.Dense(10),
)
net.initialize(mx.init.Xavier())
net.hybridize()

# The shapes of the weights are not known yet: the first batch makes them, equal on all ranks.
params = net.collect_params()
hvd.broadcast_parameters(params, root_rank=0)
trainer = hvd.DistributedTrainer(
    params,
    mx.optimizer.create("sgd", learning_rate=args.lr * hvd.size(), momentum=args.momentum),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    gradient_predivide_factor=args.gradient_predivide_factor,
)
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

for epoch in range(args.epochs):
    train_data.reset()
    for batch in train_data:
        with autograd.record():
            loss = loss_of(net(batch.data[0]), batch.label[0])
        loss.backward()
        trainer.step(args.batch_size)
    mean = hvd.allreduce(loss.mean(), name="loss").asscalar()
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {mean:.4f}, accuracy: {evaluate(net, test_data):.3f}", flush=True)
