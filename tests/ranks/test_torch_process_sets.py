"""Process sets with torch: optimizers whose gradients are reduced in a set, and derivatives in a set."""

import copy

import pytest

pytest.importorskip("torch")

import torch

import farandole.torch as hvd
from farandole.core.context import Context
from farandole.errors import InvalidRequest
from helpers.ranks import run_ranks


def build() -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    # Not the generator that all threads share.
    own = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=own) - 0.5)
    return net


def batch(rank: int) -> torch.Tensor:
    return torch.arange(8.0).reshape(2, 4) / 8 - rank


def trained_alone(ranks: list[int], steps: int) -> list[torch.Tensor]:
    """The parameters after training one process on the data of `ranks`."""
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.stack([net(batch(rank)).square().mean() for rank in ranks]).mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("groups", [None, 2], ids=["alone", "grouped"])
@pytest.mark.parametrize("copied", [False, True], ids=["itself", "a copy"])
def test_members_step_alike_and_the_others_on_their_own(groups: int | None, copied: bool) -> None:
    def body(context: Context) -> None:
        some = hvd.add_process_set([1, 3])
        net = build()
        made = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1),
            named_parameters=net.named_parameters(),
            groups=groups,
            process_set=copy.deepcopy(some) if copied else some,
        )
        for _ in range(3):
            made.zero_grad()
            net(batch(context.rank)).square().mean().backward()
            made.step()
        expected = trained_alone([1, 3] if some.included() else [context.rank], 3)
        for parameter, wanted in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.detach(), wanted)

    run_ranks(4, body)


def test_each_half_trains_its_own_model() -> None:
    def body(context: Context) -> None:
        halves = [hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])]
        mine = halves[context.rank % 2]
        net = build()
        made = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), process_set=mine)
        # The odd ranks take more steps; nobody waits for them.
        steps = 2 + 3 * (context.rank % 2)
        for _ in range(steps):
            made.zero_grad()
            net(batch(context.rank)).square().mean().backward()
            made.step()
        for parameter, wanted in zip(net.parameters(), trained_alone(mine.ranks or [], steps), strict=True):
            torch.testing.assert_close(parameter.detach(), wanted)

    run_ranks(4, body)


def test_an_optimizer_needs_a_set_that_is_there() -> None:
    def body(context: Context) -> None:
        inner = torch.optim.SGD(build().parameters(), lr=0.1)
        with pytest.raises(InvalidRequest, match=r"'DistributedOptimizer': .* is not registered"):
            hvd.DistributedOptimizer(inner, process_set=hvd.ProcessSet([0]))

    run_ranks(2, body)


def test_sparse_tensors_are_averaged_over_the_set() -> None:
    def body(context: Context) -> None:
        some = hvd.add_process_set([0, 2])
        if some.included():
            mine = torch.sparse_coo_tensor([[context.rank, 3]], torch.tensor([4.0, 2.0]), (4,), check_invariants=True)
            total = hvd.sparse_allreduce_async(mine, "s", hvd.Average, process_set=some)().to_dense()
            assert total.tolist() == [2.0, 0.0, 2.0, 2.0]

    run_ranks(3, body)


def test_derivatives_count_the_members() -> None:
    def body(context: Context) -> None:
        some = hvd.add_process_set([1, 3])
        if not some.included():
            return
        place = some.rank()
        assert place is not None

        def grad(ask: object, rows: int = 2) -> list[float]:
            tensor = torch.full((rows, 1), float(context.rank), requires_grad=True)
            output = ask(tensor)  # type: ignore[operator]
            (output.flatten() * torch.arange(1.0, 1 + output.numel())).sum().backward()
            assert tensor.grad is not None
            return [float(value) for value in tensor.grad.flatten()]

        sums = {"op": hvd.Sum, "process_set": some}
        assert grad(lambda tensor: hvd.allreduce(tensor, **sums)) == [2.0, 4.0]
        assert grad(lambda tensor: hvd.allreduce(tensor, process_set=some)) == [1.0, 2.0]
        assert grad(lambda tensor: hvd.allgather(tensor, process_set=some)) == [2.0 * place + 1, 2.0 * place + 2]
        # The root is a rank of the job.
        at_root = [1.0, 2.0] if context.rank == 3 else [0.0, 0.0]
        assert grad(lambda tensor: hvd.broadcast(tensor, 3, process_set=some)) == at_root
        assert grad(lambda tensor: hvd.reducescatter(tensor, **sums)) == [2.0, 2.0]
        assert grad(lambda tensor: hvd.alltoall(tensor, process_set=some)) == [1.0 + place] * 2
        product = grad(lambda tensor: hvd.allreduce(tensor, op=hvd.Product, prescale_factor=2.0, process_set=some))
        others = 4 - context.rank
        assert product == [2 * 4.0 * others, 2 * 2 * 4.0 * others]

    run_ranks(4, body)
