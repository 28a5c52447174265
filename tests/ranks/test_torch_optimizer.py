"""DistributedOptimizer: the ranks together do what one process does with all their rows."""

import copy
import gc
import os
import signal
import warnings
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch")

import torch

import farandole.torch as hvd
from farandole.core.context import Context
from farandole.core.default import use
from farandole.errors import InvalidRequest, MismatchError, PeerLost
from farandole.meeting.rendezvous import SoloRendezvous
from helpers.bindings import SIZES
from helpers.ranks import run_ranks
from helpers.training import build, loss_of, values

every_size = pytest.mark.parametrize("size", SIZES)

OPTIMIZERS: dict[str, Callable[[Iterator[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, decoupled_weight_decay=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    # It takes matrices only.
    "muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2], lr=0.05),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "capturing": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01, dtype=torch.float64), foreach=False),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4),
    "line search": lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
}


def train(
    net: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int = 0,
    size: int = 1,
    steps: int = 5,
    passes: int = 1,
    closures: bool = False,
) -> list[torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, step, rank, size)
        loss.backward()
        return loss

    for step in range(steps):
        if closures or isinstance(optimizer, torch.optim.LBFGS):
            assert optimizer.step(closure) is not None
            continue
        optimizer.zero_grad()
        for place in range(passes):
            loss_of(net, step * passes + place, rank, size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def alone(name: str, passes: int = 1) -> list[torch.Tensor]:
    net = build()
    return train(net, OPTIMIZERS[name](net.parameters()), passes=passes)


def check(
    size: int, body: Callable[[Context], list[torch.Tensor]], want: list[torch.Tensor], rtol: float = 1e-9
) -> None:
    for got in run_ranks(size, body):
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("closures", [False, True], ids=["", "with closures"])
def test_ranks_train_like_one_process(size: int, name: str, closures: bool) -> None:
    def body(context: Context) -> list[torch.Tensor]:
        net = build()
        inner = OPTIMIZERS[name](net.parameters())
        optimizer = hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters())
        assert isinstance(optimizer, type(inner))
        assert type(optimizer).__name__ == type(inner).__name__
        return train(net, optimizer, context.rank, size, closures=closures)

    check(size, body, alone(name), rtol=2e-3 if name == "muon" else 1e-9)  # Muon computes in bfloat16


def test_no_optimizer_of_torch_is_left_out() -> None:
    held = [torch.ones(2, 2, requires_grad=True)]
    tried = {type(make(iter(held))) for make in OPTIMIZERS.values()} | {torch.optim.SparseAdam}  # see sparse gradients
    found = {each for each in vars(torch.optim).values() if isinstance(each, type)}
    assert {each for each in found if issubclass(each, torch.optim.Optimizer)} - tried == {torch.optim.Optimizer}


@every_size
@pytest.mark.parametrize("groups", [1, 2, 3, 100, "lists"])
def test_groups_change_nothing_but_speed(size: int, groups: int | str) -> None:
    def body(context: Context) -> list[torch.Tensor]:
        net = build()
        first, bias, second, last = net.parameters()
        # Each rank may hold its parameters in another order.
        ordered = list(net.parameters()) if context.rank % 2 else list(net.parameters())[::-1]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(ordered, lr=0.1),
            named_parameters=net.named_parameters(),
            groups=[[first, second], [last]] if groups == "lists" else groups,
            gradient_predivide_factor=2.0,
        )
        assert bias.requires_grad
        return train(net, optimizer, context.rank, size)

    check(size, body, alone("sgd"))


@every_size
def test_gradients_of_several_passes_are_added(size: int) -> None:
    def body(context: Context) -> list[torch.Tensor]:
        net = build()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](net.parameters()), backward_passes_per_step=3)
        return train(net, optimizer, context.rank, size, passes=3)

    check(size, body, alone("sgd", passes=3))


