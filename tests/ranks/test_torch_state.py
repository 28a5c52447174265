"""Parameters, optimizer state and objects of one rank reach the others."""

import math
import warnings
from collections import OrderedDict
from typing import NamedTuple

import pytest

pytest.importorskip("torch")

import torch

import farandole.torch as hvd
from farandole.core.context import Context
from farandole.errors import InvalidRequest
from farandole.torch.state import _put_tensors, _take_tensors
from helpers.bindings import SIZES
from helpers.ranks import run_ranks

every_size = pytest.mark.parametrize("size", SIZES)


def optimizer_classes() -> list[type[torch.optim.Optimizer]]:
    left_out = (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
    found = [value for value in vars(torch.optim).values() if isinstance(value, type)]
    return [each for each in found if issubclass(each, torch.optim.Optimizer) and each not in left_out]


def network(rank: int) -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2, bias=False))
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return net


def make(kind: type[torch.optim.Optimizer], net: torch.nn.Module, rank: int) -> torch.optim.Optimizer:
    if kind.__name__ == "Muon":
        # It takes matrices only.
        parameters = [parameter for parameter in net.parameters() if parameter.dim() == 2]
        return kind(parameters, lr=0.01 * (rank + 1))
    return kind(net.parameters(), lr=0.01 * (rank + 1))


