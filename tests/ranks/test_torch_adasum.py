"""DistributedOptimizer(op=Adasum): every rank steps alone, and the steps are combined in a tree of pairs."""

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch

import farandole.torch as hvd
from farandole.core.context import Context
from farandole.errors import MismatchError
from helpers.ranks import run_ranks
from helpers.training import build, loss_of, values

every_size = pytest.mark.parametrize("size", [1, 2, 3, 4])
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3),
}


def combined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot, square_a, square_b = (a * b).sum(), (a * a).sum(), (b * b).sum()
    left = 1 - dot / (2 * square_a) if square_a else 1.0
    right = 1 - dot / (2 * square_b) if square_b else 1.0
    return left * a + right * b


def tree(level: list[torch.Tensor]) -> torch.Tensor:
    while len(level) > 1:
        pairs = [combined(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) - len(level) % 2 :]
    return level[0]


def local_step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, size: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, step, rank, size)
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def simulated(make: Make, size: int, steps: int = 4) -> torch.Tensor:
    """What the ranks arrive at, computed by one process that plays all of them."""
    nets = [build() for _ in range(size)]
    optimizers = [make(list(net.parameters())) for net in nets]
    for step in range(steps):
        starts = [parameter.detach().clone() for parameter in nets[0].parameters()]
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            local_step(net, optimizer, step, rank, size)
        for start, *copies in zip(starts, *(net.parameters() for net in nets), strict=True):
            whole = start + tree([each.detach() - start for each in copies])
            for each in copies:
                each.data.copy_(whole)
    return values(nets[0])


@every_size
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_steps_are_combined_not_the_gradients(size: int, name: str) -> None:
    def body(context: Context) -> torch.Tensor:
        net = build()
        inner = OPTIMIZERS[name](list(net.parameters()))
        optimizer = hvd.DistributedOptimizer(inner, net.named_parameters(), op=hvd.Adasum)
        assert isinstance(optimizer, type(inner))
        for step in range(4):
            local_step(net, optimizer, step, context.rank, size)
        return values(net)

    first, *others = run_ranks(size, body)
    torch.testing.assert_close(first, simulated(OPTIMIZERS[name], size), rtol=1e-9, atol=1e-9)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_in_a_process_set_and_with_half_floats_on_the_wire() -> None:
    def body(context: Context) -> torch.Tensor:
        some = hvd.add_process_set([0, 2])
        net = build()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["momentum"](list(net.parameters())),
            op=hvd.Adasum,
            process_set=some,
            compression=hvd.Compression.fp16,
        )
        place, size = (context.rank // 2, 2) if some.included() else (0, 1)
        for step in range(3):
            local_step(net, optimizer, step, place, size)
        return values(net)

    first, alone, last = run_ranks(3, body)
    torch.testing.assert_close(first, simulated(OPTIMIZERS["momentum"], 2, 3), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(last, first, rtol=0, atol=0)
    torch.testing.assert_close(alone, simulated(OPTIMIZERS["momentum"], 1, 3))


def test_parameters_that_one_rank_does_not_use_sparse_ones_and_added_ones() -> None:
    def body(context: Context) -> torch.Tensor:
        table = torch.nn.Embedding.from_pretrained(torch.ones(4, 2, dtype=torch.float64), freeze=False, sparse=True)
        late = torch.ones(3, dtype=torch.float64, requires_grad=True)
        frozen = torch.ones(3, requires_grad=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table.weight, frozen], lr=1.0), op=hvd.Adasum)
        optimizer.add_param_group({"params": [late], "lr": 0.5})
        loss = table(torch.tensor([context.rank])).sum()
        (loss if context.rank else loss + late.sum()).backward()
        optimizer.step()
        assert frozen.tolist() == [1.0] * 3
        assert late.tolist() == [0.5] * 3  # from one rank alone
        return table.weight.detach()

    for got in run_ranks(3, body):
        # The ranks' steps are orthogonal: they add up.
        assert got.tolist() == [[0.0, 0.0]] * 3 + [[1.0, 1.0]]


def test_a_gradient_scaler_steps_on_all_ranks_or_on_none() -> None:
    def train(optimizer: torch.optim.Optimizer, net: torch.nn.Module, rank: int, clip: bool) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = scaler.scale(loss_of(net, step, rank, 2))
            (loss * float("inf") if step == 1 and rank else loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()

    def body(context: Context, clip: bool, fused: bool) -> torch.Tensor:
        net = build()
        inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=fused)
        train(hvd.DistributedOptimizer(inner, op=hvd.Adasum), net, context.rank, clip)
        return values(net)

    def alone(clip: bool) -> torch.Tensor:
        nets = [build() for _ in range(2)]
        optimizers = [OPTIMIZERS["momentum"](list(net.parameters())) for net in nets]
        for step in (0, 2):
            starts = [parameter.detach().clone() for parameter in nets[0].parameters()]
            for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
                optimizer.zero_grad()
                loss_of(net, step, rank, 2).backward()
                if clip:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                optimizer.step()
            for start, *copies in zip(starts, *(net.parameters() for net in nets), strict=True):
                whole = start + tree([each.detach() - start for each in copies])
                for each in copies:
                    each.data.copy_(whole)
        return values(nets[0])

    for clip, fused in ((False, False), (True, False), (False, True)):
        want = alone(clip)
        for got in run_ranks(2, body, clip, fused):
            torch.testing.assert_close(got, want)


def test_what_adasum_does_not_do() -> None:
    def body(context: Context) -> None:
        net = build()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](list(net.parameters())), op=hvd.Adasum)
        with (
            pytest.raises(AssertionError, match="Skipping synchronization is not supported"),
            optimizer.skip_synchronize(),
        ):
            pass
        loss_of(net, 0).backward()
        before = net[0].weight.grad.clone()
        optimizer.synchronize()
        torch.testing.assert_close(net[0].weight.grad, before, rtol=0, atol=0)
        optimizer.zero_grad()

    run_ranks(2, body)


def test_groups_have_no_meaning_and_that_is_said() -> None:
    def body(context: Context) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(1, requires_grad=True)]), op=hvd.Adasum, groups=2)
        return [str(warning.message) for warning in caught]

    (texts,) = run_ranks(1, body)
    assert len(texts) == 1
    assert "no meaning with op=Adasum" in texts[0]


def test_a_step_that_fails_leaves_the_parameters_where_they_were() -> None:
    def body(context: Context) -> None:
        weights = [torch.ones(width, requires_grad=True) for width in (3, 4 + context.rank, 5)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), op=hvd.Adasum)
        sum(weight.sum() for weight in weights).backward()
        with pytest.raises(MismatchError, match=r"noname\.0\.1.*4.*5"):
            optimizer.step()
        assert all(bool((weight == 1).all()) for weight in weights)

    run_ranks(2, body)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=["average", "adasum"])
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_a_copy_that_would_train_alone_is_refused(op: int, duplicate: Callable[[object], object]) -> None:
    def body(context: Context) -> None:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(1, requires_grad=True)]), op=op)
        with pytest.raises(TypeError, match=r"distributed SGD .* state_dict"):
            duplicate(optimizer)
        assert optimizer.state_dict()["param_groups"][0]["lr"] == 1e-3

    run_ranks(1, body)
