"""Gradients sent as products of two matrices, against NumPy and torch's hook, and what is sent whole."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import farandole.torch as hvd
from farandole.core.context import Context
from farandole.errors import UnsupportedReduction
from farandole.torch.low_rank import LowRank
from helpers.ranks import run_ranks

ROWS, COLUMNS, RANK, STEPS = 24, 16, 2, 4


def gradient(rank: int, step: int) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(100 * step + rank))


def optimizer_of(parameters: dict[str, torch.nn.Parameter], **options: Any) -> Any:
    options = {"compression": hvd.PowerSGD(RANK), **options}
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters.values(), 1.0), parameters.items(), **options)


def descend(optimizer: Any, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> np.ndarray:
    """Return what one step of SGD with a rate of 1 has subtracted."""
    before = parameter.detach().clone()
    optimizer.zero_grad()
    (parameter * gradient).sum().backward()
    optimizer.step()
    return (before - parameter.detach()).numpy()


def by_numpy(size: int, factor: np.ndarray, scale: float) -> list[np.ndarray]:
    """Return the updates of Vogels et al., algorithm 2, with the errors of each rank."""
    errors, updates = [np.zeros((ROWS, COLUMNS), "float32")] * size, []
    for step in range(STEPS):
        matrices = [gradient(rank, step).numpy() + errors[rank] for rank in range(size)]
        left, _ = np.linalg.qr(sum(matrix @ factor for matrix in matrices))
        factors = [matrix.T @ left for matrix in matrices]
        errors = [matrix - left @ each.T for matrix, each in zip(matrices, factors, strict=True)]
        factor = sum(factors) * scale
        updates.append(left @ factor.T)
    return updates


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
@pytest.mark.parametrize("size", [2, 3])
def test_updates_are_those_of_the_paper(size: int, op: int) -> None:
    def body(context: Context) -> tuple[np.ndarray, list[np.ndarray]]:
        parameter = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
        optimizer = optimizer_of({"w": parameter}, op=op)
        factor = optimizer._reducer.feedback.factor("w", parameter).numpy()
        return factor, [descend(optimizer, parameter, gradient(context.rank, step)) for step in range(STEPS)]

    for factor, updates in run_ranks(size, body):
        want = by_numpy(size, factor, 1 / size if op == hvd.Average else 1)
        np.testing.assert_allclose(updates, want, rtol=0, atol=1e-4)


def test_updates_are_those_of_the_hook_of_torch() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(COLUMNS, ROWS, bias=False))
        state = PowerSGDState(None, RANK, start_powerSGD_iter=2, min_compression_rate=1, random_seed=3)
        model.register_comm_hook(state, powerSGD_hook)
        theirs = []
        for step in range(-2, STEPS):  # the first two steps are not compressed
            model.zero_grad()
            average = (gradient(0, step % 50) + gradient(1, step % 50)) / 2
            model(torch.eye(COLUMNS)).T.mul(average).sum().backward()
            theirs.append(next(model.parameters()).grad.clone().numpy())
    finally:
        dist.destroy_process_group()
    torch.manual_seed(np.random.RandomState(3).randint(1_000_000_000))
    first = torch.randn(1, COLUMNS, RANK)[0]

    def body(context: Context) -> list[np.ndarray]:
        parameter = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
        optimizer = optimizer_of({"w": parameter})
        optimizer._reducer.feedback.factors["w"] = first
        return [descend(optimizer, parameter, gradient(context.rank, step)) for step in range(STEPS)]

    for ours in run_ranks(2, body):
        np.testing.assert_allclose(ours, theirs[2:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("groups", [None, 2])
def test_what_is_not_worth_it_is_sent_whole(groups: int | None) -> None:
    def body(context: Context) -> None:
        shapes = {"bias": (50,), "small": (4, 4), "kernel": (16, 4, 3, 3), "half": (40, 30)}
        parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        parameters["half"].data = parameters["half"].data.half()
        parameters["kernel"].data = parameters["kernel"].data.to(memory_format=torch.channels_last)
        optimizer = optimizer_of(parameters, groups=groups)
        for parameter in parameters.values():  # of rank 1, so that nothing is lost
            parameter.grad = torch.full_like(parameter, context.rank + 1.0)
        optimizer.step()
        for parameter in parameters.values():
            torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, -1.5), rtol=2e-3, atol=0)
        assert sorted(optimizer.state_dict()["low_rank"]["factors"]) == ["half", "kernel"]

    run_ranks(2, body)


def test_infinities_are_seen_and_leave_no_trace() -> None:
    def body(context: Context) -> None:
        parameter = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
        optimizer = optimizer_of({"w": parameter})
        descend(optimizer, parameter, gradient(context.rank, 0))
        bad = gradient(context.rank, 1)
        bad[0, 0] = float("inf") if context.rank == 1 else 1
        assert np.isnan(descend(optimizer, parameter, bad)).any()
        parameter.data.zero_()
        assert np.isfinite(descend(optimizer, parameter, gradient(context.rank, 2))).all()

    run_ranks(2, body)


def test_state_goes_on_where_it_was() -> None:
    def body(context: Context) -> None:
        first, second = (torch.nn.Parameter(torch.zeros(ROWS, COLUMNS)) for _ in range(2))
        ours, other = optimizer_of({"w": first}), optimizer_of({"w": second})
        descend(ours, first, gradient(context.rank, 0))
        other.load_state_dict(ours.state_dict())
        second.data.copy_(first.data)
        want, got = (descend(*each, gradient(context.rank, 1)) for each in ((ours, first), (other, second)))
        np.testing.assert_array_equal(got, want)
        feedback: LowRank = other._reducer.feedback
        other.rejoin()
        assert feedback.state() == {"errors": {}, "factors": {}}

    run_ranks(2, body)


def test_others_are_refused() -> None:
    def body(context: Context) -> None:
        parameter = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
        for op in (hvd.Adasum, hvd.Max):
            with pytest.raises(UnsupportedReduction, match="PowerSGD supports Average and Sum only"):
                optimizer_of({"w": parameter}, op=op)
        with pytest.raises(UnsupportedReduction, match="compression of DistributedOptimizer"):
            hvd.allreduce(parameter.detach(), compression=hvd.PowerSGD())
        with pytest.raises(ValueError, match="rank must be an integer >= 1, got 0"):
            hvd.PowerSGD(0)
        with pytest.raises(ValueError, match=r"rank must be an integer >= 1, got 1\.5"):
            hvd.PowerSGD(1.5)  # type: ignore[arg-type]

    run_ranks(2, body)
