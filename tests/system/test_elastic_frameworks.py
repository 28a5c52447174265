"""Elastic training with each framework: survivors of `kill -9` go on in their processes, with what they have traced.

The ranks share one batch by weights, so that shapes do not depend on their number, and the weights that they train are
those that NumPy computes without any rank being lost."""

import os
import re
import signal
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from sys import executable
from threading import Timer

import pytest

from helpers.installed import require_imports_of
from system.launched import PATIENCE, command

pytestmark = [pytest.mark.slow, pytest.mark.native, pytest.mark.timeout(300)]

COMMON = """
import os, sys, time
import numpy as np

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
STEPS, ROWS, RATE = 60, 12, 0.01
traced = 0  # how often a function was traced

def trace():
    global traced
    traced += 1

def batch(step, rank, size):
    rows = np.random.default_rng(step).normal(size=(ROWS, 4)).astype(np.float32)
    weight = size * (np.arange(ROWS) % size == rank)
    return rows, rows.sum(1, keepdims=True), weight.astype(np.float32)[:, None]

def start():
    return np.linspace(0, 1, 4, dtype=np.float32)[:, None]

def expected():
    w, momentum = start(), 0
    for step in range(STEPS):
        x, y, _ = batch(step, 0, 1)
        momentum = 0.9 * momentum + 2 * x.T @ (x @ w - y) / ROWS
        w = w - RATE * momentum
    return w

def show(step):
    print("step", step, hvd.rank(), hvd.size(), os.getpid(), traced, flush=True)
    time.sleep(0.05)

def end(weights):
    weights = np.asarray(weights)
    np.testing.assert_allclose(weights, expected(), rtol=1e-4)
    print("done", weights.tobytes().hex(), os.getpid(), traced, flush=True)
"""
LOOP = """
@hvd.elastic.run
def train(state):
    while state.step < STEPS:
        step(state, *batch(state.step, hvd.rank(), hvd.size()))
        state.step += 1
        show(state.step)
        state.commit()

train(state)
"""
TORCH = f"""{COMMON}
import torch
import farandole.torch as hvd
hvd.init()
model = torch.nn.Linear(4, 1, bias=False)
model.weight.data = torch.tensor(start().T.copy())
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)

def step(state, x, y, weight):
    x, y, weight = map(torch.from_numpy, (x, y, weight))
    (weight * (model(x) - y) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
{LOOP}
end(model.weight.detach().numpy().T.copy())
"""
TENSORFLOW = f"""{COMMON}
import tensorflow as tf
import farandole.tensorflow as hvd
hvd.init()
w, momentum = tf.Variable(start()), tf.Variable(np.zeros((4, 1), np.float32))
state = hvd.elastic.TensorFlowState([w, momentum], step=0)

@tf.function
def traced_step(x, y, weight):
    trace()
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_mean(weight * (x @ w - y) ** 2)
    momentum.assign(0.9 * momentum + tape.gradient(loss, [w])[0])
    w.assign_sub(RATE * momentum)
    return hvd.size_op(), hvd.rank_op()

def step(state, *given):
    size, rank = traced_step(*map(tf.constant, given))
    assert (size.numpy(), rank.numpy()) == (hvd.size(), hvd.rank())
{LOOP}
end(w.numpy())
"""
JAX = f"""{COMMON}
import functools, jax, jax.numpy as jnp
import farandole.jax as hvd
hvd.init()
w = jnp.asarray(start())
state = hvd.elastic.JaxState(params={{"w": w, "momentum": jnp.zeros_like(w)}}, key=jax.random.key(0), step=0)

@functools.partial(jax.jit, donate_argnums=0)
def traced_step(params, x, y, weight):
    trace()
    _, gradient = hvd.value_and_grad(lambda w: jnp.mean(weight * (x @ w - y) ** 2))(params["w"])
    momentum = 0.9 * params["momentum"] + gradient
    return {{"w": params["w"] - RATE * momentum, "momentum": momentum}}

def step(state, *given):
    state.params = traced_step(state.params, *given)
{LOOP}
end(state.params["w"])
"""
KERAS = f"""{COMMON}
os.environ["KERAS_BACKEND"] = "BACKEND"
import LIBRARY as keras
import farandole.keras as hvd
hvd.init()
EACH = 6  # steps of an epoch

def loss(y, given):
    trace()
    return (y - given) ** 2

model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, use_bias=False)])
model.set_weights([start()])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(RATE, momentum=0.9)), loss)
state = hvd.elastic.KerasState(model, batch=0, epoch=0)

class Show(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        show(state.epoch * EACH + state.batch)

def batches():
    for step in range(state.epoch * EACH + state.batch, STEPS):
        x, y, weight = batch(step, hvd.rank(), hvd.size())
        yield x, y, weight[:, 0]

@hvd.elastic.run
def train(state):
    callbacks = [
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        Show(),
        hvd.elastic.CommitStateCallback(state),
    ]
    model.fit(batches(), steps_per_epoch=EACH, epochs=STEPS // EACH - state.epoch, callbacks=callbacks, verbose=0)

train(state)
end(model.get_weights()[0])
"""
PROGRAMS = {
    "torch": TORCH,
    "tensorflow": TENSORFLOW,
    "jax": JAX,
    **{f"keras on {name}": KERAS.replace("BACKEND", name) for name in ("tensorflow", "torch", "jax")},
    "tf_keras": KERAS.replace("BACKEND", "tensorflow").replace("import LIBRARY", "import tf_keras"),
}


# Keras' other libraries have the same optimizer and callbacks.
ON_DEMAND = pytest.mark.skipif(
    "FARANDOLE_TEST_ELASTIC" not in os.environ, reason="a minute: FARANDOLE_TEST_ELASTIC=1 asks for it"
)


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param(each, marks=ON_DEMAND) if each in ("keras on torch", "keras on tensorflow") else each
        for each in PROGRAMS
    ],
)
def test_survivors_go_on_as_if_no_rank_had_been_lost(tmp_path: Path, framework: str) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAMS[framework].replace("LIBRARY", "keras"))
    require_imports_of(program)
    words = command("run", "-np", "3", "--min-np", "2", "--max-np", "3", executable, str(program))
    output = ""
    killed: tuple[str, str] | None = None
    before: dict[str, str] = {}  # by process, how often its function was traced before the loss
    with Popen(words, stdout=PIPE, stderr=STDOUT, text=True, cwd=tmp_path) as job:
        assert job.stdout is not None
        timer = Timer(3 * PATIENCE, job.terminate)
        timer.start()
        for line in job.stdout:
            output += line
            found = re.search(r"step (\d+) (\d) 3 (\d+) (\d+)$", line)
            if found and killed is None:
                before[found[3]] = found[4]
                if int(found[1]) >= 5 and found[2] == "1":
                    killed = found[2], found[3]
                    os.kill(int(found[3]), signal.SIGKILL)
    timer.cancel()
    assert job.returncode == 0, output
    assert killed is not None and "1 2 " in output, output
    ended = re.findall(r"done (\w+) (\d+) (\d+)\n", output)
    assert len({weights for weights, _, _ in ended}) == 1, output
    survivors = {pid: traced for _, pid, traced in ended if pid in before}
    assert survivors == {pid: traced for pid, traced in before.items() if pid != killed[1]}
