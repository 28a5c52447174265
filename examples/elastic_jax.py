"""Train in JAX while ranks are killed, and come and go; the compiled step goes on with the ranks that there are.

    farandole run -np 3 --min-np 1 --max-np 4 python examples/elastic_jax.py --steps 2000 --pause 0.02

Each rank prints its process: kill one by `kill -9`. The others go on with the last commit, and a new rank takes its
place.
"""

import argparse
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import farandole.jax as hvd

HELD_OUT, BATCH = 297, 120  # digits that are not trained on, and those of one step of all ranks
Params = dict[str, jax.Array]


def first_params() -> Params:
    one, two = jax.random.split(jax.random.PRNGKey(0))
    return {
        "in": jax.random.normal(one, (64, 64)) / 8,
        "bias": jnp.zeros(64),
        "out": jax.random.normal(two, (64, 10)) / 8,
    }


def scores(params: Params, images: jax.Array) -> jax.Array:
    return jax.nn.relu(images @ params["in"] + params["bias"]) @ params["out"]


def loss_of(params: Params, images: jax.Array, targets: jax.Array) -> jax.Array:
    return -jnp.mean(jax.nn.log_softmax(scores(params, images))[jnp.arange(len(targets)), targets])


@jax.jit
def step(params: Params, speed: Params, images: jax.Array, targets: jax.Array) -> tuple[Params, Params, jax.Array]:
    loss, gradients = hvd.value_and_grad(loss_of)(params, images, targets)
    speed = jax.tree.map(lambda each, gradient: 0.9 * each + gradient, speed, gradients)
    return jax.tree.map(lambda each, change: each - 0.05 * change, params, speed), speed, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, for time to kill ranks")
    options = parser.parse_args()

    hvd.init()
    digits = load_digits()
    images, targets = (digits.data / 16).astype("float32"), digits.target.astype("int32")

    @hvd.elastic.run
    def train(state: hvd.elastic.JaxState) -> None:
        print(f"process {os.getpid()} is rank {hvd.rank()} of {hvd.size()}", flush=True)
        while state.step < options.steps:
            order = np.random.default_rng(state.step).permutation(len(images) - HELD_OUT)
            mine = order[:BATCH][hvd.rank() :: hvd.size()]
            state.params, state.speed, loss = step(state.params, state.speed, images[mine], targets[mine])
            state.step += 1
            state.commit()
            if hvd.rank() == 0:
                print(f"step {state.step}: loss {float(loss):.4f}, {hvd.size()} ranks", flush=True)
            time.sleep(options.pause)

    params = first_params()
    state = hvd.elastic.JaxState(params=params, speed=jax.tree.map(jnp.zeros_like, params), step=0)
    train(state)
    if hvd.rank() == 0:
        accuracy = float(jnp.mean(scores(state.params, images[-HELD_OUT:]).argmax(1) == targets[-HELD_OUT:]))
        print(f"accuracy on {HELD_OUT} other digits: {accuracy:.3f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