@every_size
def test_sum_with_a_smaller_rate_and_half_floats_on_the_wire(size: int) -> None:
    def summed(context: Context) -> list[torch.Tensor]:
        net = build()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1 / size), op=hvd.Sum)
        return train(net, optimizer, context.rank, size)

    def halved(context: Context) -> list[torch.Tensor]:
        net = build()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), compression=hvd.Compression.fp16, gradient_predivide_factor=size
        )
        return train(net, optimizer, context.rank, size)

    check(size, summed, alone("sgd"))
    check(size, halved, alone("sgd"), rtol=1e-2)


@every_size
def test_synchronize_then_clip_then_step(size: int) -> None:
    net = build()
    plain = OPTIMIZERS["momentum"](net.parameters())
    for step in range(4):
        plain.zero_grad()
        loss_of(net, step).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        plain.step()

    def body(context: Context) -> list[torch.Tensor]:
        net = build()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](net.parameters()))
        for step in range(4):
            optimizer.zero_grad()
            loss_of(net, step, context.rank, size).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        return [parameter.detach() for parameter in net.parameters()]

    check(size, body, [parameter.detach() for parameter in net.parameters()])


@pytest.mark.parametrize(
    ("first", "second"), [(hvd.Average, hvd.Average), (hvd.Average, hvd.Adasum), (hvd.Adasum, hvd.Sum)]
)
def test_a_distributed_optimizer_is_not_made_distributed_again(first: int, second: int) -> None:
    with Context(SoloRendezvous()) as context, use(context):
        once = hvd.DistributedOptimizer(torch.optim.SGD(build().parameters(), lr=0.1), op=first)
        with pytest.raises(ValueError, match="the SGD is distributed already"):
            hvd.DistributedOptimizer(once, op=second)


def test_step_after_synchronize_warns_once_and_does_not_reduce_twice() -> None:
    def body(context: Context) -> list[str]:
        net = build()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), op=hvd.Sum)
        loss_of(net, 0, context.rank, 2).backward()
        optimizer.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        plain = build()
        loss_of(plain, 0).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)
        return [str(warning.message) for warning in caught]

    # Warnings are caught per process.
    for texts in run_ranks(2, body, how="processes", framework="torch"):
        assert len(texts) == 1
        assert "optimizer.step() called without optimizer.skip_synchronize()" in texts[0]


def test_a_step_skipped_after_synchronize_does_not_hide_new_gradients() -> None:
    """As when a gradient scaler finds infinities and leaves the step out."""

    def body(context: Context) -> torch.Tensor:
        net = build()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](net.parameters()))
        loss_of(net, 0, context.rank, 2).backward()
        optimizer.synchronize()
        optimizer.zero_grad()
        loss_of(net, 1, context.rank, 2).backward()
        optimizer.step()
        return values(net)

    first, second = run_ranks(2, body)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_gradient_scaler_recipe() -> None:
    def body(context: Context) -> torch.Tensor:
        net = build()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](net.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(loss_of(net, 0, context.rank, 2)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        return values(net)

    net = build()
    loss_of(net, 0).backward()
    OPTIMIZERS["sgd"](net.parameters()).step()
    want = values(net)
    for got in run_ranks(2, body):
        torch.testing.assert_close(got, want)


def test_a_gradient_that_fails_spoils_no_other_and_no_later_step() -> None:
    def body(context: Context) -> None:
        widths = (3, 4 + context.rank, 5)
        weights = [torch.ones(width, requires_grad=True) for width in widths]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), op=hvd.Sum)
        for _ in range(2):
            sum(weight.sum() for weight in weights).backward()
            with pytest.raises(MismatchError, match=r"noname\.0\.1.*4.*5"):
                optimizer.step()
            assert [float(weight.grad[0]) for weight in weights] == [2.0, 1.0, 2.0]
            optimizer.zero_grad()

    run_ranks(2, body)


def test_the_others_hear_which_rank_has_died() -> None:
    def body(context: Context) -> None:
        net = build()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](net.parameters()))
        with pytest.raises(PeerLost) as caught:
            for step in range(1000):
                optimizer.zero_grad()
                loss_of(net, step, context.rank, 3).backward()
                if context.rank == 1 and step == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
        assert caught.value.rank == 1

    run_ranks(3, body, how="processes", dies={1}, framework="torch")


