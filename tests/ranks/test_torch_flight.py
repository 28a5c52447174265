"""Gradients that are looked at between backward and step: clipping, gradient scalers, norms, without `synchronize`."""

import contextlib
import gc
import weakref
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import farandole.torch as hvd
from farandole.core.context import Context
from farandole.errors import InvalidRequest
from farandole.torch.flight import InFlight
from helpers.bindings import SIZES
from helpers.ranks import run_ranks
from helpers.training import build, loss_of, values

every_size = pytest.mark.parametrize("size", SIZES)
STEPS = 4
Clip = Callable[[torch.nn.Module], object]

CLIPS: dict[str, Clip] = {
    "norm": lambda net: clip_grad_norm_(net.parameters(), 0.1),
    "norm one by one": lambda net: clip_grad_norm_(net.parameters(), 0.1, foreach=False),
    "greatest": lambda net: clip_grad_norm_(net.parameters(), 0.05, norm_type=float("inf")),
    "values": lambda net: clip_grad_value_(net.parameters(), 0.01),
    "one": lambda net: next(net.parameters()).grad.mul_(0.5),
    "data": lambda net: [p.grad.data.clamp_(-0.01, 0.01) for p in net.parameters()],
    "numpy": lambda net: [p.grad.numpy().__imul__(0.5) for p in net.parameters()],
    "out": lambda net: [torch.mul(p.grad, 0.5, out=p.grad) for p in net.parameters()],
}


def momentum(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def clipped_alone(clip: Clip, passes: int = 1) -> torch.Tensor:
    net = build()
    optimizer = momentum(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        for place in range(passes):
            loss_of(net, step * passes + place).backward()
        clip(net)
        optimizer.step()
    return values(net)


@every_size
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("synchronized", [False, True], ids=["at once", "after synchronize"])
def test_clipping_before_the_step_clips_the_reduced_gradients(size: int, clip: str, synchronized: bool) -> None:
    def body(context: Context) -> torch.Tensor:
        net = build()
        optimizer = hvd.DistributedOptimizer(momentum(net), net.named_parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, step, context.rank, size).backward()
            if synchronized:
                optimizer.synchronize()
            CLIPS[clip](net)
            with optimizer.skip_synchronize() if synchronized else contextlib.nullcontext():
                optimizer.step()
        return values(net)

    want = clipped_alone(CLIPS[clip])
    for got in run_ranks(size, body):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "options",
    [{"groups": 2}, {"op": hvd.Sum, "gradient": 0.5}, {"backward_passes_per_step": 3}],
    ids=lambda options: next(iter(options)),
)
def test_clipping_with_each_way_to_reduce(options: dict[str, object]) -> None:
    options = dict(options)
    weight = options.pop("gradient", 1.0)
    passes = options.get("backward_passes_per_step", 1)

    def body(context: Context) -> torch.Tensor:
        net = build()
        optimizer = hvd.DistributedOptimizer(momentum(net), net.named_parameters(), **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            for place in range(passes):
                (weight * loss_of(net, step * passes + place, context.rank, 2)).backward()
            CLIPS["norm"](net)
            optimizer.step()
        return values(net)

    want = clipped_alone(CLIPS["norm"], passes)
    for got in run_ranks(2, body):
        torch.testing.assert_close(got, want)


def test_between_passes_gradients_are_this_ranks_own() -> None:
    def body(context: Context) -> None:
        weight = torch.ones(2, requires_grad=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), backward_passes_per_step=2)
        (weight * context.rank).sum().backward()
        assert weight.grad.tolist() == [context.rank] * 2
        (weight * context.rank).sum().backward()
        assert weight.grad.tolist() == [1.0] * 2
        optimizer.step()
        assert weight.tolist() == [0.0] * 2
        assert type(weight.grad) is torch.Tensor

    run_ranks(2, body)


@every_size
@pytest.mark.parametrize("way", ["optimizer.zero_grad", "model.zero_grad", "recipe"])
def test_a_gradient_scaler_decides_alike_on_all_ranks(size: int, way: str) -> None:
    """One rank's gradients overflow in one step: nobody takes it, and all scales shrink."""

    def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        scales = []
        for step in range(6):
            (net if way == "model.zero_grad" else optimizer).zero_grad()
            loss = loss_of(net, step, rank, size)
            # On the last rank alone; alone, one process has all ranks' rows.
            scaler.scale(loss * float("inf") if step in (0, 3) and rank == size - 1 else loss).backward()
            if way == "recipe" and isinstance(optimizer, torch.optim.SGD) and hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                clip_grad_norm_(net.parameters(), 0.1)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                if way == "recipe":
                    scaler.unscale_(optimizer)
                    clip_grad_norm_(net.parameters(), 0.1)
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    def body(context: Context) -> tuple[torch.Tensor, list[float]]:
        net = build()
        optimizer = hvd.DistributedOptimizer(momentum(net), net.named_parameters())
        scales = train(net, optimizer, context.rank, size)
        return values(net), scales

    alone = build()
    want = train(alone, momentum(alone), 0, 1)
    assert want == [4, 4, 8, 4, 4, 8]
    for got, scales in run_ranks(size, body):
        torch.testing.assert_close(got, values(alone))
        assert scales == want


def test_what_only_others_had_is_told_when_it_was_too_late() -> None:
    """The rank without it has clipped by another norm than the others, and would have gone its own way."""

    def body(context: Context) -> None:
        used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, unused], lr=1.0), groups=2)
        (used.sum() + (unused.sum() if context.rank else 0)).backward()
        clip_grad_norm_([used, unused], 1.0)
        if context.rank:
            optimizer.step()
        else:
            with pytest.raises(InvalidRequest, match=r"noname\.0\.1.*optimizer\.synchronize\(\) after backward"):
                optimizer.step()
        # The recipe that the error tells of, and a parameter that no rank has used.
        for both in (True, False):
            optimizer.zero_grad()
            (used.sum() + (unused.sum() if both and context.rank else 0)).backward()
            if both:
                optimizer.synchronize()
            clip_grad_norm_([used, unused], 1.0)
            with optimizer.skip_synchronize() if both else contextlib.nullcontext():
                optimizer.step()
        if both:
            torch.testing.assert_close(unused.grad, torch.full((2,), 0.5))

    run_ranks(2, body)


