"""Arrays of JAX on GPUs, as far as a build of JAX for the CPU has them."""

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402  # after the module that it needs is known to be there

from farandole.jax import plugin  # noqa: E402
from farandole.jax.adapter import JaxAdapter  # noqa: E402


class Result:
    """A result of the engine for an array on a GPU."""

    shape = (4, 3)

    def __init__(self) -> None:
        self.copied_to: list[object] = []

    def copy_to(self, tensor: object) -> None:
        self.copied_to.append(tensor)


def test_a_result_is_copied_to_a_new_array() -> None:
    result = Result()
    made = JaxAdapter().adopt(result, jnp.ones((2, 3), jnp.bfloat16))
    assert [each is made for each in result.copied_to] == [True]
    assert (made.shape, made.dtype) == ((4, 3), jnp.bfloat16)


def test_the_custom_call_is_there_for_cpu_and_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[tuple[str, str]] = []

    def register(name: str, target: object, platform: str) -> None:
        registered.append((name, platform))

    monkeypatch.setattr(jax.ffi, "register_ffi_target", register)
    plugin.register.__wrapped__()
    assert registered == [(plugin.TARGET, "cpu"), (plugin.TARGET, "CUDA")]
