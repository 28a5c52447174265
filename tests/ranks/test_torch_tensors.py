"""Which tensors the torch binding takes, and what it says of the others."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import farandole.numpy
import farandole.torch as hvd
from farandole.core.context import Context
from farandole.core.default import use
from farandole.errors import InvalidRequest
from farandole.rendezvous import SoloRendezvous
from helpers.ranks import run_ranks

REFUSED = {
    "complex64": torch.zeros(3, dtype=torch.complex64),
    "float8_e5m2": torch.zeros(3).to(torch.float8_e5m2),
    "sparse": torch.zeros(3).to_sparse(),
    "meta": torch.zeros(3, device="meta"),
    "contiguous": torch.zeros(3, 4).t(),
    "negated": torch._neg_view(torch.ones(3)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_engine_cannot_read_is_refused_in_torchs_words(what: str) -> None:
    tensor = REFUSED[what]
    pattern = {"complex64": "ComplexFloatTensor", "float8_e5m2": "Float8_e5m2"}.get(what, what)
    with Context(SoloRendezvous()) as context, use(context):
        for ask in (
            lambda: hvd.allreduce(tensor),
            lambda: hvd.allreduce_(tensor, name="x"),
            lambda: hvd.allreduce_async_(tensor),
            lambda: hvd.grouped_allreduce([torch.ones(1), tensor]),
            lambda: hvd.grouped_allgather_async([torch.ones(1), tensor]),
            lambda: hvd.allgather(tensor),
            lambda: hvd.broadcast(tensor, 0),
            lambda: hvd.broadcast_async_(tensor, 0),
            lambda: hvd.alltoall(tensor),
            lambda: hvd.reducescatter(tensor),
        ):
            with pytest.raises(InvalidRequest, match=pattern):
                ask()
        assert float(hvd.allreduce_(torch.ones(1), name="x")) == 1


@pytest.mark.parametrize(
    "tensor", [torch.ones(3), torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(3)), torch.ones(6)[3:]]
)
def test_results_are_plain_tensors(tensor: torch.Tensor) -> None:
    with Context(SoloRendezvous()) as context, use(context):
        for result in (
            hvd.allreduce_async(tensor).wait(),
            hvd.allgather_async(tensor).wait(),
            hvd.broadcast_async(tensor, 0).wait(),
            hvd.alltoall_async(tensor).wait()[0],
            hvd.reducescatter_async(tensor).wait(),
        ):
            assert type(result) is torch.Tensor
            assert not result.requires_grad
            assert result.data_ptr() != tensor.data_ptr()
            assert result.tolist() == [1.0] * 3


def test_operations_in_place_keep_the_tensor_and_its_gradient() -> None:
    def body(context: Context) -> None:
        parameter = torch.nn.Parameter(torch.full((3,), float(context.rank)))
        parameter.grad = torch.ones(3)
        assert hvd.allreduce_(parameter, op=hvd.Sum) is parameter
        assert parameter.tolist() == [1.0] * 3
        assert parameter.requires_grad and parameter.is_leaf
        assert parameter.grad.tolist() == [1.0] * 3

    run_ranks(2, body)


def test_other_frameworks_arrays_are_a_type_error() -> None:
    with Context(SoloRendezvous()) as context, use(context):
        with pytest.raises(TypeError, match="expected a torch tensor, got ndarray"):
            hvd.allreduce_(np.ones(3))
        with pytest.raises(TypeError, match="expected a numpy array, got Tensor"):
            farandole.numpy.allreduce_(torch.ones(3))


def test_what_numpy_cannot_hand_out() -> None:
    with Context(SoloRendezvous()) as context, use(context):
        for array, problem in (
            (np.ones(3, ">f4"), "dtype >f4"),
            (np.ones(3, "complex64"), "dtype complex64"),
            (np.ones(3, "datetime64[s]"), "dtype datetime64"),
            (np.ones(3, "longdouble"), "dtype float128"),
            (np.ones((3, 4)).T, "contiguous"),
        ):
            with pytest.raises(InvalidRequest, match=problem):
                farandole.numpy.allreduce(array)
        frozen = np.ones(3)
        frozen.flags.writeable = False
        with pytest.raises(InvalidRequest, match="read-only"):
            farandole.numpy.allreduce_(frozen)
        assert farandole.numpy.allreduce(frozen).flags.writeable


def test_splits_are_int32_or_a_list() -> None:
    with Context(SoloRendezvous()) as context, use(context):
        rows = torch.ones(4, 2)
        for splits in (torch.tensor([4]), torch.tensor([[4]], dtype=torch.int32), "4", [4.0]):
            with pytest.raises(InvalidRequest, match="splits must be"):
                hvd.alltoall(rows, splits)
        output, received = hvd.alltoall(rows, torch.tensor([3], dtype=torch.int32))
        assert output.shape == (3, 2)
        assert received.tolist() == [3]
        assert received.dtype == torch.int32


def test_operations_are_not_done_before_all_ranks_have_asked() -> None:
    def body(context: Context) -> None:
        if context.rank == 0:
            handle = hvd.allreduce_async(torch.ones(3), name="late")
            assert not hvd.poll(handle)
            hvd.barrier()
        else:
            hvd.barrier()
            handle = hvd.allreduce_async(torch.ones(3), name="late")
        assert hvd.synchronize(handle).tolist() == [1.0] * 3
        assert hvd.poll(handle)

    run_ranks(2, body)
