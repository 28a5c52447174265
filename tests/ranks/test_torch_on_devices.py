"""The torch binding on the CPU and, where there is one, on a GPU, which the ranks share: training, streams, memory."""

import contextlib

import pytest

pytest.importorskip("torch")

import torch

import farandole.torch as hvd
from farandole.core.context import Context
from farandole.errors import MismatchError
from helpers.ranks import run_ranks
from helpers.training import build, rows, shard, values

DEVICES = ("cpu", *(("cuda",) if torch.cuda.is_available() else ()))
STEPS = 5

every_device = pytest.mark.parametrize("device", DEVICES)


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
    for got in run_ranks(2, body):
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


@pytest.mark.skipif("cuda" not in DEVICES, reason="there is no GPU")
def test_a_gpu_on_one_rank_only() -> None:
    def body(context: Context) -> None:
        with pytest.raises(MismatchError, match="device differs between ranks"):
            hvd.allreduce(torch.ones(3, device="cuda" if context.rank == 0 else "cpu"), name="x")

    run_ranks(2, body)


@pytest.mark.skipif("cuda" not in DEVICES, reason="there is no GPU")
def test_memory_of_the_gpu_does_not_grow() -> None:
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