def test_misuse_is_an_assertion() -> None:
    def body(context: Context) -> None:
        net = build()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](net.parameters()), backward_passes_per_step=2)
        loss_of(net, 0).backward()
        with pytest.raises(AssertionError, match="prohibited"):
            optimizer.zero_grad()
        loss_of(net, 0).backward()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
            loss_of(net, 0).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert all(parameter.grad is None for parameter in net.parameters())
        optimizer.set_backward_passes_per_step(1)
        loss_of(net, 0).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert all(not parameter.grad.any() for parameter in net.parameters())

    run_ranks(2, body)


@every_size
def test_a_rank_whose_loss_leaves_parameters_out(size: int) -> None:
    def body(context: Context) -> None:
        used, unused = torch.nn.Linear(3, 1, bias=False), torch.nn.Linear(3, 1, bias=False)
        both = [used.weight, unused.weight]
        hvd.broadcast_parameters(both, 0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(both, lr=1.0))
        before = unused.weight.detach().clone()
        net = unused if context.rank == 0 else used
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(unused.weight.grad, torch.full((1, 3), 1 / size))
        torch.testing.assert_close(unused.weight.detach(), before - 1 / size)

    run_ranks(size, body)


def test_parameters_that_are_frozen_and_thawed() -> None:
    def body(context: Context) -> list[torch.Tensor]:
        first, second = torch.nn.Linear(2, 2).double(), torch.nn.Linear(2, 2).double()
        hvd.broadcast_parameters([*first.parameters(), *second.parameters()], 0)
        second.requires_grad_(False)
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(prefix=name))
            for name, net in (("first", first), ("second", second))
        ]
        for turn in range(6):
            for place, net in enumerate((first, second)):
                net.requires_grad_(place == turn % 2)
                optimizers[place].zero_grad()
            second(first(torch.full((1, 2), context.rank + 1.0, dtype=torch.float64))).sum().backward()
            optimizers[turn % 2].step()
            frozen = (first, second)[1 - turn % 2]
            assert all(parameter.grad is None for parameter in frozen.parameters())
        return [parameter.detach() for parameter in (*first.parameters(), *second.parameters())]

    one, other = run_ranks(2, body)
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_a_group_does_not_move_parameters_that_are_frozen_later() -> None:
    def body(context: Context) -> list[torch.Tensor | None]:
        net = torch.nn.Linear(2, 2)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, net.named_parameters(), groups=1)
        kept: list[torch.Tensor | None] = []
        for frozen in (False, True, False):
            net.bias.requires_grad_(not frozen)
            optimizer.zero_grad()
            net(torch.full((1, 2), context.rank + 1.0)).sum().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 100.0)  # waits for the group
            torch.testing.assert_close(net.weight.grad, torch.full((2, 2), 1.5))
            before = net.bias.detach().clone()
            optimizer.step()
            assert torch.equal(net.bias, before) == frozen
            kept.append(net.bias.grad)
        return kept

    for first, second, third in run_ranks(2, body):
        assert second is None
        torch.testing.assert_close(first, torch.ones(2))
        torch.testing.assert_close(third, torch.ones(2))


