"""Gradients sent as int8: error feedback, its state, and training that stays close to that with float32."""

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import farandole.torch as hvd
from farandole import _native
from farandole.core.context import Context
from farandole.torch.feedback import feed_on_device
from helpers.ranks import run_ranks

INT8 = hvd.Compression.int8


def build(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 2))
    count = sum(parameter.numel() for parameter in net.parameters())
    torch.nn.utils.vector_to_parameters(torch.linspace(-30, 30, count).sin() / 3, net.parameters())
    return net.to(dtype)


def train(context: Context, optimizer: Any, net: torch.nn.Module, steps: range) -> torch.Tensor:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + context.rank)
        inputs = torch.randn(16, 40, generator=generator)
        optimizer.zero_grad()
        (net(inputs) - inputs[:, :2]).square().mean().backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach()


def optimizer_of(net: torch.nn.Module, **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters(), **options)


@pytest.mark.parametrize("options", [{}, {"groups": 1, "gradient_predivide_factor": 2.0}], ids=["each", "groups"])
def test_training_stays_close_to_that_with_float32(options: dict[str, Any]) -> None:
    def body(context: Context) -> list[torch.Tensor]:
        found = []
        for compression in (hvd.Compression.none, INT8):
            net = build()
            optimizer = optimizer_of(net, compression=compression, **options)
            found.append(train(context, optimizer, net, range(20)))
        return found

    (want, got), (_, other) = run_ranks(2, body)
    assert torch.equal(got, other)
    torch.testing.assert_close(got, want, rtol=0, atol=5e-3)


def test_errors_are_in_the_state() -> None:
    def body(context: Context) -> list[torch.Tensor]:
        net = build()
        whole = train(context, optimizer_of(net, compression=INT8), net, range(6))
        net = build()
        first = optimizer_of(net, compression=INT8)
        train(context, first, net, range(3))
        state = first.state_dict()
        assert sorted(state["errors_of_int8"]) == ["0.bias", "0.weight", "2.bias", "2.weight"]
        trained, net = net.state_dict(), build()
        net.load_state_dict(trained)
        second = optimizer_of(net, compression=INT8)
        second.load_state_dict(state)
        parted = train(context, second, net, range(3, 6))
        torch.optim.SGD(net.parameters(), 0.1).load_state_dict(state)  # other optimizers ignore the errors
        second.rejoin()
        assert second.state_dict()["errors_of_int8"] == {}
        return [whole, parted]

    for whole, parted in run_ranks(2, body):
        assert torch.equal(whole, parted)


def test_both_forms_of_error_feedback_agree() -> None:
    for count in (1, 255, 256, 1000):
        gradient = torch.linspace(-3, 5, count).sin()
        error = torch.linspace(1, 2, count).cos() / 100
        gradient[:1] = float("inf") if count == 1000 else 0.5
        others = gradient.clone(), error.clone()
        _native.feed_error(gradient, error)
        feed_on_device(*others)
        torch.testing.assert_close((gradient, error), others, rtol=0, atol=0)
    with pytest.raises(ValueError, match="float32 tensors of one size"):
        _native.feed_error(torch.zeros(3), torch.zeros(4))


def test_other_types_and_operators() -> None:
    def body(context: Context) -> None:
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            got = hvd.allreduce(torch.full((3,), 0.5 + context.rank, dtype=dtype), compression=INT8)
            assert got.dtype == dtype
            torch.testing.assert_close(got, torch.ones(3, dtype=dtype), rtol=0, atol=0.02)
        tensor = torch.ones(3, requires_grad=True)
        hvd.allreduce(tensor, op=hvd.Sum, compression=INT8).sum().backward()
        torch.testing.assert_close(tensor.grad, torch.full((3,), 2.0), rtol=1e-4, atol=0)
        with pytest.raises(ValueError, match=r"Compression\.int8 supports allreduce by Average and Sum only"):
            optimizer_of(build(), compression=INT8, op=hvd.Adasum)

    run_ranks(2, body)
