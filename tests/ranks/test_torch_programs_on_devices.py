"""What programs of Horovod do with CUDA tensors of PyTorch, over stand-ins for CUDA and NCCL whose work is late."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import farandole.torch as hvd
from farandole.config import Config
from farandole.core.context import Context
from farandole.torch import state
from helpers import stand_in_nccl
from helpers.device_tensors import DeviceTensor
from helpers.ranks import run_ranks

SIZE = 2
BY_HOST = Config(
    gpu_allreduce="host", gpu_allgather="host", gpu_broadcast="host", gpu_alltoall="host", gpu_reducescatter="host"
)


@pytest.fixture(params=["nccl", "host"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Context], None]], None]:
    """Return the function that runs a body on ranks which have a GPU each, by NCCL or through host memory."""
    stand_in_nccl.choose(monkeypatch)

    def run(body: Callable[[Context], None]) -> None:
        before = stand_in_nccl.load().stand_in_nccl_run()
        run_ranks(SIZE, body, config=Config() if request.param == "nccl" else BY_HOST)
        assert (stand_in_nccl.load().stand_in_nccl_run() > before) == (request.param == "nccl")

    return run


def is_on(rank: int, tensor: Any, values: list[float]) -> bool:
    assert tensor.device == torch.device("cuda", rank)
    return bool(tensor.read().tolist() == values)


def test_reductions_as_programs_ask_for_them(run: Any) -> None:
    def body(context: Context) -> None:
        rank = context.rank
        gradient = DeviceTensor.of(torch.arange(4.0) + rank, rank)
        halves = hvd.allreduce(gradient, op=hvd.Sum, compression=hvd.Compression.fp16)
        assert halves.dtype == torch.float32
        assert is_on(rank, halves, [1, 3, 5, 7])
        group = [DeviceTensor.of(torch.full((n,), float(rank)), rank) for n in (1, 3)]
        for compression in (hvd.Compression.none, hvd.Compression.fp16):
            one, three = hvd.grouped_allreduce(group, op=hvd.Sum, compression=compression)
            assert is_on(rank, one, [1]) and is_on(rank, three, [1] * 3)
        # A tensor of the CPU may be in a group with one of a GPU, if that is so on all ranks.
        there, here = hvd.grouped_allreduce([gradient, torch.ones(2)], op=hvd.Sum)
        assert is_on(rank, there, [1, 3, 5, 7]) and here.tolist() == [2, 2]
        scalar = hvd.allreduce(DeviceTensor.of(torch.tensor(1.0 + rank), rank), name="loss")
        assert scalar.read().item() == 1.5

    run(body)


def test_rows_as_programs_move_them(run: Any) -> None:
    def body(context: Context) -> None:
        rank = context.rank
        pickled = DeviceTensor.of(torch.arange(3 + rank, dtype=torch.uint8), rank)
        assert is_on(rank, hvd.allgather(pickled), [0, 1, 2, 0, 1, 2, 3])
        rows = DeviceTensor.of(torch.arange(4.0) + 10 * rank, rank)
        for splits in ([1, 3], torch.tensor([1, 3], dtype=torch.int32)):
            got, counts = hvd.alltoall(rows, splits=splits)
            assert is_on(rank, got, [0, 10] if rank == 0 else [1, 2, 3, 11, 12, 13])
            assert counts.is_cpu and counts.tolist() == [1 + 2 * rank] * 2
        # The counts are where the splits are.
        _, counts = hvd.alltoall(rows, splits=DeviceTensor.of(torch.tensor([1, 3], dtype=torch.int32), rank))
        assert counts.dtype == torch.int32
        assert is_on(rank, counts, [1 + 2 * rank] * 2)
        assert hvd.broadcast_object({"epoch": rank}, root_rank=1) == {"epoch": 1}

    run(body)


def test_a_join_with_a_device(run: Any) -> None:
    def body(context: Context) -> None:
        rank = context.rank
        mine = DeviceTensor.of(torch.ones(3), rank)
        assert is_on(rank, hvd.allreduce(mine, op=hvd.Sum), [2] * 3)
        if rank == 1:
            assert is_on(rank, hvd.allreduce(mine, op=hvd.Sum), [1] * 3)
        assert hvd.join(rank) == 1  # Horovod's argument: the GPU of this rank

    run(body)


def test_a_state_dict_reaches_the_others(run: Any) -> None:
    def body(context: Context) -> None:
        rank = context.rank
        values = {"weight": torch.full((2, 3), 1.0 + rank), "batches": torch.tensor(rank), "none": torch.ones(0)}
        model = {name: DeviceTensor.of(each, rank) for name, each in values.items()}
        hvd.broadcast_parameters(model, root_rank=1)
        assert is_on(rank, model["weight"], [[2.0] * 3] * 2)
        assert is_on(rank, model["batches"], 1)
        assert is_on(rank, model["none"], [])

    run(body)


def test_the_state_of_an_optimizer_comes_to_the_parameters_device() -> None:
    """Also if the program has not made it the current one."""
    parameters = [torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(DeviceTensor.of(torch.ones(1), 1))]
    stand_in_nccl.load()
    found = state._devices_by_type(torch.optim.SGD(parameters, lr=0.1))
    assert found == {"cpu": torch.device("cpu"), "cuda": torch.device("cuda", 1)}