def test_parameters_added_later_are_reduced_too() -> None:
    def body(context: Context) -> list[torch.Tensor]:
        first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        hvd.broadcast_parameters([*first.parameters(), *second.parameters()], 0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(first.parameters(), lr=0.1), first.named_parameters())
        optimizer.add_param_group({"params": list(second.parameters()), "lr": 0.5})
        for _ in range(3):
            optimizer.zero_grad()
            second(first(torch.full((1, 2), context.rank + 1.0))).sum().backward()
            optimizer.step()
        return [parameter.detach() for parameter in (*first.parameters(), *second.parameters())]

    one, other = run_ranks(2, body)
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@every_size
@pytest.mark.parametrize("kind", ["SGD", "SparseAdam", "SparseAdam as dense"])
def test_sparse_gradients(size: int, kind: str) -> None:
    dense, as_dense = kind == "SGD", kind != "SparseAdam"
    start = torch.arange(20.0).reshape(10, 2)

    def body(context: Context) -> None:
        table = torch.nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=True)
        inner = torch.optim.SGD(table.parameters(), lr=1.0) if dense else torch.optim.SparseAdam(table.parameters())
        optimizer = hvd.DistributedOptimizer(inner, table.named_parameters(), sparse_as_dense=as_dense)
        plain = torch.nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=not dense)
        reference = type(inner)(plain.parameters(), lr=1.0 if dense else 1e-3)
        for step in range(3):
            asked = [torch.tensor([rank, rank, step, 7]) for rank in range(size)]
            # The last rank has nothing to add in the last step.
            silent = step == 2 and context.rank == size - 1 and size > 1
            optimizer.zero_grad()
            if not silent:
                (table(asked[context.rank]) ** 2).sum().backward()
            optimizer.step()
            reference.zero_grad()
            heard = asked[: size - 1] if step == 2 and size > 1 else asked
            (sum((plain(each) ** 2).sum() for each in heard) / size).backward()
            reference.step()
            torch.testing.assert_close(table.weight.detach(), plain.weight.detach())
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse != dense or size == 1

    run_ranks(size, body)


def test_sparse_allreduce_equals_the_dense_one() -> None:
    def body(context: Context) -> None:
        dense = torch.zeros(5, 4)
        dense[context.rank] = context.rank + 1.0
        dense[4, 2] = 1.0
        for dims in (1, 2):
            for op in (hvd.Sum, hvd.Average):
                result = hvd.sparse_allreduce_async(dense.to_sparse(dims), f"s{dims}{op}", op)()
                torch.testing.assert_close(result.to_dense(), hvd.allreduce(dense, op=op))
        with pytest.raises(InvalidRequest, match="Average or op=Sum"):
            hvd.sparse_allreduce_async(dense.to_sparse(), "s", hvd.Max)
        with pytest.raises(InvalidRequest, match="sparse COO"):
            hvd.sparse_allreduce_async(dense, "s", hvd.Sum)

    run_ranks(3, body)


def test_sparse_averages_of_integers_are_exact() -> None:
    def body(context: Context) -> None:
        for dtype in (torch.int8, torch.int32, torch.int64):
            dense = torch.tensor([1, -1, 100, 0 if context.rank else 7, 0]).to(dtype)
            result = hvd.sparse_allreduce_async(dense.to_sparse(), f"s{dtype}", hvd.Average)()
            assert torch.equal(result.to_dense(), hvd.allreduce(dense))
        for dtype, refusal in ((torch.bool, "cannot be averaged"), (torch.complex64, "is not supported")):
            with pytest.raises(InvalidRequest, match=refusal):
                hvd.sparse_allreduce_async(torch.ones(3, dtype=dtype).to_sparse(), "s", hvd.Average)

    run_ranks(3, body)


@pytest.mark.parametrize("rows, sent", [([0, 0, 0, 4], 2), ([0, 1, 2, 3, 4, 4], 6), ([3] * 9, 1)])
def test_entries_at_one_place_are_added_up_first_where_that_saves_time(rows: list[int], sent: int) -> None:
    def body(context: Context) -> None:
        values = torch.arange(2.0 * len(rows)).reshape(-1, 2) + context.rank
        mine = torch.sparse_coo_tensor(torch.tensor([rows]), values, (50, 2), check_invariants=True)
        result = hvd.sparse_allreduce_async(mine, "s", hvd.Sum)()
        assert result._nnz() == 2 * sent
        torch.testing.assert_close(result.to_dense(), hvd.allreduce(mine.to_dense(), op=hvd.Sum))
        assert torch.equal(mine._values(), values)

    run_ranks(2, body)


def test_channels_last_gradients() -> None:
    def body(context: Context) -> torch.Tensor:
        net = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        if context.rank == 1:
            # Layouts may differ between ranks.
            net.to(memory_format=torch.contiguous_format)
        hvd.broadcast_parameters(net.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        picture = torch.full((2, 3, 8, 8), context.rank + 1.0).to(memory_format=torch.channels_last)
        net(picture).sum().backward()
        optimizer.step()
        return net.weight.detach()

    one, other = run_ranks(2, body)
    torch.testing.assert_close(one, other, rtol=0, atol=0, check_stride=False)


def test_an_optimizer_that_is_gone_leaves_no_hooks() -> None:
    def body(context: Context) -> None:
        net = build()
        for _ in range(3):
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](net.parameters()), net.named_parameters())
            train(net, optimizer, context.rank, 2, steps=2)
            del optimizer
            gc.collect()
        assert not any(parameter._post_accumulate_grad_hooks for parameter in net.parameters())

    run_ranks(2, body)


