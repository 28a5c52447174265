"""LocalSGD and DiLoCo, compared with ranks simulated in one process."""

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import farandole.torch as hvd
from farandole.core.context import Context
from helpers.ranks import run_ranks

STEPS = 6


def build() -> torch.nn.Linear:
    net = torch.nn.Linear(5, 3, dtype=torch.float64)  # ranks are threads, which share torch's random numbers
    torch.nn.utils.vector_to_parameters(torch.linspace(-1, 1, 18, dtype=torch.float64), net.parameters())
    return net


def backward(net: torch.nn.Linear, rank: int, step: int) -> None:
    net.zero_grad()
    generator = torch.Generator().manual_seed(100 * rank + step)
    net(torch.randn(4, 5, dtype=torch.float64, generator=generator)).square().mean().backward()


def weights(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def adam(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), 0.05)


def simulate(size: int, every: int, lr: float, momentum: float) -> torch.Tensor:
    """Return the weights after DiLoCo on `size` ranks, as the paper's algorithm 1 says."""
    nets = [build() for _ in range(size)]
    optimizers = [adam(net) for net in nets]
    common, velocity = weights(nets[0]), torch.zeros(18, dtype=torch.float64)
    for step in range(STEPS):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            backward(net, rank, step)
            optimizer.step()
        if (step + 1) % every == 0:
            move = common - sum(weights(net) for net in nets) / size
            velocity = momentum * velocity + move
            common = common - lr * (move + momentum * velocity)
            for net in nets:
                torch.nn.utils.vector_to_parameters(common.clone(), net.parameters())
    return common


def train(optimizer: Any, net: torch.nn.Linear, rank: int, steps: range) -> torch.Tensor:
    for step in steps:
        backward(net, rank, step)
        optimizer.step()
    return weights(net)


@pytest.mark.parametrize(("every", "lr", "momentum"), [(2, 0.7, 0.9), (3, 1.0, 0.0)])
def test_diloco_follows_the_paper(every: int, lr: float, momentum: float) -> None:
    def body(context: Context) -> list[torch.Tensor]:
        net = build()
        whole = train(hvd.DiLoCo(adam(net), every, lr, momentum), net, context.rank, range(STEPS))
        # The same in two runs, of which the second one loads the state of the first.
        net = build()
        first = hvd.DiLoCo(adam(net), every, lr, momentum)
        train(first, net, context.rank, range(4))
        second = hvd.DiLoCo(adam(net), every, lr, momentum)
        second.load_state_dict(first.state_dict())
        return [whole, train(second, net, context.rank, range(4, STEPS))]

    want = simulate(2, every, lr, momentum)
    for each in run_ranks(2, body):
        for got in each:
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_parameters_that_are_broadcast_after_diloco_was_made() -> None:
    def body(context: Context) -> torch.Tensor:
        net = build()
        if context.rank == 1:
            with torch.no_grad():
                net.weight += 1
        optimizer = hvd.DiLoCo(adam(net), 2)
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        return train(optimizer, net, context.rank, range(STEPS))

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, simulate(2, 2, 0.7, 0.9), rtol=1e-12, atol=1e-12)


def test_local_sgd_averages_parameters() -> None:
    def body(context: Context) -> torch.Tensor:
        net = build()
        optimizer = hvd.LocalSGD(adam(net), 3)
        assert isinstance(optimizer, torch.optim.Adam)
        got = train(optimizer, net, context.rank, range(STEPS))
        backward(net, context.rank, STEPS)
        optimizer.step()
        assert optimizer.state_dict()["local_steps"] == 1
        optimizer.synchronize()
        apart = hvd.allgather(weights(net)[None])
        assert (apart == apart[0]).all()
        return got

    for got in run_ranks(2, body):
        torch.testing.assert_close(got, simulate(2, 3, 1.0, 0.0), rtol=1e-12, atol=1e-12)


def test_a_process_set_and_wrong_arguments() -> None:
    def body(context: Context) -> torch.Tensor:
        pair = hvd.add_process_set([0, 1])
        net = build()
        with pytest.raises(ValueError, match="sync_every must be an integer > 0"):
            hvd.LocalSGD(adam(net), 0)
        return train(hvd.LocalSGD(adam(net), 2, process_set=pair), net, context.rank, range(STEPS))

    first, second, alone = run_ranks(3, body)
    assert (first == second).all() and not torch.allclose(first, alone)


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("wrap", [hvd.LocalSGD, hvd.DiLoCo])
def test_a_step_that_a_gradient_scaler_skips_on_one_rank_counts(wrap: Any, fused: bool, unscales: bool) -> None:
    def body(context: Context) -> tuple[list[int], torch.Tensor]:
        net, alone = build(), build()
        optimizer = wrap(torch.optim.Adam(net.parameters(), 0.05, fused=fused), sync_every=2)
        other = torch.optim.Adam(alone.parameters(), 0.05, fused=fused)
        scaler, counts = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100), []
        for step in range(3):
            backward(net, context.rank, step)
            factor = scaler.scale(torch.tensor(float("inf") if step + context.rank == 0 else 1.0))
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.grad *= factor
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            counts.append(optimizer._steps)
            if step == 0 and context.rank == 0:
                assert torch.equal(weights(net), weights(alone))
            elif step == 0:
                backward(alone, context.rank, step)
                other.step()
                assert torch.allclose(weights(net), weights(alone), rtol=1e-12)
        optimizer.synchronize()
        return counts, weights(net)

    (one, first), (two, second) = run_ranks(2, body)
    assert one == two == [1, 0, 1]
    assert torch.equal(first, second)
