"""Reductions give, on every rank and for every binding, what NumPy gives for the ranks' tensors."""

import itertools

import numpy as np
import pytest

from farandole.core.context import Context
from farandole.numpy import Average, Max, Min, Product, Sum
from helpers.bindings import BINDINGS, FUNCTIONAL, SIZES, Binding, expected, scatter_rows, tolerance
from helpers.ranks import run_ranks

OPS = (Average, Sum, Min, Max, Product)

every_binding = pytest.mark.parametrize("binding", BINDINGS, ids=lambda binding: binding.name)
every_functional = pytest.mark.parametrize("binding", FUNCTIONAL, ids=lambda binding: binding.name)
every_size = pytest.mark.parametrize("size", SIZES)


def values(rank: int, dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Small whole numbers, which all dtypes hold; signed ones where the dtype has a sign."""
    low = 0 if dtype.startswith("uint") else -3
    return np.random.default_rng([seed, rank]).integers(low, 4, shape)


def check(got, ranks: list[np.ndarray], op: int, dtype: str, binding: Binding, factor: float = 1.0) -> None:
    want = expected(op, ranks, dtype) * factor
    np.testing.assert_allclose(
        binding.read(got).astype("float64"), want, rtol=tolerance(dtype), atol=tolerance(dtype), err_msg=f"{dtype} {op}"
    )


@every_binding
@every_size
def test_every_dtype_and_op(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        for dtype, op in itertools.product(binding.dtypes, OPS):
            ranks = [values(rank, dtype, (17,)) for rank in range(size)]
            tensor = binding.make(ranks[context.rank], dtype)
            result = binding.hvd.allreduce(tensor, op=op, name=f"{dtype}.{op}")
            check(result, ranks, op, dtype, binding)
            np.testing.assert_array_equal(binding.read(tensor).astype("int64"), ranks[context.rank])
            assert binding.hvd.allreduce_(tensor, op=op) is tensor
            check(tensor, ranks, op, dtype, binding)

    run_ranks(size, body)


@every_binding
@every_size
@pytest.mark.parametrize("elements", [0, 1, 3, 1000, 100_003])
def test_every_length(binding: Binding, size: int, elements: int) -> None:
    def body(context: Context) -> None:
        ranks = [values(rank, "float32", (elements,)) for rank in range(size)]
        check(
            binding.hvd.allreduce(binding.make(ranks[context.rank], "float32"), op=Sum), ranks, Sum, "float32", binding
        )

    run_ranks(size, body)


@every_functional
@every_size
def test_scalars_and_shapes_are_kept(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        for shape in [(), (1,), (2, 0, 3), (2, 3, 4)]:
            ranks = [values(rank, "float64", shape) for rank in range(size)]
            result = binding.hvd.allreduce(binding.make(ranks[context.rank], "float64"))
            assert tuple(result.shape) == shape
            check(result, ranks, Average, "float64", binding)

    run_ranks(size, body)


@every_functional
@every_size
def test_factors_scale_before_and_after(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        for dtype, op in itertools.product(binding.floats, (Average, Sum, Max)):
            ranks = [values(rank, dtype, (9,)) for rank in range(size)]
            tensor = binding.make(ranks[context.rank], dtype)
            result = binding.hvd.allreduce(tensor, op=op, prescale_factor=0.5, postscale_factor=3.0)
            check(result, ranks, op, dtype, binding, factor=1.5)

    run_ranks(size, body)


@every_functional
@every_size
def test_an_integer_average_is_exact_and_truncated(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        for dtype in ("int32", "int64"):
            ones = binding.make(np.full(5, 1), dtype)
            np.testing.assert_array_equal(binding.read(binding.hvd.allreduce(ones)), 1)
            mixed = binding.make(np.full(5, -1 if context.rank == 0 else 0), dtype)
            np.testing.assert_array_equal(binding.read(binding.hvd.allreduce(mixed)), -1 if size == 1 else 0)

    run_ranks(size, body)


@every_functional
@every_size
def test_booleans_are_ored_and_anded(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        mine = binding.make(np.array([True, False, context.rank == 0, context.rank != 0]), "bool")
        for op in (Sum, Max):
            got = binding.read(binding.hvd.allreduce(mine, op=op))
            np.testing.assert_array_equal(got, [True, False, True, size > 1])
        for op in (Product, Min):
            got = binding.read(binding.hvd.allreduce(mine, op=op))
            np.testing.assert_array_equal(got, [True, False, size == 1, False])
        with pytest.raises(ValueError, match="bool"):
            binding.hvd.allreduce(mine, op=Average)

    run_ranks(size, body)


@every_functional
@every_size
def test_every_rank_gets_the_same_bits(binding: Binding, size: int) -> None:
    def body(context: Context) -> bytes:
        mine = np.random.default_rng(context.rank).standard_normal(4099)
        return b"".join(
            binding.read(binding.hvd.allreduce(binding.make(mine, dtype))).tobytes() for dtype in binding.floats
        )

    assert len(set(run_ranks(size, body))) == 1


@every_binding
@every_size
def test_groups_of_mixed_dtypes(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        dtypes = ("float32", "int32", "float64", "float32")
        ranks = [[values(rank, dtype, (3, place), place) for rank in range(size)] for place, dtype in enumerate(dtypes)]
        tensors = [binding.make(each[context.rank], dtype) for each, dtype in zip(ranks, dtypes, strict=True)]
        for op in (Average, Max):
            results = binding.hvd.grouped_allreduce(tensors, op=op, name="group")
            assert isinstance(results, list)
            for got, each, dtype in zip(results, ranks, dtypes, strict=True):
                check(got, each, op, dtype, binding)
        same = binding.hvd.grouped_allreduce_(tensors, op=Sum)
        assert all(got is tensor for got, tensor in zip(same, tensors, strict=True))
        for got, each, dtype in zip(same, ranks, dtypes, strict=True):
            check(got, each, Sum, dtype, binding)
        assert binding.hvd.grouped_allreduce([]) == []

    run_ranks(size, body)


@every_binding
@every_size
def test_many_tensors_in_another_order_on_each_rank(binding: Binding, size: int) -> None:
    count = 120

    def body(context: Context) -> None:
        ranks = [[values(rank, "float32", (place % 7 + 1,), place) for rank in range(size)] for place in range(count)]
        for turn in range(3):
            order = np.random.default_rng([turn, context.rank]).permutation(count)
            handles = {
                place: binding.hvd.allreduce_async_(
                    binding.make(ranks[place][context.rank], "float32"), name=f"t{place}", op=Sum
                )
                for place in order
            }
            for place, handle in handles.items():
                check(binding.hvd.synchronize(handle), ranks[place], Sum, "float32", binding)
                assert binding.hvd.poll(handle)

    run_ranks(size, body)


@every_binding
@every_size
def test_a_handle_gives_its_result_again(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        handle = binding.hvd.allreduce_async(binding.make(np.ones(4), "float32"), op=Sum)
        first = binding.hvd.synchronize(handle)
        assert binding.hvd.synchronize(handle) is first
        with pytest.raises(TypeError, match="int"):
            binding.hvd.synchronize(3)

    run_ranks(size, body)


@every_binding
@every_size
def test_reducescatter_gives_each_rank_its_rows(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        for dtype, rows, op in itertools.product(("float32", "int64", "float16"), (0, 1, 2, 5, 8), (Average, Sum)):
            ranks = [values(rank, dtype, (rows, 3), rows) for rank in range(size)]
            tensor = binding.make(ranks[context.rank], dtype)
            parts = scatter_rows(rows, size)
            start = sum(parts[: context.rank])
            mine = [each[start : start + parts[context.rank]] for each in ranks]
            for result in (
                binding.hvd.reducescatter(tensor, op=op),
                binding.hvd.synchronize(binding.hvd.reducescatter_async(tensor, op=op, name="rs")),
                binding.hvd.grouped_reducescatter([tensor, tensor], op=op)[1],
            ):
                assert tuple(result.shape) == (parts[context.rank], 3)
                check(result, mine, op, dtype, binding)
            scaled = binding.hvd.reducescatter(tensor, op=Sum, prescale_factor=2.0, postscale_factor=0.5)
            check(scaled, mine, Sum, dtype, binding)
        with pytest.raises(ValueError, match="Average and Sum"):
            binding.hvd.reducescatter(tensor, op=Max)

    run_ranks(size, body)


@every_functional
@every_size
def test_compression_sends_halves(binding: Binding, size: int) -> None:
    def body(context: Context) -> None:
        fp16 = binding.hvd.Compression.fp16
        mine = binding.make(np.full(6, context.rank + 1), "float32")
        result = binding.hvd.allreduce(mine, compression=fp16, op=Sum)
        assert result.dtype == mine.dtype
        np.testing.assert_allclose(binding.read(result), size * (size + 1) / 2)
        assert fp16.compress(mine)[0].dtype == binding.make(np.ones(1), "float16").dtype
        whole = binding.make(np.ones(3), "int64")
        assert fp16.compress(whole) == (whole, None)
        both = binding.hvd.grouped_allreduce([mine, whole], compression=fp16, op=Sum)
        assert [each.dtype for each in both] == [mine.dtype, whole.dtype]
        none = binding.hvd.Compression.none
        np.testing.assert_array_equal(binding.read(none.decompress(*none.compress(mine))), binding.read(mine))
        rows = binding.hvd.reducescatter(binding.make(np.ones(size), "float32"), compression=fp16, op=Sum)
        np.testing.assert_array_equal(binding.read(rows), [size])

    run_ranks(size, body)
