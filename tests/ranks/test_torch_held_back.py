"""Small gradients are asked for together, whatever each rank puts together, and each under its own name."""

from collections.abc import Callable
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch

import farandole.torch as hvd
from farandole.core.context import Context
from farandole.errors import InvalidRequest, MismatchError
from farandole.torch.ops import requests
from farandole.torch.reducer import HELD_BYTES
from helpers.ranks import run_ranks

LARGE = HELD_BYTES // 4 // 3 + 1  # three of so many float32 are enough to be asked for


def weights_of(sizes: list[int]) -> list[torch.Tensor]:
    return [torch.zeros(size, requires_grad=True) for size in sizes]


def backward(weights: list[torch.Tensor], factors: dict[int, float]) -> None:
    """Let the gradient of each weight in `factors` be that factor, in this order, in one pass."""
    # autograd begins with what was made last.
    torch.autograd.backward([(weights[place] * factor).sum() for place, factor in reversed(factors.items())])


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_may_hold_back_different_gradients(size: int) -> None:
    def body(context: Context) -> None:
        weights = weights_of([LARGE, 3, LARGE, LARGE, 5, LARGE, 7])
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), op=hvd.Sum)
        for step in range(3):
            # Another order on each rank, and another gradient that does not come: other ones are together.
            order = [(place + context.rank) % 7 for place in range(7)]
            mine = {place: place + 10.0 * step + context.rank for place in order if place != (context.rank + step) % 7}
            optimizer.zero_grad()
            backward(weights, mine)
            optimizer.step()
            for place, weight in enumerate(weights):
                want = sum(place + 10.0 * step + rank for rank in range(size) if place != (rank + step) % 7)
                torch.testing.assert_close(weight.grad, torch.full_like(weight, want))

    run_ranks(size, body)


@pytest.mark.parametrize("sizes, calls", [([4] * 50, 1), ([LARGE] * 7, 3), ([LARGE * 3, 4], 2)])
def test_few_calls(sizes: list[int], calls: int) -> None:
    def body(context: Context) -> None:
        weights = weights_of(sizes)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0))
        backward(weights, dict.fromkeys(range(len(sizes)), context.rank + 1.0))
        optimizer.step()
        for weight in weights:
            torch.testing.assert_close(weight.grad, torch.full_like(weight, 1.5))

    with mock.patch.object(requests, "start_each", wraps=requests.start_each) as started:
        run_ranks(2, body)
    assert started.call_count == 2 * calls


@pytest.mark.parametrize(
    "look",
    [
        lambda weights: torch.nn.utils.get_total_norm([weight.grad for weight in weights]),
        lambda weights: weights[1].grad.sum(),
    ],
    ids=["all", "one"],
)
def test_what_is_looked_at_is_not_held_back(look: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
    def body(context: Context) -> float:
        weights = weights_of([2, 3, 4])
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0))
        backward(weights, {place: float(context.rank) for place in range(3)})
        seen = float(look(weights))
        optimizer.step()
        assert all(torch.equal(weight, torch.full_like(weight, -0.5)) for weight in weights)
        return seen

    one, other = run_ranks(2, body)
    assert one == other


def test_one_of_many_that_fails_is_named_and_spoils_no_other() -> None:
    def body(context: Context) -> None:
        # What is compressed is not reduced in place, and has to be put there all the same.
        for compression in (hvd.Compression.none, hvd.Compression.fp16):
            weights = weights_of([3, 4 + context.rank, 5])
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), op=hvd.Sum, compression=compression)
            backward(weights, {0: 1.0, 1: 1.0, 2: 1.0})
            with pytest.raises(MismatchError, match=r"noname\.0\.1'.*4.*5"):
                optimizer.step()
            assert [float(weight.grad[0]) for weight in weights] == [2.0, 1.0, 2.0]

    run_ranks(2, body)


def test_one_of_many_that_cannot_be_sent_is_named() -> None:
    def body(context: Context) -> None:
        weights = [torch.zeros(2, dtype=dtype, requires_grad=True) for dtype in (torch.float32, torch.complex64)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0))
        with pytest.raises(InvalidRequest, match=r"noname\.0\.1.*ComplexFloatTensor"):
            sum((weight.abs() + 1).sum() for weight in weights).backward()
        with pytest.raises(AssertionError, match=r"before optimizer\.step"):
            optimizer.zero_grad()

    run_ranks(2, body)


def test_what_was_held_back_when_state_is_loaded_is_asked_for_all_the_same() -> None:
    """A rank that holds back less would have asked in vain, and could not ask again."""

    def body(context: Context) -> None:
        weights = weights_of([LARGE, LARGE, LARGE, 2])
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0))
        # Rank 0 holds the last one back, and rank 1 nothing.
        backward(weights, dict.fromkeys([0, 1, 2, 3] if context.rank == 0 else [3, 0, 1, 2], 1.0))
        optimizer.load_state_dict(optimizer.state_dict())
        hvd.barrier()
        optimizer.zero_grad()
        backward(weights, dict.fromkeys(range(4), 2.0))
        optimizer.step()
        for weight in weights:
            torch.testing.assert_close(weight.grad, torch.full_like(weight, 2.0))

    run_ranks(2, body)
