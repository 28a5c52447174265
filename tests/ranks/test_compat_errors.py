"""What a program written for Horovod catches, with ranks that disagree, repeat a name, or leave."""

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest

pytest.importorskip("torch")

import torch

from farandole.compat import install, uninstall
from farandole.core.context import Context
from helpers.ranks import run_ranks


@pytest.fixture
def hvd() -> Iterator[ModuleType]:
    install()
    yield importlib.import_module("horovod.torch")
    uninstall()


def caught(hvd: ModuleType, context: Context, tensor: torch.Tensor) -> str:
    try:
        hvd.allreduce(tensor, name="w")
    except hvd.HorovodInternalError as error:
        assert isinstance(error, RuntimeError)
        # The job goes on: only this tensor has failed.
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after").item() == context.size
        return str(error)
    return ""


def test_dtypes_that_differ(hvd: ModuleType) -> None:
    def body(context: Context) -> str:
        return caught(hvd, context, torch.ones(2, dtype=[torch.float32, torch.int32][context.rank]))

    for text in run_ranks(2, body):
        assert text.startswith("Mismatched data types: One rank had type float32, but another rank had type int32.")
        assert "'allreduce.w'" in text and "rank 1" in text


def test_shapes_that_differ(hvd: ModuleType) -> None:
    for text in run_ranks(2, lambda context: caught(hvd, context, torch.ones(context.rank + 2))):
        assert text.startswith("Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2]")


def test_a_name_in_flight_is_a_value_error(hvd: ModuleType) -> None:
    def body(context: Context) -> str:
        if context.rank == 0:
            first = hvd.allreduce_async(torch.ones(1), name="w")
            with pytest.raises(ValueError) as raised:
                hvd.allreduce_async(torch.ones(1), name="w")
            hvd.barrier()
            hvd.synchronize(first)
            return str(raised.value)
        hvd.barrier()  # only now may the other rank's operation go on
        hvd.allreduce(torch.ones(1), name="w")
        return ""

    text = run_ranks(2, body)[0]
    assert "tensor with the same name as another tensor that is currently being processed" in text


def test_a_rank_that_leaves(hvd: ModuleType) -> None:
    def body(context: Context) -> str:
        if context.rank == 1:
            context.shutdown()
            return ""
        with pytest.raises(hvd.HorovodInternalError) as raised:
            for _ in range(2):
                hvd.allreduce(torch.ones(1), name="w")
        return str(raised.value)

    text = run_ranks(2, body)[0]
    assert text.startswith("Horovod has been shut down. This was caused by an exception on one of the ranks")
    assert "rank 1" in text


def test_a_rank_that_leaves_during_training(hvd: ModuleType) -> None:
    """The error comes out of `backward` or `step`, which no wrapper of ours stands around."""

    def body(context: Context) -> bool:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        for step in range(3):
            if context.rank == 1 and step == 1:
                context.shutdown()
                return True
            try:
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            except hvd.HorovodInternalError as error:
                return "Horovod has been shut down" in str(error)
        return False

    assert run_ranks(2, body) == [True, True]
