"""DistributedOptimizer with what else people train with: autocast, compilers, shared layers, several optimizers."""

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch
from torch.nn.functional import mse_loss

import farandole.torch as hvd
from farandole.core.context import Context
from helpers.ranks import run_ranks
from helpers.training import build, loss_of, rows, shard, values

STEPS = 4
COMPILES_IN_THREADS = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="PyTorch 2.10 crashes when two threads compile"
)
Step = Callable[[torch.nn.Module, int, int, int], torch.Tensor]  # model, step, rank, size: the loss


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Step, rank: int, size: int) -> torch.Tensor:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(net, step, rank, size).backward()
        optimizer.step()
    return values(net)


def check(
    make: Callable[[], torch.nn.Module], loss: Step, size: int = 2, rtol: float = 1e-9, **options: object
) -> None:
    """Train on `size` ranks, and on one with all rows; both have to end alike."""

    def body(context: Context) -> torch.Tensor:
        net = make()
        optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), **options)
        return train(net, optimizer, loss, context.rank, size)

    alone = make()
    want = train(alone, sgd(alone), loss, 0, 1)
    assert not torch.equal(want, values(make()))
    for got in run_ranks(size, body):
        torch.testing.assert_close(got, want, rtol=rtol, atol=rtol)


def test_autocast_to_bfloat16() -> None:
    def loss(net: torch.nn.Module, step: int, rank: int, size: int) -> torch.Tensor:
        inputs, targets = (shard(each, rank, size).float() for each in rows(step))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = net(inputs)
            assert output.dtype == torch.bfloat16
        return mse_loss(output.float(), targets)

    check(lambda: build().float(), loss, rtol=3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_of_halves(dtype: torch.dtype) -> None:
    def loss(net: torch.nn.Module, step: int, rank: int, size: int) -> torch.Tensor:
        inputs, targets = (shard(each, rank, size).to(dtype) for each in rows(step))
        return mse_loss(net(inputs), targets)

    check(lambda: build().to(dtype), loss, rtol=5e-2)


def normalized() -> torch.nn.Module:
    return torch.nn.Sequential(build(), torch.nn.BatchNorm1d(2).double())


# Torch's compiler warns of what it does itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=COMPILES_IN_THREADS)])
def test_compiled_models(backend: str) -> None:
    def body(context: Context) -> torch.Tensor:
        net = hvd.convert_sync_batchnorm(normalized())
        optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
        train(torch.compile(net, backend=backend), optimizer, loss_of, context.rank, 2)
        return values(net)

    alone = normalized()
    want = train(alone, sgd(alone), loss_of, 0, 1)
    for got in run_ranks(2, body):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def train_by_compiled_steps(context: Context) -> torch.Tensor:
    net = torch.nn.Linear(3, 1)
    torch.nn.init.constant_(net.weight, 0.5)
    torch.nn.init.zeros_(net.bias)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters())

    @torch.compile(backend="eager")
    def step(rows: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(rows).sum().backward()
        optimizer.step()

    for _ in range(3):
        step(torch.full((2, 3), float(context.rank)))
    return values(net)


@pytest.mark.filterwarnings("ignore")
def test_compiled_steps() -> None:
    # The mean gradient is 2 * (0 + 1) / 2 for each weight, and 2 for the bias.
    for got in run_ranks(2, train_by_compiled_steps, how="processes", framework="torch"):
        torch.testing.assert_close(got, torch.tensor([0.2, 0.2, 0.2, -0.6], dtype=got.dtype))


def train_by_compiled_autograd(context: Context) -> torch.Tensor:
    from torch._dynamo.compiled_autograd import _enable

    net = build()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters())
    with _enable(torch.compile(backend="eager")):
        train(net, optimizer, loss_of, context.rank, 2)
    return values(net)


@pytest.mark.filterwarnings("ignore")
def test_compiled_backward_passes() -> None:
    alone = build()
    want = train(alone, sgd(alone), loss_of, 0, 1)
    for got in run_ranks(2, train_by_compiled_autograd, how="processes", framework="torch"):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


