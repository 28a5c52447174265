"""SyncBatchNorm on the ranks' batches against torch's batch normalization of one batch that joins them."""

import copy
import itertools
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch
from torch.nn.functional import mse_loss

import farandole.torch as hvd
from farandole.core.context import Context
from farandole.errors import InvalidRequest, NotInitializedError
from farandole.torch import sync_batch_norm
from helpers.bindings import SIZES
from helpers.ranks import run_ranks

every_size = pytest.mark.parametrize("size", SIZES)
CHANNELS = 3
PLAIN = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}
DOUBLE = torch.float64


def rows_of(rank: int, even: bool) -> int:
    """Uneven: 0 rows on rank 1, else more on each rank."""
    return 4 if even else 2 + rank if rank != 1 else 0


def inputs(size: int, dims: int, even: bool, offset: float = 0.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dims)
    rest = (CHANNELS, 4, 3, 2)[: dims - 1]
    return [
        torch.randn((rows_of(rank, even), *rest), generator=generator, dtype=DOUBLE) * (rank + 1) + offset + rank
        for rank in range(size)
    ]


def prepared(norm: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=DOUBLE))
    return norm


def upstream(output: torch.Tensor, start: int = 0) -> torch.Tensor:
    """What the output's gradient is, by row of the joined batch."""
    rows = torch.arange(start, start + len(output), dtype=output.dtype, device=output.device)
    return (rows.view(-1, *[1] * (output.dim() - 1)) + 1) * output.detach().cos()


@every_size
@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"eps": 0.1, "momentum": 0.5}],
    ids=str,
)
def test_outputs_statistics_and_gradients_are_those_of_the_joined_batch(size: int, options: dict[str, object]) -> None:
    cases = list(itertools.product(PLAIN, (True, False)))

    def passed(
        norm: torch.nn.Module, values: torch.Tensor, start: int, joined: torch.Tensor
    ) -> dict[str, torch.Tensor | None]:
        values.requires_grad_()
        for _ in range(2):
            output = norm(values)
            output.backward(upstream(output, start))
        grads = {name: parameter.grad for name, parameter in norm.named_parameters()}
        found = {"output": output.detach(), "input": values.grad, **dict(norm.named_buffers()), **grads}
        return {**found, "eval": norm.eval()(joined).detach()}

    def body(context: Context) -> list[dict[str, torch.Tensor | None]]:
        found = []
        for dims, even in cases:
            norm = prepared(hvd.SyncBatchNorm(CHANNELS, dtype=DOUBLE, **options))
            values = inputs(size, dims, even)
            start = sum(map(len, values[: context.rank]))
            found.append(passed(norm, values[context.rank], start, torch.cat(values)))
        return found

    for (dims, even), *results in zip(cases, *run_ranks(size, body), strict=True):
        joined = torch.cat(inputs(size, dims, even))
        want = passed(prepared(PLAIN[dims](CHANNELS, **options).double()), joined.clone(), 0, joined)
        for name, value in want.items():
            got = [each[name] for each in results]
            if name in ("output", "input"):
                got = [torch.cat(got)]
            elif name in ("weight", "bias"):
                got = [sum(got)]  # each rank's is that of its rows, as for every other parameter
            for each in got:
                torch.testing.assert_close(each, value, rtol=1e-9, atol=1e-9, check_stride=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("halves", ["input", "module"])
def test_halves_are_computed_in_float32(dtype: torch.dtype, halves: str) -> None:
    """As under autocast, where only the input is half; or the whole model is."""
    values = [each.to(dtype) for each in inputs(2, 4, even=False, offset=50.0)]
    values[1] = values[0][:1] * 2

    def body(context: Context) -> dict[str, torch.Tensor]:
        norm = prepared(hvd.SyncBatchNorm(CHANNELS, dtype=dtype if halves == "module" else None))
        mine = values[context.rank].clone().requires_grad_()
        output = norm(mine)
        assert output.dtype == dtype
        output.backward(upstream(output, context.rank * len(values[0])))
        assert mine.grad.dtype == dtype
        assert norm.weight.grad.dtype == norm.weight.dtype == norm.running_var.dtype
        return {"output": output.detach(), "input": mine.grad, "mean": norm.running_mean, "var": norm.running_var}

    joined = torch.cat(values).double().requires_grad_()
    plain = prepared(torch.nn.BatchNorm2d(CHANNELS, dtype=dtype).double())
    output = plain(joined)
    output.backward(upstream(output))
    results = run_ranks(2, body)
    close = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    got = {name: torch.cat([each[name] for each in results]) for name in ("output", "input")}
    torch.testing.assert_close(got["output"].double(), output.detach(), rtol=close, atol=close)
    torch.testing.assert_close(got["input"].double(), joined.grad, rtol=4 * close, atol=4 * close)
    for each in results:
        kept = 1e-5 if halves == "input" else close
        torch.testing.assert_close(each["mean"].double(), plain.running_mean, rtol=kept, atol=kept)
        torch.testing.assert_close(each["var"].double(), plain.running_var, rtol=kept, atol=kept)


def test_a_mean_far_from_zero_costs_no_precision() -> None:
    """A mean of squares minus a square of the mean would be off by more than the variance itself."""

    def body(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        norm = hvd.SyncBatchNorm(CHANNELS, momentum=1.0)
        norm(inputs(3, 4, even=True, offset=10_000.0)[context.rank].float())
        return norm.running_mean, norm.running_var

    joined = torch.cat([each.float() for each in inputs(3, 4, even=True, offset=10_000.0)]).double()
    var, mean = torch.var_mean(joined, [0, 2, 3])
    for got_mean, got_var in run_ranks(3, body):
        torch.testing.assert_close(got_mean.double(), mean, rtol=1e-7, atol=0)
        # Each rank's mean is rounded to float32: at 10,000 by a ten-thousandth of the deviation.
        torch.testing.assert_close(got_var.double(), var, rtol=2e-4, atol=0)


def convolutions() -> torch.nn.Module:
    generator = torch.Generator().manual_seed(11)
    shared = torch.nn.BatchNorm2d(4)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3),
        shared,
        torch.nn.ReLU(),
        torch.nn.Conv2d(4, 4, 1, bias=False),
        shared,
        torch.nn.Flatten(),
        torch.nn.Linear(4 * 4 * 4, 5),
        torch.nn.BatchNorm1d(5),
    ).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=DOUBLE) / 4)
    return net


