"""Clusters of points with MXNet's modules and symbols: an unchanged program for Horovod.

horovodrun -np 2 python examples/mxnet_module.py
"""

import argparse
import logging

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np

parser = argparse.ArgumentParser(description="Module example for Horovod")
parser.add_argument("--batch-size", type=int, default=50)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.05, help="of one rank")
parser.add_argument("--num-groups", type=int, default=0, help="groups of gradients that are reduced together")
args = parser.parse_args()

logging.basicConfig(level=logging.WARNING)


def make_points(rows, seed):
    """Return points around ten centers, and the numbers of the centers."""
    centers = np.random.default_rng(0).normal(0, 2, (10, 8))
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, rows)
    return (centers[labels] + random.normal(0, 0.5, (rows, 8))).astype("float32"), labels.astype("float32")


def make_network():
    data = mx.sym.Variable("data")
    hidden = mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=32, name="fc1"), act_type="relu")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(hidden, num_hidden=10, name="fc2"), name="softmax")


hvd.init()
points, labels = make_points(4000, seed=1)
mine = slice(hvd.rank(), None, hvd.size())
train_data = mx.io.NDArrayIter(points[mine], labels[mine], args.batch_size, shuffle=True)
test_data = mx.io.NDArrayIter(*make_points(500, seed=2), args.batch_size)

model = mx.mod.Module(make_network(), context=mx.cpu())
model.bind(data_shapes=train_data.provide_data, label_shapes=train_data.provide_label)
mx.random.seed(hvd.rank())
model.init_params(mx.init.Xavier())

# All ranks begin with the weights of rank 0.
arg_params, aux_params = model.get_params()
hvd.broadcast_parameters(arg_params, root_rank=0)
hvd.broadcast_parameters(aux_params, root_rank=0)
model.set_params(arg_params, aux_params)

optimizer = mx.optimizer.create(
    "sgd", learning_rate=args.lr * hvd.size(), momentum=0.9, rescale_grad=1.0 / args.batch_size
)
model.init_optimizer(kvstore=None, optimizer=hvd.DistributedOptimizer(optimizer, num_groups=args.num_groups))

for epoch in range(args.epochs):
    train_data.reset()
    for batch in train_data:
        model.forward_backward(batch)
        model.update()
    ((_, accuracy),) = model.score(test_data, mx.metric.Accuracy())
    if hvd.rank() == 0:
        print(f"epoch {epoch}: accuracy: {accuracy:.3f}", flush=True)
