"""Bound allreduces of torch tensors: autograd, and tensors whose memory changes."""

import pytest

pytest.importorskip("torch")

import torch

import farandole.torch as hvd
from farandole.core.context import Context
from farandole.errors import InvalidRequest
from helpers.ranks import run_ranks


def test_autograd_sees_that_a_bound_tensor_has_changed() -> None:
    def body(context: Context) -> None:
        factor = torch.ones(3)
        bound = hvd.bind(factor, name="factor", op=hvd.Sum)
        product = (torch.ones(3, requires_grad=True) * factor).sum()
        bound()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()

    run_ranks(2, body)


def test_a_bound_tensor_may_get_other_memory() -> None:
    def body(context: Context) -> None:
        tensor = torch.ones(3)
        bound = hvd.bind(tensor, name="moves", op=hvd.Sum)
        bound()
        for size in (3, 5, 2000):
            tensor.data = torch.full((size,), 2.0)
            assert bound().tolist() == [4.0] * size
        tensor.data = torch.ones(4, 4).t()[:, 1:]
        with pytest.raises(InvalidRequest, match="contiguous"):
            bound()
        tensor.data = torch.ones(2, dtype=torch.int64)
        assert bound().tolist() == [2, 2]

    run_ranks(2, body)


def test_parameters_and_expanded_tensors() -> None:
    def body(context: Context) -> None:
        parameter = torch.nn.Parameter(torch.ones(2))
        assert hvd.bind(parameter, name="parameter", op=hvd.Sum)() is parameter
        assert parameter.tolist() == [2.0, 2.0]
        with pytest.raises(InvalidRequest, match="contiguous"):
            hvd.bind(torch.ones(1).expand(3), name="expanded")
        with pytest.raises(InvalidRequest, match="sparse"):
            hvd.bind(torch.ones(3).to_sparse(), name="sparse")

    run_ranks(2, body)
