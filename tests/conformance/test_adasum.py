"""Adasum gives, on every rank and for every binding, what a tree over the ranks' tensors in float64 gives."""

import numpy as np
import pytest

from farandole.core.context import Context
from farandole.numpy import Adasum
from helpers.bindings import BINDINGS, Binding, tolerance
from helpers.ranks import run_ranks

every_binding = pytest.mark.parametrize("binding", BINDINGS, ids=lambda binding: binding.name)
every_size = pytest.mark.parametrize("size", [1, 2, 3, 4, 5])


def combined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dot, square_a, square_b = np.vdot(a, b), np.vdot(a, a), np.vdot(b, b)
    left = 1 - dot / (2 * square_a) if square_a else 1.0
    right = 1 - dot / (2 * square_b) if square_b else 1.0
    return left * a + right * b


def tree(level: list[np.ndarray]) -> np.ndarray:
    while len(level) > 1:
        pairs = [combined(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) - len(level) % 2 :]
    return level[0]


def values(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.round(np.random.default_rng([rank, len(shape)]).normal(0.3, 1, shape) * 16) / 16


def check(binding: Binding, got: object, shape: tuple[int, ...], size: int, dtype: str, factor: float = 1.0) -> None:
    want = tree([values(rank, shape) for rank in range(size)]) * factor
    np.testing.assert_allclose(
        binding.read(got).astype("float64"), want, rtol=4 * tolerance(dtype), atol=tolerance(dtype)
    )


@every_binding
@every_size
def test_the_tree(binding: Binding, size: int) -> None:
    shapes = [(), (1,), (41,), (5, 7, 3), (2, 0, 2, 1)]

    def body(context: Context) -> bytes:
        bits = b""
        for dtype in binding.floats:
            tensors = [binding.make(values(context.rank, shape), dtype) for shape in shapes]
            single = [
                binding.hvd.allreduce(tensor, op=Adasum, name=f"{dtype}{len(tensor.shape)}.{place}")
                for place, tensor in enumerate(tensors)
            ]
            group = binding.hvd.grouped_allreduce(tensors, op=Adasum, prescale_factor=2.0, postscale_factor=0.25)
            for shape, one, grouped in zip(shapes, single, group, strict=True):
                check(binding, one, shape, size, dtype)
                # The combination is linear in a common factor.
                check(binding, grouped, shape, size, dtype, factor=0.5)
                bits += binding.read(one).tobytes()
        return bits

    assert len(set(run_ranks(size, body))) == 1


@every_binding
def test_what_cannot_be_combined_is_refused(binding: Binding) -> None:
    def body(context: Context) -> None:
        with pytest.raises(ValueError, match=r"Adasum.*int64"):
            binding.hvd.allreduce(binding.make(np.ones(3), "int64"), op=Adasum)
        with pytest.raises(ValueError, match="Average and Sum"):
            binding.hvd.reducescatter(binding.make(np.ones(3), "float32"), op=Adasum)
        tensor = binding.make(np.full(3, 2.0), "float32")
        np.testing.assert_allclose(binding.read(binding.hvd.allreduce(tensor, op=Adasum)), 2.0)

    run_ranks(2, body)


@every_binding
def test_over_two_hosts(binding: Binding) -> None:
    def body(context: Context) -> None:
        assert context.local_size < context.size
        got = binding.hvd.allreduce(binding.make(values(context.rank, (1001,)), "float32"), op=Adasum)
        check(binding, got, (1001,), 3, "float32")

    run_ranks(3, body, hosts=2)
