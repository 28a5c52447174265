"""Which tensors the torch binding takes, and what it says of the others."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import farandole.numpy
import farandole.torch as hvd
from farandole.core.context import Context
from farandole.core.default import use
from farandole.core.operations import kinds
from farandole.core.operations.reduction import Reduction
from farandole.core.operations.request import Request
from farandole.errors import InvalidRequest
from farandole.meeting.rendezvous import SoloRendezvous
from helpers.ranks import run_ranks

REFUSED = {
    "complex64": torch.zeros(3, dtype=torch.complex64),
    "float8_e5m2": torch.zeros(3).to(torch.float8_e5m2),
    "sparse": torch.zeros(3).to_sparse(),
    "meta": torch.zeros(3, device="meta"),
    "negated": torch._neg_view(torch.ones(3)),
    "nested": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
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


class Hollow(torch.Tensor):
    """A tensor without memory of its own, like a DTensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Hollow":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*(torch.ones(3) if isinstance(each, cls) else each for each in args), **(kwargs or {}))


def test_a_tensor_without_memory_is_refused() -> None:
    with Context(SoloRendezvous()) as context, use(context):
        tensor = Hollow(torch.ones(3))
        for ask in (
            lambda: hvd.allreduce(tensor),
            lambda: hvd.allreduce_(tensor),
            lambda: hvd.grouped_allreduce([torch.ones(1), tensor]),
            lambda: hvd.allgather(tensor),
        ):
            with pytest.raises(InvalidRequest, match=r"no memory of its own.*to_local"):
                ask()
        hvd.allreduce(torch.ones(0))  # has none either, and needs none


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


def test_memory_formats_and_strides() -> None:
    def body(context: Context) -> None:
        picture = torch.arange(24.0).reshape(1, 2, 3, 4)
        mine = picture.to(memory_format=torch.channels_last) if context.rank else picture.clone()
        for result in (
            hvd.allreduce(mine, op=hvd.Sum),
            hvd.allreduce_async(mine, op=hvd.Sum).wait(),
            hvd.grouped_allreduce([mine], op=hvd.Sum)[0],
            hvd.broadcast(mine, 0) * 2,
        ):
            assert torch.equal(result, picture * 2)
            assert result.stride() == mine.stride()
        assert torch.equal(hvd.allreduce(torch.ones(2).expand(3, 2), op=hvd.Sum), torch.full((3, 2), 2.0))
        with pytest.raises(InvalidRequest, match="share memory"):
            hvd.allreduce_(torch.ones(2).expand(3, 2))

        asked = Request(kinds.ALLREDUCE, reduction=Reduction(hvd.Sum), process_set=hvd.global_process_set)
        each = [mine.clone(), picture.clone()]
        hvd.ops.requests.start_each(asked, ["first", "second"], each, wake=True).wait()
        assert all(torch.equal(tensor, picture * 2) for tensor in each)

        leaf = torch.nn.Parameter(mine.clone())
        version = leaf._version
        hvd.allreduce_(leaf, op=hvd.Sum)
        assert torch.equal(leaf, picture * 2) and leaf._version > version
        hvd.allreduce(leaf, op=hvd.Sum).sum().backward()
        assert leaf.grad is not None and torch.equal(leaf.grad, torch.full_like(picture, 2.0))

    run_ranks(2, body)


def test_other_frameworks_arrays_are_a_type_error() -> None:
    with Context(SoloRendezvous()) as context, use(context):
        with pytest.raises(TypeError, match="expected a torch tensor, got ndarray"):
            hvd.allreduce_(np.ones(3))
        with pytest.raises(TypeError, match="expected a numpy array, got Tensor"):
            farandole.numpy.allreduce_(torch.ones(3))


def test_a_group_from_a_generator_is_reduced() -> None:
    def body(context: Context) -> None:
        tensors = [torch.full((2,), float(context.rank)), torch.full((), 5.0)]
        (rows, _) = hvd.grouped_allgather(each.reshape(-1) for each in tensors)
        assert rows.tolist() == [0, 0, 1, 1]
        (piece, _) = hvd.grouped_reducescatter((each.expand(2) for each in tensors), op=hvd.Sum)
        assert piece.tolist() == [1]
        results = hvd.grouped_allreduce_((each for each in tensors), op=hvd.Sum)
        assert results[0] is tensors[0]
        assert [each.tolist() for each in tensors] == [[1, 1], 10]

    run_ranks(2, body)


def test_what_numpy_cannot_hand_out() -> None:
    with Context(SoloRendezvous()) as context, use(context):
        for array, problem in (
            (np.ones(3, ">f4"), "dtype >f4"),
            (np.ones(3, "complex64"), "dtype complex64"),
            (np.ma.masked_array([1.0, 2.0], [0, 1]), "the mask of a masked array cannot be sent"),
            (np.ones(3, "datetime64[s]"), "dtype datetime64"),
            (np.ones(3, "longdouble"), "dtype float128"),
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
        for splits in (torch.tensor([4]), torch.tensor([[4]], dtype=torch.int32), "4", [4.0], [2**63]):
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
