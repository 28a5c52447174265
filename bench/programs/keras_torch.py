"""Train a Keras model on torch, in DistributedDataParallel."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
from timing import Steps

STEPS = Steps()
WIDTH, BATCH = 1024, 16

torch.distributed.init_process_group("gloo")
keras.utils.set_random_seed(0)
model = keras.Sequential(
    [keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, "relu"), keras.layers.Dense(WIDTH, "relu"), keras.layers.Dense(1)]
)
rows = torch.rand(2 * BATCH * STEPS.total, WIDTH)
dataset = torch.utils.data.TensorDataset(rows, rows.mean(1, keepdim=True))
sampler = torch.utils.data.distributed.DistributedSampler(dataset, seed=0)
loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, sampler=sampler)
parallel = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for inputs, sums in loader:
    loss = torch.nn.functional.mse_loss(parallel(inputs), sums)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    STEPS.done(float(loss.detach()))
torch.distributed.destroy_process_group()