def test_a_scheduler_sees_and_sets_the_rate() -> None:
    def body(context: Context) -> None:
        net = build()
        inner = OPTIMIZERS["sgd"](net.parameters())
        before = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(inner, net.named_parameters())
        after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        want = alone("sgd") if context.rank == 0 else None
        train(net, optimizer, context.rank, 2)
        if want is not None:
            for mine, theirs in zip(net.parameters(), want, strict=True):
                torch.testing.assert_close(mine.detach(), theirs)
        after.step()
        assert optimizer.param_groups[0]["lr"] == 0.05 == inner.param_groups[0]["lr"]
        assert before.get_last_lr() == [0.1]

    run_ranks(2, body)


# PyTorch looks for steps of the optimizer that the scheduler was made of.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_scheduler_made_before_still_sets_the_rate_after_a_broadcast() -> None:
    def body(context: Context) -> list[float]:
        net = build()
        inner = OPTIMIZERS["momentum"](net.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(inner, net.named_parameters())
        train(net, optimizer, context.rank, 2)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        scheduler.step()
        momentum = inner.state[next(net.parameters())]["momentum_buffer"]
        assert momentum is optimizer.state[next(net.parameters())]["momentum_buffer"]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        scheduler.step()
        return [scheduler.get_last_lr()[0], inner.param_groups[0]["lr"], optimizer.param_groups[0]["lr"]]

    assert run_ranks(2, body) == [[0.025] * 3] * 2


def test_state_is_saved_and_loaded() -> None:
    def body(context: Context) -> None:
        net = build()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](net.parameters()), net.named_parameters())
        train(net, optimizer, context.rank, 2)
        saved = copy.deepcopy(optimizer.state_dict())
        again = build()
        other = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](again.parameters()), again.named_parameters())
        again.load_state_dict(net.state_dict())
        other.load_state_dict(saved)
        for mine, theirs in zip(
            train(again, other, context.rank, 2), train(net, optimizer, context.rank, 2), strict=True
        ):
            torch.testing.assert_close(mine, theirs)

    run_ranks(2, body)


@every_size
def test_arguments_are_checked(size: int) -> None:
    def body(context: Context) -> None:
        net = build()
        inner = OPTIMIZERS["sgd"](net.parameters())
        named = list(net.named_parameters())
        for problem, arguments in (
            ("tuples", {"named_parameters": [parameter for _, parameter in named]}),
            ("unique", {"named_parameters": [("same", parameter) for _, parameter in named]}),
            ("not named", {"named_parameters": named[1:]}),
            ("backward_passes_per_step", {"backward_passes_per_step": 0}),
            ("gradient_predivide_factor", {"gradient_predivide_factor": 2.0, "op": hvd.Sum}),
            ("groups", {"groups": 0}),
            ("more than once", {"groups": [[named[0][1]], [named[0][1]]]}),
            ("gradient_predivide_factor", {"gradient_predivide_factor": 2.0, "op": hvd.Adasum}),
            ("backward_passes_per_step", {"backward_passes_per_step": 0, "op": hvd.Adasum}),
        ):
            with pytest.raises(ValueError, match=problem):
                hvd.DistributedOptimizer(inner, **arguments)
        with pytest.raises(InvalidRequest, match="not registered"):
            hvd.DistributedOptimizer(inner, process_set=hvd.ProcessSet([0]))

    run_ranks(size, body)


def test_num_groups_is_deprecated() -> None:
    def body(context: Context) -> None:
        net = build()
        with pytest.warns(DeprecationWarning, match="groups="):
            optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](net.parameters()), num_groups=2)
        train(net, optimizer)

    run_ranks(1, body)
