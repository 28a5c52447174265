"""Tensors in memory that the ranks of a host share, for every binding."""

import os

import numpy as np
import pytest

from farandole.core.context import Context
from farandole.errors import EngineClosed, InvalidRequest
from helpers.bindings import BINDINGS, Binding
from helpers.ranks import run_ranks

SHARING = [binding for binding in BINDINGS if hasattr(binding.hvd, "empty_shared")]  # MXNet makes its own memory

every_binding = pytest.mark.parametrize("binding", SHARING, ids=lambda binding: binding.name)


@every_binding
@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_allreduce_of_shared_tensors_is_one_like_any_other(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        dtypes = {each: binding.make(np.zeros(1), each).dtype for each in binding.dtypes}
        for dtype, kind in dtypes.items():
            shared = binding.hvd.empty_shared((70, 101), dtype=kind)
            assert shared.shape == (70, 101) and shared.dtype == kind
            values = np.arange(70 * 101).reshape(70, 101) % 11
            shared[...] = binding.make(values + context.rank, dtype)
            binding.hvd.allreduce_(shared, op=binding.hvd.Sum, name=f"shared.{dtype}")
            expected = size * values + size * (size - 1) // 2
            np.testing.assert_array_equal(binding.read(shared).astype("int64"), expected, err_msg=dtype)

    run_ranks(size, body)


@every_binding
def test_some_shared_and_some_not_agree_on_one_way(binding: Binding) -> None:
    if binding.on_device:
        pytest.skip("shared tensors are in host memory, and ranks give tensors of one kind of memory")

    def body(context: Context) -> None:
        for step in range(6):
            tensors = [binding.make(np.full(30_000, float(context.rank + step)), "float32") for _ in range(3)]
            if context.rank != step % 2:
                for place in range(3):
                    shared = binding.hvd.empty_shared(30_000, dtype=tensors[place].dtype)
                    shared[...] = tensors[place]
                    tensors[place] = shared
            for result in binding.hvd.grouped_allreduce_(tensors, op=binding.hvd.Sum, name="mixed"):
                np.testing.assert_array_equal(binding.read(result), np.full(30_000, 1.0 + 2 * step))

    run_ranks(2, body)


@every_binding
def test_a_shared_tensor_outlives_its_rank(binding: Binding) -> None:
    before = set(os.listdir("/dev/shm"))

    def body(context: Context) -> object:
        shared = binding.hvd.empty_shared(1000, dtype=binding.make(np.zeros(1), "float64").dtype)
        shared[...] = 7
        view = shared[10:20]
        del shared
        assert set(os.listdir("/dev/shm")) == before
        context.shutdown()
        with pytest.raises(EngineClosed):
            context.empty_shared(8)
        return binding.read(view).sum()

    assert run_ranks(2, body) == [70, 70]


@every_binding
def test_room_for_shared_tensors_has_an_end(binding: Binding) -> None:
    def body(context: Context) -> None:
        with pytest.raises(InvalidRequest, match="bytes do not fit beside"):
            binding.hvd.empty_shared((1 << 31, 1 << 4))
        empty = binding.hvd.empty_shared((0, 3))
        assert empty.shape == (0, 3)
        assert binding.hvd.empty_shared(np.int64(5)).shape == (5,)

    run_ranks(1, body)