def test_one_group_that_waits_for_a_gradient_of_others() -> None:
    def body(context: Context) -> None:
        used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, unused], lr=1.0), groups=1)
        used.sum().backward()
        clip_grad_norm_([used, unused], 1.0)
        with pytest.raises(InvalidRequest, match="gradients were read"):
            optimizer.step()

    run_ranks(2, body)


def test_sparse_gradients_are_looked_at_when_they_are_reduced() -> None:
    def body(context: Context) -> None:
        table = torch.nn.Embedding.from_pretrained(torch.ones(4, 2), freeze=False, sparse=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(table.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(table(torch.tensor([context.rank, 3])).sum()).backward()
        scaler.unscale_(optimizer)
        assert table.weight.grad.to_dense().tolist() == [[0.5] * 2, [0.5] * 2, [0.0] * 2, [1.0] * 2]
        scaler.step(optimizer)
        assert table.weight.grad.is_sparse

    run_ranks(2, body)


def test_a_gradient_in_flight_is_a_tensor_like_others() -> None:
    def body(context: Context) -> None:
        weight = torch.nn.Parameter(torch.ones(2, 3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
        looks: list[Callable[[torch.Tensor], object]] = [
            lambda grad: torch.testing.assert_close(grad + 0, torch.full((2, 3), 2.0)),
            lambda grad: torch.testing.assert_close(torch.stack([grad, grad])[1], torch.full((2, 3), 2.0)),
            lambda grad: torch.testing.assert_close(torch.add(input=grad, other=1), torch.full((2, 3), 3.0)),
            lambda grad: repr(grad) == repr(torch.full((2, 3), 2.0)) or pytest.fail(repr(grad)),
            lambda grad: (grad.shape == (2, 3) and grad.dtype == torch.float32) or pytest.fail("shape"),
        ]
        for look in looks:
            optimizer.zero_grad()
            weight.sum().backward()
            held = weight.grad
            assert type(held) is InFlight
            look(held)
            look(held)
            look(weight.grad)
            assert type(weight.grad) is torch.Tensor
        optimizer.step()

    run_ranks(2, body)


def test_a_gradient_is_the_same_tensor_before_during_and_after_its_flight() -> None:
    class Kind(torch.Tensor):
        """A class that a library may give to gradients."""

    def body(context: Context) -> None:
        plain, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
        other.register_post_accumulate_grad_hook(_become(Kind))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([plain, other], lr=1.0), op=hvd.Sum)
        (plain + other).sum().backward()
        held = [plain.grad, other.grad]
        assert [type(each) for each in held] == [InFlight, InFlight]
        optimizer.synchronize()
        assert plain.grad is held[0] and other.grad is held[1]
        assert [type(each) for each in held] == [torch.Tensor, Kind]
        assert [each.tolist() for each in held] == [[2.0, 2.0], [2.0, 2.0]]
        assert [each.__dict__ for each in held] == [{}, {}]  # can be pickled, and copied

    run_ranks(2, body)


def test_one_rank_reads_gradients_and_the_others_do_not() -> None:
    """As for a log: what the others have held back is started all the same, before they wait for something else."""

    def body(context: Context) -> None:
        weight, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, unused], lr=1.0), op=hvd.Sum)
        weight.sum().backward()
        if context.rank == 0:
            assert weight.grad.tolist() == [2.0, 2.0]
        hvd.barrier()
        optimizer.synchronize()

    run_ranks(2, body, timeout=20)


