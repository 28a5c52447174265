"""A residual network with MXNet, a warm-up and a schedule of the rate: an unchanged program for Horovod.

    horovodrun -np 2 python examples/mxnet_images.py --fp16-allreduce

The pictures are generated; a program for ImageNet reads record files instead.
"""

import argparse
import time

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, lr_scheduler

parser = argparse.ArgumentParser(description="Image classification for Horovod")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--warmup-epochs", type=int, default=1)
parser.add_argument("--batches", type=int, default=40, help="of one epoch and rank")
parser.add_argument("--lr", type=float, default=0.02, help="of one rank")
parser.add_argument("--num-groups", type=int, default=2)
args = parser.parse_args()

SIZE, CLASSES = 16, 4


class Pictures:
    """Batches of stripes in four directions, of this rank's own seed."""

    def __init__(self, seed, batches):
        self.seed, self.batches = seed, batches

    def __iter__(self):
        random = np.random.default_rng(self.seed)
        rows, columns = np.mgrid[:SIZE, :SIZE]
        waves = [rows, columns, rows + columns, rows - columns]
        for _ in range(self.batches):
            labels = random.integers(0, CLASSES, args.batch_size)
            pictures = random.normal(0, 0.4, (args.batch_size, 3, SIZE, SIZE))
            for picture, label in zip(pictures, labels, strict=True):
                picture += np.sin(waves[label] * 1.2 + random.uniform(0, 6.28))
            yield mx.nd.array(pictures), mx.nd.array(labels)


class Residual(gluon.nn.HybridBlock):
    def __init__(self, channels, **more):
        super().__init__(**more)
        with self.name_scope():
            self.body = gluon.nn.HybridSequential()
            for _ in range(2):
                self.body.add(gluon.nn.Conv2D(channels, 3, padding=1, use_bias=False), gluon.nn.BatchNorm())

    def hybrid_forward(self, F, x):
        return F.relu(x + self.body(x))


def make_network():
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(8, 3, strides=2, padding=1),
        Residual(8),
        Residual(8),
        gluon.nn.GlobalAvgPool2D(),
        gluon.nn.Dense(CLASSES),
    )
    net.initialize(mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2))
    net.hybridize(static_alloc=True)
    return net


hvd.init()
mx.random.seed(hvd.rank())
net = make_network()
net(next(iter(Pictures(0, 1)))[0])  # makes the weights
params = net.collect_params()
hvd.broadcast_parameters(params, root_rank=0)

# The rate rises to that of all ranks, then falls along a cosine.
schedule = lr_scheduler.CosineScheduler(
    max_update=args.epochs * args.batches,
    base_lr=args.lr * hvd.size(),
    warmup_begin_lr=args.lr,
    warmup_steps=args.warmup_epochs * args.batches,
)
optimizer = mx.optimizer.create("nag", momentum=0.9, wd=1e-4, lr_scheduler=schedule)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
trainer = hvd.DistributedTrainer(params, optimizer, compression=compression, num_groups=args.num_groups)
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

for epoch in range(args.epochs):
    began = time.time()
    for pictures, labels in Pictures([epoch, hvd.rank()], args.batches):
        with autograd.record():
            loss = loss_of(net(pictures), labels)
        loss.backward()
        trainer.step(args.batch_size)
    mx.nd.waitall()
    speed = hvd.size() * args.batches * args.batch_size / (time.time() - began)
    right = mx.nd.zeros(1)
    for pictures, labels in Pictures([99, hvd.rank()], 10):
        right += (net(pictures).argmax(1) == labels).sum()
    accuracy = hvd.allreduce(right, op=hvd.Sum, name="right").asscalar() / (hvd.size() * 10 * args.batch_size)
    if hvd.rank() == 0:
        print(f"epoch {epoch}: {speed:.0f} images/s, accuracy: {accuracy:.3f}", flush=True)
