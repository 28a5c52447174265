"""Gradients through the operations, against what one process computes."""

import itertools

import pytest

pytest.importorskip("torch")

import torch

import farandole.torch as hvd
from farandole.core.context import Context
from farandole.errors import InvalidRequest
from helpers.bindings import SIZES
from helpers.ranks import run_ranks

every_size = pytest.mark.parametrize("size", SIZES)


def leaf(rank: int, shape: tuple[int, ...] = (4, 3), seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def weight(rank: int, shape: tuple[int, ...] = (4, 3)) -> torch.Tensor:
    """What each rank multiplies its result by: the gradient that comes from above."""
    return leaf(rank, shape, seed=7).detach()


@every_size
@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product], ids=lambda op: f"op{op}")
@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.5, 3.0), (-2.0, 1.5)], ids=str)
@pytest.mark.parametrize("grouped", [False, True], ids=["single", "grouped"])
def test_a_reduction_is_differentiated_like_the_sum_of_all_losses(
    size: int, op: int, factors: tuple[float, float], grouped: bool
) -> None:
    pre, post = factors

    def reduced(inputs: list[torch.Tensor]) -> torch.Tensor:
        stacked = torch.stack([pre * each for each in inputs])
        whole = {
            hvd.Sum: lambda: stacked.sum(0),
            hvd.Average: lambda: stacked.mean(0),
            hvd.Min: lambda: stacked.amin(0),
            hvd.Max: lambda: stacked.amax(0),
            hvd.Product: lambda: stacked.prod(0),
        }[op]()
        return post * whole

    def body(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        mine = leaf(context.rank)
        if grouped:
            other = leaf(context.rank, seed=1)
            output, _ = hvd.grouped_allreduce(
                [mine, other], op=op, name="x", prescale_factor=pre, postscale_factor=post
            )
        else:
            output = hvd.allreduce(mine, op=op, name="x", prescale_factor=pre, postscale_factor=post)
        (output * weight(context.rank)).sum().backward()
        assert mine.grad is not None
        return output.detach(), mine.grad

    inputs = [leaf(rank) for rank in range(size)]
    whole = reduced(inputs)
    sum((whole * weight(rank)).sum() for rank in range(size)).backward()
    for (output, grad), each in zip(run_ranks(size, body), inputs, strict=True):
        torch.testing.assert_close(output, whole.detach())
        torch.testing.assert_close(grad, each.grad)


@every_size
@pytest.mark.parametrize("op", [hvd.Min, hvd.Max, hvd.Product], ids=lambda op: f"op{op}")
def test_ties_are_shared_and_zeros_do_not_divide(size: int, op: int) -> None:
    def mine(rank: int) -> torch.Tensor:
        return torch.tensor([1.0, 0.0, 0.0 if rank == 0 else 2.0, float(rank)], dtype=torch.float64).requires_grad_()

    def body(context: Context) -> torch.Tensor:
        tensor = mine(context.rank)
        hvd.allreduce(tensor, op=op).sum().backward()
        assert tensor.grad is not None
        return tensor.grad

    inputs = [mine(rank) for rank in range(size)]
    stacked = torch.stack(inputs)
    whole = {hvd.Min: stacked.amin, hvd.Max: stacked.amax, hvd.Product: stacked.prod}[op](0)
    (size * whole.sum()).backward()
    for grad, each in zip(run_ranks(size, body), inputs, strict=True):
        torch.testing.assert_close(grad, each.grad)


@every_size
def test_the_rules_that_users_of_horovod_know(size: int) -> None:
    def body(context: Context) -> None:
        ones = torch.ones(4, 3, dtype=torch.float64)
        for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
            mine = leaf(context.rank)
            hvd.allreduce(mine, op=op).backward(ones)
            torch.testing.assert_close(mine.grad, factor * ones)
            mine = leaf(context.rank, (2 * size + 1, 3))
            rows = hvd.reducescatter(mine, op=op, prescale_factor=0.5, postscale_factor=3.0)
            rows.backward(torch.full_like(rows, context.rank))
            joined = hvd.allgather(torch.full_like(rows, context.rank))
            torch.testing.assert_close(mine.grad, joined.detach() * 1.5 * factor)
        for root in range(size):
            mine = leaf(context.rank)
            hvd.broadcast(mine, root).backward(ones * context.rank)
            torch.testing.assert_close(mine.grad, ones * (size - 1) / 2 if context.rank == root else 0 * ones)

    run_ranks(size, body)


@every_size
@pytest.mark.parametrize("grouped", [False, True], ids=["single", "grouped"])
def test_allgather_gives_each_rank_its_rows_of_the_averaged_gradient(size: int, grouped: bool) -> None:
    def body(context: Context) -> None:
        mine = leaf(context.rank, (context.rank + 1, 2))
        joined = hvd.grouped_allgather([leaf(0), mine])[1] if grouped else hvd.allgather(mine, name="rows")
        above = weight(context.rank, tuple(joined.shape))
        joined.backward(above)
        averaged = sum(weight(rank, tuple(joined.shape)) for rank in range(size)) / size
        start = sum(range(context.rank + 1))
        torch.testing.assert_close(mine.grad, averaged[start : start + context.rank + 1])

    run_ranks(size, body)


@every_size
def test_alltoall_sends_the_gradients_back(size: int) -> None:
    def body(context: Context) -> None:
        splits = [(context.rank + other) % 3 for other in range(size)]
        mine = leaf(context.rank, (sum(splits) + 1, 2))
        output, received = hvd.alltoall(mine, splits)
        assert not received.requires_grad
        output.backward(torch.full_like(output, context.rank))
        # What went to rank r comes back as r; the last row went nowhere.
        want = torch.cat([torch.repeat_interleave(torch.arange(size), torch.tensor(splits)), torch.zeros(1)])
        torch.testing.assert_close(mine.grad, want.double()[:, None].expand_as(mine))
        even = leaf(context.rank, (size, 2))
        hvd.alltoall(even).backward(torch.full((size, 2), float(context.rank), dtype=torch.float64))
        torch.testing.assert_close(even.grad, torch.arange(size).double()[:, None].expand_as(even))

    run_ranks(size, body)


@every_size
def test_grouped_reducescatter_and_compression(size: int) -> None:
    def body(context: Context) -> None:
        pair = [leaf(context.rank, (size, 2)), leaf(context.rank, (2 * size, 1), seed=1)]
        outputs = hvd.grouped_reducescatter(pair, op=hvd.Sum)
        sum(each.sum() for each in outputs).backward()
        for each in pair:
            torch.testing.assert_close(each.grad, torch.full_like(each, size))
        small = torch.ones(3, requires_grad=True)
        hvd.allreduce(small, op=hvd.Sum, compression=hvd.Compression.fp16).sum().backward()
        torch.testing.assert_close(small.grad, torch.full((3,), float(size)))

    run_ranks(size, body)


@every_size
def test_second_derivatives(size: int) -> None:
    def body(context: Context) -> None:
        mine = torch.full((2,), 3.0, dtype=torch.float64, requires_grad=True)
        output = hvd.allreduce(mine**3, op=hvd.Average).sum()
        (first,) = torch.autograd.grad(output, mine, create_graph=True)
        torch.testing.assert_close(first.detach(), torch.full((2,), 27.0, dtype=torch.float64))
        (second,) = torch.autograd.grad(first.sum(), mine)
        torch.testing.assert_close(second, torch.full((2,), 18.0, dtype=torch.float64))

    run_ranks(size, body)


Inputs = list[torch.Tensor]

# What each rank has of all ranks' inputs, and how many times the derivative of all ranks' losses its gradient, and the
# gradient of that, are on two ranks: Horovod's rules for allgather, broadcast and reducescatter.
SECOND = {
    "sum": (lambda x: hvd.allreduce(x, op=hvd.Sum), lambda inputs, rank: sum(inputs), (1, 1)),
    "average": (lambda x: hvd.allreduce(x), lambda inputs, rank: sum(inputs) / len(inputs), (1, 1)),
    "max": (lambda x: hvd.allreduce(x, op=hvd.Max), lambda inputs, rank: torch.stack(inputs).amax(0), (1, 1)),
    "product": (lambda x: hvd.allreduce(x, op=hvd.Product), lambda inputs, rank: torch.stack(inputs).prod(0), (1, 1)),
    "grouped": (lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[1], lambda inputs, rank: sum(inputs), (1, 1)),
    "allgather": (lambda x: hvd.allgather(x), lambda inputs, rank: torch.cat(inputs), (0.5, 0.25)),
    "broadcast": (lambda x: hvd.broadcast(x, 1), lambda inputs, rank: inputs[1], (0.5, 0.25)),
    "alltoall": (
        lambda x: hvd.alltoall(x),
        lambda inputs, rank: torch.cat([each.chunk(len(inputs))[rank] for each in inputs]),
        (1, 1),
    ),
    "reducescatter": (
        lambda x: hvd.reducescatter(x, op=hvd.Sum),
        lambda inputs, rank: sum(inputs).chunk(len(inputs))[rank],
        (2, 2),
    ),
}


@pytest.mark.parametrize("kind", SECOND)
def test_second_derivatives_of_every_operation(kind: str) -> None:
    size = 2
    ask, whole, times = SECOND[kind]

    def first_and_second(output: torch.Tensor, mine: torch.Tensor, rank: int) -> Inputs:
        loss = (output**3 * weight(rank, tuple(output.shape))).sum()
        (first,) = torch.autograd.grad(loss, mine, create_graph=True)
        (second,) = torch.autograd.grad((first * leaf(rank, seed=9).detach()).sum(), mine)
        return [first.detach(), second]

    def body(context: Context) -> Inputs:
        mine = leaf(context.rank)
        return first_and_second(ask(mine), mine, context.rank)

    inputs = [leaf(rank) for rank in range(size)]
    outputs = [whole(inputs, rank) for rank in range(size)]
    loss = sum((output**3 * weight(rank, tuple(output.shape))).sum() for rank, output in enumerate(outputs))
    firsts = torch.autograd.grad(loss, inputs, create_graph=True, materialize_grads=True)
    turned = sum((first * leaf(rank, seed=9).detach()).sum() for rank, first in enumerate(firsts))
    seconds = torch.autograd.grad(turned, inputs, materialize_grads=True)
    for rank, (first, second) in enumerate(run_ranks(size, body)):
        torch.testing.assert_close(first, times[0] * firsts[rank].detach())
        torch.testing.assert_close(second, times[1] * seconds[rank])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_derivatives_of_small_floats(dtype: torch.dtype) -> None:
    def body(context: Context) -> None:
        for op, want in ((hvd.Sum, [2, 2]), (hvd.Average, [1, 1]), (hvd.Max, [0, 2]), (hvd.Product, [4, 2])):
            mine = torch.full((3,), context.rank + 1.0, dtype=dtype, requires_grad=True)
            output = hvd.allreduce(mine, op=op)
            assert output.dtype == dtype
            output.sum().backward()
            assert mine.grad.dtype == dtype
            assert mine.grad.tolist() == [want[context.rank]] * 3

    run_ranks(2, body)


def test_a_group_of_which_only_some_have_a_gradient() -> None:
    def body(context: Context) -> None:
        mine, fixed, count = leaf(context.rank), leaf(context.rank).detach(), torch.tensor([context.rank])
        for ask, factor in (
            (hvd.grouped_allreduce, 1.0),
            (hvd.grouped_allgather, 0.5),
            (hvd.grouped_reducescatter, 0.5),
        ):
            mine.grad = None
            first, second, third = ask([mine, fixed, torch.cat([count, count])])
            assert not third.requires_grad
            (first.sum() + second.sum()).backward()
            torch.testing.assert_close(mine.grad, torch.full((4, 3), 2 * factor if factor == 0.5 else 1.0).double())

    run_ranks(2, body)


def test_only_blocking_forms_that_need_it_are_recorded() -> None:
    def body(context: Context) -> None:
        mine = leaf(context.rank)
        with torch.no_grad():
            assert not hvd.allreduce(mine).requires_grad
        assert not hvd.allreduce(mine.detach()).requires_grad
        assert not hvd.synchronize(hvd.allreduce_async(mine)).requires_grad
        assert hvd.allreduce(mine).requires_grad
        for function in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
            assert function(mine).requires_grad

    run_ranks(2, body)


def test_a_tensor_overwritten_after_the_forward_pass_is_an_error() -> None:
    def body(context: Context) -> None:
        mine = leaf(context.rank)
        factor = torch.ones(4, 3, dtype=torch.float64)
        output = (mine * factor).sum()
        hvd.allreduce_(factor, op=hvd.Sum)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward()

    run_ranks(2, body)


def test_all_names_of_a_backward_pass_differ() -> None:
    def body(context: Context) -> None:
        pairs = list(itertools.product((hvd.Max, hvd.Product), range(2)))
        outputs = [
            hvd.grouped_allreduce([leaf(context.rank), leaf(context.rank, seed=1)], op=op, name=f"{op}.{place}")
            for op, place in pairs
        ]
        sum(each.sum() for output in outputs for each in output).backward()

    run_ranks(3, body)


# torch compiles derivatives by torch.jit when the mode is first used.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_tangents_of_the_forward_mode_are_refused() -> None:
    def body(context: Context) -> None:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
            for operation in (hvd.allreduce, hvd.allgather, hvd.allreduce_, lambda x: hvd.grouped_allreduce([x])):
                with pytest.raises(InvalidRequest, match="no forward-mode derivative"):
                    operation(dual)
            assert hvd.allreduce(torch.ones(2)).tolist() == [1, 1]

    run_ranks(1, body)  # the mode is one of the process, whose threads the ranks would be


def test_adasum_says_that_it_has_no_gradient() -> None:
    def body(context: Context) -> None:
        result = hvd.allreduce(leaf(context.rank), op=hvd.Adasum)
        with pytest.raises(NotImplementedError, match="Adasum"):
            result.sum().backward()

    run_ranks(2, body)