def test_methods_that_torch_does_not_hand_to_a_class_wait_too() -> None:
    def body(context: Context) -> None:
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
        weight.sum().backward()
        assert weight.grad.as_subclass(torch.Tensor).tolist() == [2.0, 2.0]
        optimizer.zero_grad()
        weight.sum().backward()
        held = weight.grad
        held.set_(torch.full((2,), 5.0))
        assert type(held) is torch.Tensor  # nothing is in flight whose memory was freed
        optimizer.step()
        assert weight.tolist() == [-4.0, -4.0]

    run_ranks(2, body)


def test_a_gradient_of_a_class_with_slots() -> None:
    class Slotted(torch.Tensor):
        __slots__ = ("place",)

    def body(context: Context) -> None:
        weight = torch.nn.Parameter(torch.ones(2))
        weight.register_post_accumulate_grad_hook(_become(Slotted))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
        for looks in (False, True):
            optimizer.zero_grad()
            weight.sum().backward()
            assert not looks or weight.grad.tolist() == [2.0, 2.0]
            optimizer.step()
            assert type(weight.grad) is Slotted and weight.grad.tolist() == [2.0, 2.0]

    run_ranks(2, body)


def test_a_sparse_gradient_that_was_taken_away_in_flight_can_be_read() -> None:
    def body(context: Context) -> None:
        table = torch.nn.Embedding(4, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
        table(torch.tensor([1])).sum().backward()
        taken, table.weight.grad = table.weight.grad, None
        assert taken.to_dense()[1].tolist() == [1.0, 1.0]
        optimizer.synchronize()
        assert taken.to_dense()[1].tolist() == [1.0, 1.0]

    run_ranks(2, body)


def _become(kind: type[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.as_subclass(kind)

    return hook


def test_nothing_is_kept_alive_by_a_gradient_in_flight() -> None:
    def body(context: Context) -> None:
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        weight.sum().backward()
        hvd.barrier()
        held, gone = weight.grad, weakref.ref(weight)
        del optimizer, weight
        gc.collect()
        assert gone() is None
        assert held.shape == (2,)

    run_ranks(2, body)
