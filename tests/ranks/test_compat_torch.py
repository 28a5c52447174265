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


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_replacing_insides_of_the_optimizer_is_refused_with_the_remedy(hvd: ModuleType, op: str) -> None:
    def body(context: Context) -> None:
        net = torch.nn.Linear(2, 1)
        made = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), op=getattr(hvd, op))
        with pytest.raises(AttributeError, match=r"'_allreduce_grad_async'.*as compression="):
            made._allreduce_grad_async = lambda parameter: (None, None)
        with pytest.raises(AttributeError, match=r"'_compression'.*as compression="):
            made._compression = hvd.Compression.fp16
        with pytest.raises(AttributeError, match=r"'_handles'.*synchronize\(\)"):
            made._handles.clear()
        assert not hasattr(made, "_requires_update")
        made._requires_update = set()  # as programs do that alternate two networks
        assert made._requires_update == set()
        made.mine, made._synchronized = 1, False  # others can be set

    run_ranks(2, body)


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_an_optimizer_keeps_its_own_attribute_of_the_name_of_an_inside(hvd: ModuleType, op: str) -> None:
    class Sketching(torch.optim.SGD):
        _handles = ("of the class",)

    def body(context: Context) -> None:
        inner = Sketching([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        inner._compression = "of the instance"  # type: ignore[attr-defined]
        made = hvd.DistributedOptimizer(inner, op=getattr(hvd, op))
        made._compression += " itself"
        assert (made._handles, made._compression) == (("of the class",), "of the instance itself")

    run_ranks(2, body)


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_backward_passes_per_step_is_read_and_set(hvd: ModuleType, op: str) -> None:
    def body(context: Context) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(1))
        inner = torch.optim.SGD([weight], lr=1.0)
        made = hvd.DistributedOptimizer(inner, backward_passes_per_step=3, op=getattr(hvd, op))
        assert made.backward_passes_per_step == 3
        made.backward_passes_per_step = 2
        assert made.backward_passes_per_step == 2
        with pytest.raises(ValueError, match="must be > 0"):
            made.backward_passes_per_step = 0
        for _ in range(2):
            weight.sum().backward()
        made.step()
        return weight.tolist()

    assert run_ranks(2, body) == [[-2.0], [-2.0]]


def test_a_compression_that_loses_the_shape_of_a_gradient_is_named(hvd: ModuleType) -> None:
    class First(hvd.compression.Compressor):  # type: ignore[misc]
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
            return tensor[:1].clone(), None

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: None) -> torch.Tensor:
            return tensor

    def body(context: Context) -> None:
        weight = torch.nn.Parameter(torch.zeros(3))
        named = [("weight", weight)]
        made = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), named_parameters=named, compression=First)
        (weight * torch.arange(3)).sum().backward()
        with pytest.raises(ValueError, match=r"weight.*returned \[1\] in place of \[3\]"):
            made.step()
        assert weight.tolist() == [0, 0, 0]

    run_ranks(2, body)
