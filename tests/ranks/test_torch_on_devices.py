"""The torch binding on the CPU and, where there is one, on a GPU, which the ranks share: training, streams, memory."""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

pytest.importorskip("torch")

import torch

import farandole.torch as hvd
from farandole.config import Config
from farandole.core import default
from farandole.core.context import Context
from farandole.errors import InvalidRequest, MismatchError, PeerLost
from helpers.ranks import run_ranks
from helpers.training import build, rows, shard, values

DEVICES = ("cpu", *(("cuda",) if torch.cuda.is_available() else ()))
STEPS = 5
ON_GPUS = torch.cuda.is_available()
NCCL = Config(
    gpu_allreduce="nccl", gpu_allgather="nccl", gpu_broadcast="nccl", gpu_alltoall="nccl", gpu_reducescatter="nccl"
)  # demanded: where it cannot be used, operations fail

on_gpus = pytest.mark.skipif(not ON_GPUS, reason="there is no GPU")
every_device = pytest.mark.parametrize("device", DEVICES)

T = TypeVar("T")


def on_ranks(device: str, body: Callable[[Context], T], timeout: float = 90.0) -> list[T]:
    """Run `body` on two ranks: on GPUs as processes, because autograd's threads for GPUs do not know the ranks of
    threads."""
    if device == "cpu":
        return run_ranks(2, body)
    return run_ranks(2, in_all_threads, body, how="processes", timeout=timeout)


def in_all_threads(context: Context, body: Callable[[Context], T]) -> T:
    """Run `body` with this rank as that of all threads of the process, as after `init()`."""
    default._process = default._thread.membership
    try:
        return body(context)
    finally:
        default._process = None


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, device: str, rank: int, size: int) -> torch.Tensor:
    for step in range(STEPS):
        inputs, targets = (shard(each, rank, size).to(device) for each in rows(step))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return values(net).cpu()


@every_device
def test_ranks_train_like_one_process(device: str) -> None:
    def body(context: Context) -> torch.Tensor:
        net = build().to(device)
        if context.rank > 0:
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.zero_()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        distributed = hvd.DistributedOptimizer(optimizer, net.named_parameters())
        return train(net, distributed, device, context.rank, 2)

    net = build().to(device)
    want = train(net, torch.optim.AdamW(net.parameters(), lr=0.01), device, 0, 1)
    for got in on_ranks(device, body):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@every_device
def test_an_optimizer_with_state_reaches_the_others(device: str) -> None:
    def body(context: Context) -> list[torch.Tensor]:
        net = build().to(device)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        if context.rank == 1:
            train(net, optimizer, device, 0, 1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        states = [optimizer.state[parameter] for parameter in net.parameters()]
        assert all(state["exp_avg"].device.type == device for state in states)
        return [state["exp_avg"].cpu() for state in states]

    first, second = run_ranks(2, body)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other) and one.any()


@every_device
def test_work_in_a_side_stream(device: str) -> None:
    def body(context: Context) -> None:
        side = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()
        with side:
            side_length = 4000 if device == "cuda" else 50
            heavy = torch.full((side_length, side_length), 1e-3, device=device)
            for step in range(20):
                tensor = (heavy @ heavy @ heavy).mul_(0).add_(context.rank + step)
                handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="x")
                reduced = hvd.synchronize(handle) * 2
                assert bool((reduced == 2 * (2 * step + 1)).all())

    run_ranks(2, body)


@on_gpus
def test_a_cuda_tensor_on_one_rank_only() -> None:
    def body(context: Context) -> None:
        with pytest.raises(MismatchError, match="device differs between ranks"):
            hvd.allreduce(torch.ones(3, device="cuda" if context.rank == 0 else "cpu"), name="x")

    run_ranks(2, body)


@on_gpus
def test_memory_of_cuda_does_not_grow() -> None:
    def body(context: Context) -> None:
        tensor = torch.ones(1 << 20, device="cuda")
        for step in range(30):
            hvd.allreduce_(tensor, name="x")
            hvd.allgather(tensor, name="g")
            if step == 10:
                hvd.barrier()
                before = torch.cuda.memory_reserved()
        hvd.barrier()
        assert torch.cuda.memory_reserved() <= 2 * before

    run_ranks(2, body)