class Tied(torch.nn.Module):
    """One weight in two modules, and one module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = (layer for layer in (torch.nn.Linear(5, 2), torch.nn.Linear(2, 5)))
        self.out.weight = torch.nn.Parameter(self.into.weight.detach().t().contiguous())
        self.again = torch.nn.Linear(2, 2)
        self.again.weight = torch.nn.Parameter(torch.eye(2))
        self.head = torch.nn.Linear(5, 2)
        self.head.weight = self.into.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.again(torch.tanh(self.again(self.into(inputs))))
        output: torch.Tensor = self.head(self.out(hidden))
        return output


def tied() -> torch.nn.Module:
    net = Tied().double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    return net


def test_shared_parameters() -> None:
    check(tied, loss_of)
    check(tied, loss_of, groups=2)


class Crossed(torch.nn.Module):
    """Parameters, and so gradients, that do not lie in order."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.weight = torch.nn.Parameter(torch.randn(5, 2, generator=generator, dtype=torch.float64).t())
        self.bias = torch.nn.Parameter(torch.randn(4, generator=generator, dtype=torch.float64)[::2])
        self.scale = torch.nn.Parameter(torch.randn((), generator=generator, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(inputs, self.weight, self.bias) * self.scale


def test_gradients_that_do_not_lie_in_order() -> None:
    assert not Crossed().weight.is_contiguous()
    check(Crossed, loss_of)
    check(Crossed, loss_of, groups=1)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-9),
        ({"groups": 2}, 1e-9),
        ({"compression": hvd.Compression.fp16}, 2e-2),
        ({"compression": hvd.Compression.bf16}, 1e-1),
    ],
    ids=["alone", "groups", "fp16", "bf16"],
)
def test_passes_of_small_batches_are_one_big_batch(options: dict[str, object], tolerance: float) -> None:
    """Two ranks with three passes each over a sixth of the rows."""

    def body(context: Context) -> torch.Tensor:
        net = build()
        optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), backward_passes_per_step=3, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            for place in range(3):
                (loss_of(net, step, 3 * context.rank + place, 6) / 3).backward()
            optimizer.step()
        return values(net)

    alone = build()
    want = train(alone, sgd(alone), loss_of, 0, 1)
    for got in run_ranks(2, body):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_a_step_before_all_passes_reduces_what_there_is() -> None:
    def body(context: Context) -> torch.Tensor:
        net = build()
        optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), backward_passes_per_step=5)
        return train(net, optimizer, loss_of, context.rank, 2)

    alone = build()
    want = train(alone, sgd(alone), loss_of, 0, 1)
    for got in run_ranks(2, body):
        torch.testing.assert_close(got, want)


def test_several_optimizers_share_the_names_of_one_model() -> None:
    def made(net: torch.nn.Module) -> list[torch.optim.Optimizer]:
        first, last = net[0], net[2]
        return [torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.Adam(last.parameters(), lr=0.01)]

    def train_both(net: torch.nn.Module, optimizers: list[torch.optim.Optimizer], rank: int, size: int) -> torch.Tensor:
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(net, step, rank, size).backward()
            for optimizer in optimizers:
                optimizer.step()
        return values(net)

    def body(context: Context) -> torch.Tensor:
        net = build()
        both = [hvd.DistributedOptimizer(each, net.named_parameters()) for each in made(net)]
        return train_both(net, both, context.rank, 2)

    alone = build()
    want = train_both(alone, made(alone), 0, 1)
    for got in run_ranks(2, body):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_layers_that_thaw_on_the_way_and_schedules() -> None:
    def run(net: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int) -> torch.Tensor:
        schedules = [
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=2 * STEPS),
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
        ]
        for step in range(2 * STEPS):
            net[0].requires_grad_(step >= STEPS)
            net.zero_grad(set_to_none=step % 2 == 0)
            loss_of(net, step, rank, size).backward()
            optimizer.step()
            schedules[0].step()
            schedules[1].step(1.0)
        return values(net)

    def body(context: Context) -> torch.Tensor:
        net = build()
        inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net[0].requires_grad_(False)
        return run(net, hvd.DistributedOptimizer(inner, net.named_parameters()), context.rank, 2)

    alone = build()
    want = run(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), 0, 1)
    for got in run_ranks(2, body):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_a_checkpoint_goes_on_with_another_number_of_ranks(tmp_path: object) -> None:
    file = f"{tmp_path}/checkpoint.pt"

    def start(context: Context) -> None:
        net = build()
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.01), net.named_parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, step, context.rank, 2).backward()
            optimizer.step()
        if context.rank == 0:
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)

    def go_on(context: Context) -> torch.Tensor:
        net = build()
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.5), net.named_parameters())
        if context.rank == 0:
            saved = torch.load(file, weights_only=True)
            net.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        hvd.broadcast_parameters(net.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        for step in range(STEPS, 2 * STEPS):
            optimizer.zero_grad()
            loss_of(net, step, context.rank, 3).backward()
            optimizer.step()
        return values(net)

    alone = build()
    adam = torch.optim.Adam(alone.parameters(), lr=0.01)
    for step in range(2 * STEPS):
        adam.zero_grad()
        loss_of(alone, step).backward()
        adam.step()
    run_ranks(2, start)
    for got in run_ranks(3, go_on):
        torch.testing.assert_close(got, values(alone), rtol=1e-9, atol=1e-9)


def test_a_rank_without_data_joins_and_the_others_train_on() -> None:
    """Its gradients count as zeros, its rows are missing from the batch that is normalized."""

    def run(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        return train(net, optimizer, loss_of, 0, 2)

    def body(context: Context) -> torch.Tensor | None:
        net = hvd.convert_sync_batchnorm(normalized())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.2), net.named_parameters())
        trained = run(net, optimizer) if context.rank == 0 else None
        hvd.join()
        return trained

    alone = normalized()
    want = run(alone, torch.optim.SGD(alone.parameters(), lr=0.1))
    got, _ = run_ranks(2, body)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
