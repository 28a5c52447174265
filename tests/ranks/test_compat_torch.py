"""What else programs written for Horovod's PyTorch binding rely on."""

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


def test_reducescatter_by_other_reductions_is_a_runtime_error(hvd: ModuleType) -> None:
    def body(context: Context) -> None:
        for op in (hvd.Adasum, hvd.Min, hvd.Max, hvd.Product):
            for call, tensors in (
                (hvd.reducescatter, torch.ones(2)),
                (hvd.reducescatter_async, torch.ones(2)),
                (hvd.grouped_reducescatter, [torch.ones(2)]),
            ):
                with pytest.raises(RuntimeError, match="Average and Sum only"):
                    call(tensors, op=op)
        assert hvd.reducescatter(torch.ones(2), op=hvd.Sum).tolist() == [2]  # the job goes on

    run_ranks(2, body)


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_names_of_parameters_can_be_read_and_are_the_same_on_all_ranks(hvd: ModuleType, op: str) -> None:
    def body(context: Context) -> set[str]:
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        inner = torch.optim.SGD([{"params": layer.parameters()} for layer in net], lr=0.1)
        unnamed = hvd.DistributedOptimizer(inner, op=getattr(hvd, op))
        names = unnamed._parameter_names
        assert set(names) == set(net.parameters()) and len(set(names.values())) == 4
        named = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), op=getattr(hvd, op))
        assert named._parameter_names[net[1].bias] == "1.bias"
        return set(names.values())

    one, other = run_ranks(2, body)
    assert one == other


def test_the_error_and_process_sets_are_imported_from_mpi_ops_too(hvd: ModuleType) -> None:
    for name in ("HorovodInternalError", "ProcessSet", "global_process_set", "add_process_set", "remove_process_set"):
        assert getattr(hvd.mpi_ops, name) is getattr(hvd, name)