def picture(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    shapes = ((12, 2, 6, 6), (12, 5))
    first, second = (torch.randn(shape, generator=generator, dtype=DOUBLE) for shape in shapes)
    return first.to(memory_format=torch.channels_last) if step % 2 else first, second


@every_size
def test_a_converted_model_trains_like_one_process(size: int) -> None:
    def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int) -> dict[str, torch.Tensor]:
        for step in range(4):
            values, targets = (each.chunk(size)[rank] for each in picture(step))
            optimizer.zero_grad()
            mse_loss(net(values), targets).backward()
            optimizer.step()
        return net.state_dict()

    def body(context: Context) -> dict[str, torch.Tensor]:
        net = convolutions()
        # Made before the conversion: it keeps the parameters.
        inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        assert hvd.convert_sync_batchnorm(net) is net
        assert net[1] is net[4]
        return train(net, hvd.DistributedOptimizer(inner, net.named_parameters()), context.rank, size)

    plain = convolutions()
    want = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), 0, 1)
    for got in run_ranks(size, body):
        assert got.keys() == want.keys()
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-9, msg=name)


def test_conversion_keeps_what_the_module_has() -> None:
    plain = torch.nn.BatchNorm2d(3, eps=0.1, momentum=None, dtype=torch.bfloat16).eval().requires_grad_(False)
    calls: list[torch.nn.Module] = []
    plain.register_forward_hook(lambda module, args, output: calls.append(module))
    made = hvd.convert_sync_batchnorm(plain)
    assert isinstance(made, hvd.SyncBatchNorm)
    assert made.weight is plain.weight and made.running_var is plain.running_var
    assert (made.eps, made.momentum, made.training) == (0.1, None, False)
    made(torch.ones(2, 3, 1, 1, dtype=torch.bfloat16))
    assert calls == [made]
    bare = hvd.convert_sync_batchnorm(torch.nn.BatchNorm1d(3, affine=False, track_running_stats=False))
    assert bare.weight is None and bare.running_mean is None
    again = hvd.convert_sync_batchnorm(torch.nn.SyncBatchNorm(3))
    assert type(again) is hvd.SyncBatchNorm
    other = hvd.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.InstanceNorm1d(3), torch.nn.Identity()))
    assert not any(isinstance(each, hvd.SyncBatchNorm) for each in other.modules())
    with pytest.raises(ValueError, match="LazyBatchNorm1d does not know its channels"):
        hvd.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.LazyBatchNorm1d()))
    copied = copy.deepcopy(made)
    assert copied.process_set is hvd.global_process_set


