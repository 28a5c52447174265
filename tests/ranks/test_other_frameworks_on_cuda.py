"""JAX and TensorFlow on a GPU, where there is one and they are built for it; two ranks share it."""

import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from farandole.core import default
from farandole.core.context import Context
from helpers.ranks import run_ranks

Results = list[npt.NDArray[np.float32]]

pytestmark = pytest.mark.skipif(not Path("/proc/driver/nvidia/version").exists(), reason="there is no NVIDIA driver")

VALUES = np.arange(1000, dtype=np.float32)
SUM = 2 * VALUES + 1


def jax_program(context: Context, platform: str) -> Results | None:
    """Sum in a compiled program and outside of one; None if JAX has no device of `platform`."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the other rank needs memory, too
    import jax
    import jax.numpy as jnp

    import farandole.jax as hvd

    default._process = default._thread.membership  # of all threads of XLA
    try:
        device = jax.devices(platform)[0]
    except RuntimeError:
        return None
    with jax.default_device(device):
        mine = jnp.asarray(VALUES + context.rank)
        inside = jax.jit(lambda values: hvd.allreduce(values * 2, op=hvd.Sum, name="inside") / 2)(mine)
        outside = hvd.allreduce(mine, op=hvd.Sum, name="outside")
        assert inside.devices() == {device}
        return [np.asarray(inside), np.asarray(outside)]


def tensorflow_program(context: Context, kind: str) -> Results | None:
    """Sum in a function and outside of one; None if TensorFlow has no device of this kind."""
    import tensorflow as tf

    import farandole.tensorflow as hvd

    default._process = default._thread.membership  # of all threads of TensorFlow
    devices = tf.config.list_physical_devices(kind)
    if not devices:
        return None
    if kind == "GPU":
        tf.config.experimental.set_memory_growth(devices[0], True)
    with tf.device(f"/{kind}:0"):
        mine = tf.constant(VALUES + context.rank)
        summed = tf.function(lambda values: hvd.allreduce(values * 2, op=hvd.Sum, name="inside") / 2)
        outside = hvd.allreduce(mine, op=hvd.Sum, name="outside")
        return [summed(mine).numpy(), outside.numpy()]


def check(results: list[Results | None], framework: str) -> None:
    for each in results:
        if each is None:
            pytest.skip(f"{framework} finds no GPU")
        for values in each:
            np.testing.assert_array_equal(values, SUM)


# Only the ranks' processes import them, which change the environment.
@pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")
def test_jax_on_cuda() -> None:
    check(run_ranks(2, jax_program, "gpu", how="processes"), "JAX")


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_tensorflow_on_cuda() -> None:
    check(run_ranks(2, tensorflow_program, "GPU", how="processes"), "TensorFlow")