@every_device
def test_batch_normalization_over_ranks(device: str) -> None:
    torch.manual_seed(0)
    whole = torch.randn(2, 6, 5, 3)

    def body(context: Context) -> tuple[torch.Tensor, ...]:
        norm = hvd.SyncBatchNorm(5).to(device)
        inputs = whole[context.rank].to(device).requires_grad_()
        norm(inputs).square().mul(torch.arange(3.0, device=device)).sum().backward()
        assert inputs.grad is not None and inputs.grad.device == inputs.device
        return inputs.grad.cpu(), norm.running_mean.cpu(), norm.running_var.cpu()

    norm, inputs = torch.nn.BatchNorm1d(5), whole.flatten(0, 1).requires_grad_()
    norm(inputs).square().mul(torch.arange(3.0)).sum().backward()
    assert inputs.grad is not None
    for rank, (gradient, mean, var) in enumerate(on_ranks(device, body)):
        torch.testing.assert_close(gradient, inputs.grad.chunk(2)[rank], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close((mean, var), (norm.running_mean, norm.running_var))


@every_device
def test_a_gradient_scaler_and_autocast(device: str) -> None:
    def body(context: Context) -> torch.Tensor:
        net = build().to(device).float()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), net.named_parameters())
        scaler = torch.amp.GradScaler(device, init_scale=64.0)
        for step in range(STEPS):
            inputs, targets = (shard(each, context.rank, 2).float().to(device) for each in rows(step))
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16):
                loss = torch.nn.functional.mse_loss(net(inputs).float(), targets)
            if step == 2 and context.rank == 1:
                loss = loss * float("inf")  # on no rank a step
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 32.0
        return values(net).cpu()

    first, second = on_ranks(device, body)
    assert torch.equal(first, second) and first.isfinite().all()


@every_device
def test_sparse_gradients(device: str) -> None:
    def body(context: Context) -> torch.Tensor:
        table = torch.nn.Embedding(7, 2, sparse=True).to(device)
        torch.nn.init.ones_(table.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters())
        table(torch.tensor([context.rank, 3], device=device)).sum().backward()
        optimizer.step()
        return table.weight.detach().cpu()

    want = torch.ones(7, 2)
    want[0], want[1], want[3] = 0.5, 0.5, 0.0
    for got in on_ranks(device, body):
        assert torch.equal(got, want)


@on_gpus
@pytest.mark.timeout(400)  # two ranks compile
def test_a_compiled_model_on_cuda() -> None:
    def body(context: Context) -> torch.Tensor:
        net = build().to("cuda")
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), net.named_parameters())
        return train(torch.compile(net), optimizer, "cuda", context.rank, 2)

    net = build().to("cuda")
    want = train(net, torch.optim.SGD(net.parameters(), lr=0.01), "cuda", 0, 1)
    for got in on_ranks("cuda", body, timeout=300):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def parallel_programs(context: Context, store: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Train by DDP and by fully_shard over process groups of farandole's; the parameters."""
    file = torch.distributed.FileStore(store, context.size)
    torch.distributed.init_process_group("farandole", store=file, rank=context.rank, world_size=context.size)
    net = build().to(device)
    wrapped = torch.nn.parallel.DistributedDataParallel(net)
    by_ddp = train(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.01), device, context.rank, context.size)
    net = build().to(device)
    mesh = torch.distributed.device_mesh.init_device_mesh(device, (context.size,))
    torch.distributed.fsdp.fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(STEPS):
        inputs, targets = (shard(each, context.rank, context.size).to(device) for each in rows(step))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    sharded = torch.cat([each.full_tensor().flatten() for each in net.parameters()]).detach().cpu()
    torch.distributed.destroy_process_group()
    return by_ddp, sharded