def test_members_of_a_set_normalize_together_and_the_others_alone() -> None:
    values = inputs(4, 2, even=True)

    def body(context: Context) -> torch.Tensor:
        some = hvd.add_process_set([1, 3])
        norm = hvd.convert_sync_batchnorm(torch.nn.BatchNorm1d(CHANNELS).double(), process_set=some)
        output: torch.Tensor = norm(values[context.rank])
        return output.detach()

    first, second, third, fourth = run_ranks(4, body)
    together = torch.nn.BatchNorm1d(CHANNELS).double()(torch.cat([values[1], values[3]])).detach()
    torch.testing.assert_close(torch.cat([second, fourth]), together)
    for got, mine in ((first, values[0]), (third, values[2])):
        torch.testing.assert_close(got, torch.nn.BatchNorm1d(CHANNELS).double()(mine).detach())


def test_one_allgather_forward_one_allreduce_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str, real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: object, **options: object) -> torch.Tensor:
            calls.append(name)
            return real(*args, **options)

        return call

    for name in ("allgather", "allreduce"):
        monkeypatch.setattr(sync_batch_norm, name, counted(name, getattr(sync_batch_norm, name)))

    def body(context: Context) -> None:
        norm = hvd.SyncBatchNorm(CHANNELS)
        norm(torch.randn(4, CHANNELS, requires_grad=True)).sum().backward()
        norm.eval()(torch.randn(4, CHANNELS))
        with torch.no_grad():
            norm.train()(torch.randn(4, CHANNELS))

    run_ranks(2, body)
    assert calls.count("allgather") == 4  # two forward passes in training, on two ranks
    assert calls.count("allreduce") == 2


def test_what_is_refused() -> None:
    def body(context: Context) -> None:
        norm = hvd.SyncBatchNorm(CHANNELS)
        for wrong in (torch.ones(CHANNELS), torch.ones(())):
            with pytest.raises(ValueError, match="at least 2D input"):
                norm(wrong)
        with pytest.raises(ValueError, match="expected 3 channels"):
            norm(torch.ones(2, CHANNELS + 1))
        for rows in (0, 1 - context.rank):
            with pytest.raises(ValueError, match="more than 1 value per channel"):
                norm(torch.ones(rows, CHANNELS))
        assert int(norm.num_batches_tracked) == 0
        values = torch.randn(4, CHANNELS, requires_grad=True)
        (grad,) = torch.autograd.grad(norm(values).square().sum(), values, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()
        with pytest.raises(InvalidRequest, match=r"'SyncBatchNorm': .* not registered"):
            hvd.SyncBatchNorm(CHANNELS, process_set=hvd.ProcessSet([0]))(torch.ones(2, CHANNELS))

    run_ranks(2, body)
    with pytest.raises(NotInitializedError):
        hvd.SyncBatchNorm(CHANNELS)(torch.ones(2, CHANNELS))
    assert hvd.SyncBatchNorm(CHANNELS).eval()(torch.ones(2, CHANNELS)).shape == (2, CHANNELS)