def some_steps(net: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(2):
        optimizer.zero_grad()
        net(torch.full((4, 3), rank + step + 1.0) * torch.arange(12.0).reshape(4, 3)).square().sum().backward()
        optimizer.step()


def assert_same(mine: object, theirs: object) -> None:
    assert type(mine) is type(theirs)
    if isinstance(mine, torch.Tensor):
        assert isinstance(theirs, torch.Tensor)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    elif isinstance(mine, dict):
        assert isinstance(theirs, dict)
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert_same(mine[key], theirs[key])
    elif isinstance(mine, (list, tuple)):
        assert isinstance(theirs, (list, tuple))
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_same(one, other)
    else:
        assert mine == theirs


@pytest.mark.parametrize("kind", optimizer_classes(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("trained", ["root", "all", "none"])
def test_every_optimizer_gets_the_state_of_the_root(kind: type[torch.optim.Optimizer], trained: str) -> None:
    def body(context: Context) -> dict[str, object]:
        net = network(context.rank)
        optimizer = make(kind, net, context.rank)
        if trained == "all" or (trained == "root" and context.rank == 1):
            some_steps(net, optimizer, context.rank)
        before = optimizer.state_dict()
        hvd.broadcast_parameters(net.state_dict(), root_rank=1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1, model=net)
        after = optimizer.state_dict()
        if context.rank == 1:
            assert_same(after, before)
        some_steps(net, optimizer, 0)
        return {"after": after, "weights": net.state_dict()}

    first, *others = run_ranks(3, body)
    for other in others:
        assert_same(other, first)


def test_the_state_goes_through_the_wrapper_and_keeps_types() -> None:
    def body(context: Context) -> None:
        net = network(context.rank)
        inner = torch.optim.AdamW(net.parameters(), lr=0.01 * (context.rank + 1), betas=(0.8, 0.9 + context.rank / 100))
        optimizer = hvd.DistributedOptimizer(inner, net.named_parameters())
        hvd.broadcast_parameters(net.state_dict(), 0)
        some_steps(net, optimizer, context.rank)
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
        assert optimizer.param_groups[0]["lr"] == 0.01
        some_steps(net, optimizer, context.rank)

    run_ranks(2, body)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=["average", "adasum"])
def test_the_state_of_sparse_adam(op: int) -> None:
    def body(context: Context) -> dict[str, object]:
        table = torch.nn.Embedding.from_pretrained(torch.ones(6, 2) * context.rank, freeze=False, sparse=True)
        inner = torch.optim.SparseAdam(table.parameters(), lr=0.01 * (context.rank + 1))
        if context.rank == 0:
            table(torch.tensor([1, 4])).square().sum().backward()
            inner.step()
        optimizer = hvd.DistributedOptimizer(inner, table.named_parameters(), op=op)
        hvd.broadcast_parameters(table.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0, model=table)
        for step in range(2):
            optimizer.zero_grad()
            table(torch.tensor([context.rank, step])).square().sum().backward()
            optimizer.step()
        state = optimizer.state_dict()
        if op == hvd.Adasum:
            state["state"] = {}  # each rank's own
        return {"state": state, "weights": table.state_dict()}

    first, second = run_ranks(2, body)
    assert_same(second, first)


def test_lbfgs_is_refused() -> None:
    def body(context: Context) -> None:
        with pytest.raises(ValueError, match="LBFGS"):
            hvd.broadcast_optimizer_state(torch.optim.LBFGS(network(0).parameters()), 0)

    run_ranks(1, body)


@every_size
def test_parameters_in_all_the_forms_people_pass(size: int) -> None:
    def body(context: Context) -> None:
        want = network(size - 1)
        for form in (
            lambda net: net.state_dict(),
            lambda net: list(net.named_parameters()),
            lambda net: list(net.parameters()),
        ):
            net = network(context.rank)
            hvd.broadcast_parameters(form(net), root_rank=size - 1)
            for mine, theirs in zip(net.parameters(), want.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        for wrong in (net.parameters(), net, "weights"):
            with pytest.raises(ValueError, match="invalid params of type"):
                hvd.broadcast_parameters(wrong, 0)
        with pytest.raises(ValueError, match="tensors"):
            hvd.broadcast_parameters([1, 2], 0)
        for tensor, why in ((torch.eye(2).to_sparse(), "sparse"), (torch.ones(1).expand(2), "expand")):
            with pytest.raises(InvalidRequest, match=rf"'parameter.last'.*{why}"):
                hvd.broadcast_parameters({"first": torch.ones(1), "last": tensor}, 0)
        with pytest.raises(InvalidRequest, match="root"):
            hvd.broadcast_parameters(net.state_dict(), size)

    run_ranks(size, body)


def test_tensors_that_do_not_lie_plainly_or_cannot_be_reduced() -> None:
    def body(context: Context) -> None:
        rank = context.rank
        tensors = {
            "transposed": torch.full((3, 4), float(rank)).t(),
            "channels last": torch.full((1, 2, 3, 3), float(rank)).to(memory_format=torch.channels_last),
            "complex": torch.full((3,), complex(rank, -rank)),
            "conjugated": torch.full((3,), complex(rank, -rank)).conj(),
            "fp8": torch.full((4,), float(rank)).to(torch.float8_e5m2),
            "bfloat16": torch.full((4,), float(rank)).bfloat16(),
            "bool": torch.full((4,), bool(rank)),
            "scalar": torch.tensor(rank),
            "empty": torch.empty(0, rank * 0),
        }
        hvd.broadcast_parameters(tensors, root_rank=1)
        assert float(tensors["transposed"].sum()) == 12
        assert float(tensors["channels last"].sum()) == 18
        assert tensors["complex"].tolist() == [1 - 1j] * 3
        assert tensors["conjugated"].tolist() == [1 + 1j] * 3
        assert tensors["fp8"].float().tolist() == [1.0] * 4
        assert tensors["bfloat16"].tolist() == [1.0] * 4
        assert tensors["bool"].all()
        assert int(tensors["scalar"]) == 1

    run_ranks(2, body)


def test_values_that_are_no_tensors_are_left_alone() -> None:
    def body(context: Context) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hvd.broadcast_parameters({"w": torch.ones(2), "_extra_state": {"a": 1}}, 0)
        return [str(warning.message) for warning in caught]

    # Warnings are caught per process.
    for texts in run_ranks(2, body, how="processes", framework="torch"):
        assert texts == ["_extra_state: no tensors, not broadcast; use broadcast_object"]


class Pair(NamedTuple):
    first: object
    second: object


def test_a_state_survives_taking_its_tensors_out() -> None:
    state = OrderedDict(
        a=[torch.ones(2), (1, torch.zeros(3))], b=Pair(torch.arange(3), "text"), c={1: {"lr": 0.1, "nan": math.inf}}
    )
    tensors: list[torch.Tensor] = []
    skeleton = _take_tensors(state, tensors)
    assert len(tensors) == 3
    assert isinstance(state["a"][0], torch.Tensor)
    assert_same(_put_tensors(skeleton, tensors), state)