@on_gpus
def test_ddp_and_fully_shard_on_cuda(tmp_path: Path) -> None:
    net = build().to("cuda")
    want = train(net, torch.optim.AdamW(net.parameters(), lr=0.01), "cuda", 0, 1)
    for by_ddp, sharded in run_ranks(2, parallel_programs, str(tmp_path / "store"), "cuda", how="processes"):
        torch.testing.assert_close(by_ddp, want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(sharded, want, rtol=1e-6, atol=1e-6)


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow NCCL among ranks that share a GPU, also to a version of NCCL that does not know the variable."""
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")


def take_gpu(context: Context) -> None:
    """Make a GPU the current one. NCCL refuses two ranks of a host on one GPU: each that shares counts as a host."""
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(context.rank % gpus)
    if gpus < context.size:
        os.environ["NCCL_HOSTID"] = f"host of rank {context.rank}"


def until_a_loss(context: Context) -> int:
    """Return who was lost; rank 1 is killed between two operations."""
    if ON_GPUS:
        take_gpu(context)
    tensor = torch.ones(1 << 20, device="cuda" if ON_GPUS else "cpu")
    for step in range(10**6):
        if context.rank == 1 and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            hvd.allreduce_(tensor, name="x")
            assert bool((tensor == 1).all())
        except PeerLost as lost:
            return lost.rank
    raise AssertionError("nobody was lost")


@on_gpus
@pytest.mark.parametrize("config", [Config(gpu_allreduce="host"), NCCL], ids=["host", "nccl"])
def test_a_killed_rank_is_named_on_cuda(sharing: None, config: Config) -> None:
    assert run_ranks(2, in_all_threads, until_a_loss, how="processes", dies=[1], config=config)[0] == 1


def every_operation(context: Context) -> torch.Tensor:
    """Check all that NCCL runs, and train; the parameters."""
    rank, size = context.rank, context.size
    if ON_GPUS:
        take_gpu(context)
    device = "cuda" if ON_GPUS else "cpu"
    total = size * (size + 1) // 2
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8):
        mine = torch.full((1000, 2), rank + 1, dtype=dtype, device=device)
        assert bool((hvd.allreduce(mine, op=hvd.Sum) == total).all())
        assert bool((hvd.reducescatter(mine.repeat(size, 1), op=hvd.Sum) == total).all())
        gathered = hvd.allgather(mine[: rank + 1])
        assert gathered[:, 0].tolist() == [each + 1 for each in range(size) for _ in range(each + 1)]
        received, counts = hvd.alltoall(mine[:size], splits=torch.ones(size, dtype=torch.int32))
        assert received[:, 1].tolist() == list(range(1, size + 1)) and counts.tolist() == [1] * size
        assert bool((hvd.broadcast(mine, size - 1) == size).all())
    scaled = hvd.allreduce(torch.ones(1000, device=device), op=hvd.Average, prescale_factor=3.0, postscale_factor=0.5)
    torch.testing.assert_close(scaled, torch.full_like(scaled, 1.5))
    for place, each in enumerate(
        hvd.grouped_allreduce([torch.ones(n, device=device) for n in range(1, 40)], op=hvd.Sum)
    ):
        assert each.tolist() == [size] * (place + 1)
    net = build().to(device)
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=0.01), net.named_parameters())
    trained = train(net, optimizer, device, rank, size)
    hvd.join()
    return trained


@pytest.mark.timeout(400 if ON_GPUS else 60)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_operation_by_nccl_on_cuda(sharing: None, size: int) -> None:
    """On the CPU the same program shows that the test itself is right."""
    net = build()
    want = train(net, torch.optim.AdamW(net.parameters(), lr=0.01), "cpu", 0, 1)
    how = "processes" if ON_GPUS else "threads"
    for got in run_ranks(size, in_all_threads, every_operation, how=how, config=NCCL, timeout=300):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@on_gpus
def test_nccl_refuses_two_ranks_on_one_cuda_device() -> None:
    def body(context: Context) -> None:
        with pytest.raises(InvalidRequest, match="ranks 0 and 1 are on the same GPU"):
            hvd.allreduce(torch.ones(3, device="cuda:0"), name="x")

    run_ranks(2, body, config=NCCL)
