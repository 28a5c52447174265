"""Allreduce by `Compression.int8` gives every rank the same bits, close to the sum, for every binding."""

import numpy as np
import pytest

from farandole.core.context import Context
from farandole.numpy import Adasum, Average, Max, Sum
from helpers.bindings import BINDINGS, Binding
from helpers.ranks import run_ranks

every_binding = pytest.mark.parametrize("binding", BINDINGS, ids=lambda binding: binding.name)
SHAPES = [(), (3,), (41,), (5, 70, 3), (2, 0, 2, 1)]


def values(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([rank, len(shape)]).normal(0.3, 1, shape).astype("float32")


@every_binding
@pytest.mark.parametrize(("size", "hosts"), [(1, 1), (3, 1), (2, 2), (4, 2)])
def test_sums_are_close_and_equal(binding: Binding, size: int, hosts: int) -> None:
    int8 = binding.hvd.Compression.int8

    def body(context: Context) -> bytes:
        bits = b""
        for op, factor in ((Sum, 0.5), (Average, 0.5 / size)):
            tensors = [binding.make(values(context.rank, shape), "float32") for shape in SHAPES]
            group = binding.hvd.grouped_allreduce(tensors, op=op, prescale_factor=0.5, compression=int8)
            single = binding.hvd.allreduce(tensors[2], op=op, prescale_factor=0.5, compression=int8)
            for shape, got in zip([*SHAPES, SHAPES[2]], [*group, single], strict=True):
                each = [values(rank, shape) * factor for rank in range(size)]
                found, want = binding.read(got), sum(each)
                assert found.shape == shape and found.dtype == np.float32
                step = sum(np.abs(one).max(initial=0) for one in [*each, want]) / 127
                np.testing.assert_allclose(found, want, rtol=0, atol=0.51 * step)
                bits += found.tobytes()
        return bits

    assert len(set(run_ranks(size, body, hosts=hosts))) == 1


@every_binding
def test_members_of_a_process_set_reduce_among_themselves(binding: Binding) -> None:
    def body(context: Context) -> None:
        members = binding.hvd.add_process_set([0, 2])
        mine = values(context.rank, (777,))
        if members.included():
            int8 = binding.hvd.Compression.int8
            got = binding.hvd.allreduce(
                binding.make(mine, "float32"), op=Sum, compression=int8, process_set=members, name="some"
            )
            each = [values(rank, (777,)) for rank in (0, 2)]
            step = sum(np.abs(one).max() for one in [*each, sum(each)]) / 127
            np.testing.assert_allclose(binding.read(got), sum(each), rtol=0, atol=0.51 * step)

    run_ranks(3, body)


@every_binding
def test_a_value_that_is_not_finite_is_seen_on_every_rank(binding: Binding) -> None:
    def body(context: Context) -> None:
        mine = np.ones(600, "float32")
        mine[300] = np.inf if context.rank == 1 else 1
        got = binding.hvd.allreduce(binding.make(mine, "float32"), compression=binding.hvd.Compression.int8)
        np.testing.assert_array_equal(np.isnan(binding.read(got)), np.arange(600) // 256 == 1)

    run_ranks(2, body)


@every_binding
def test_what_cannot_be_sent_is_refused(binding: Binding) -> None:
    def body(context: Context) -> None:
        hvd, tensor = binding.hvd, binding.make(np.ones(3), "float32")
        for op in (Adasum, Max):
            with pytest.raises(ValueError, match=r"Compression\.int8 supports allreduce by Average and Sum only"):
                hvd.allreduce(tensor, op=op, compression=hvd.Compression.int8)
        with pytest.raises(ValueError, match=r"Compression\.int8 supports allreduce"):
            hvd.reducescatter(tensor, op=Sum, compression=hvd.Compression.int8)
        with pytest.raises(ValueError, match=r"Compression\.int8 sends floating-point tensors, got int64"):
            hvd.allreduce(binding.make(np.ones(3), "int64"), op=Sum, compression=hvd.Compression.int8)
        with pytest.raises(ValueError, match="compression is 'fp16', which is no compressor; give "):
            hvd.allreduce(tensor, op=Sum, compression="fp16")
        np.testing.assert_array_equal(binding.read(hvd.allreduce(tensor, op=Sum)), 2.0)

    run_ranks(2, body)
