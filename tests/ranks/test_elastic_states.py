"""States of elastic training, on ranks that are threads: what they save, restore, and take over from rank 0."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from farandole import elastic
from farandole.core import default
from farandole.core.context import Context
from farandole.core.default import use
from farandole.core.operations.kinds import ALLREDUCE
from farandole.core.operations.reduction import Max, Reduction
from farandole.core.operations.request import Request
from farandole.core.process_sets.process_set import ProcessSet, add_process_set, remove_process_set
from farandole.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState
from farandole.meeting.rendezvous import SoloRendezvous, ThreadRendezvous
from farandole.numpy import allreduce
from helpers.installed import require
from helpers.ranks import run_ranks


@pytest.fixture
def in_elastic_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "is_elastic", lambda: True)


def test_objects_are_those_of_rank_0_and_go_back_to_the_last_commit() -> None:
    def body(context: Context) -> None:
        state = ObjectState(step=context.rank, seen=[context.rank])
        state.step += 10  # not committed: what rank 0 holds is what counts
        state.sync()
        state.hold()
        assert (state.step, state.seen) == (10, [0])
        state.seen.append(5)
        state.commit()
        state.step, state.seen[0] = 99, 99
        state.restore()
        assert (state.step, state.seen) == (10, [0, 5])
        assert state.held_commits == 1

    run_ranks(2, body)


@pytest.mark.parametrize(("told", "skips"), [(1, True), (2, False), (3, False)])
def test_a_change_of_hosts_that_one_rank_knows_of_is_raised_on_all(told: int, skips: bool) -> None:
    def body(context: Context) -> None:
        state = ObjectState(step=0)
        state.commit()
        if context.rank == 1:
            state.on_hosts_updated(0.0, told)
        with pytest.raises(HostsUpdatedInterrupt) as raised:
            state.commit()
        assert raised.value.skip_sync is skips
        state.commit()

    run_ranks(2, body)


class Wrapped(Exception):
    """An error of a framework."""


def test_ranks_that_go_back_while_others_keep_their_state_take_it_over() -> None:
    def body(context: Context) -> tuple[bool, int]:
        state = ObjectState(step=0)
        state.sync()
        state.hold()
        state.commit()
        state.step = 1
        if context.rank == 0:
            state.on_hosts_updated(0.0, 2)
            with pytest.raises(HostsUpdatedInterrupt):
                state.check_host_updates()
        else:  # hears of a loss when the others have heard of hosts
            changes = bytearray(2)
            context.engine.run(Request(ALLREDUCE, reduction=Reduction(Max)), "elastic.host_changes", changes, changes)
            state.restore()
        is_shared = state.is_shared()
        state.sync()
        return is_shared, state.step

    assert run_ranks(2, body) == [(False, 1)] * 2


@pytest.mark.parametrize("way", ["save", "assign"])
def test_ranks_that_have_saved_since_the_last_commit_take_over_one_state(way: str) -> None:
    class Counted:
        def __init__(self, count: int) -> None:
            self.count = count

        def state_dict(self) -> int:
            return self.count

        def load_state_dict(self, count: int) -> None:
            self.count = count

    def body(context: Context) -> tuple[bool, int, bool]:
        state = ObjectState(counted=Counted(0))
        state.sync()
        state.hold()
        state.commit()
        if context.rank == 1:  # the other one hears of a loss before it comes here
            if way == "save":
                state.counted.count = 1
                state.save()
            else:
                state.counted = Counted(1)
        state.restore()
        was_shared = state.is_shared()
        state.sync()
        state.hold()
        state.commit()
        return was_shared, state.counted.count, state.is_shared()

    assert run_ranks(2, body) == [(False, 0, True)] * 2


def test_what_reset_callbacks_have_set_outlasts_a_second_loss(in_elastic_job: None) -> None:
    rates: list[float] = []

    def train(state: ObjectState) -> None:
        rates.append(state.rate)
        if len(rates) == 1:
            state.commit()
        if len(rates) < 3:
            raise HorovodInternalError("lost")

    def body(context: Context) -> None:
        state = ObjectState(rate=4.0)
        steps = itertools.pairwise([4, 3, 2])

        def scale() -> None:
            before, now = next(steps)
            state.rate *= now / before

        state.register_reset_callbacks([scale])
        elastic.run_fn(train, lambda commits: None)(state)
        assert rates == [4.0, 3.0, 2.0]

    run_ranks(1, body)


def test_training_begins_again_after_losses_that_frameworks_word(in_elastic_job: None) -> None:
    calls: list[int] = []

    def train(state: ObjectState) -> int:
        calls.append(state.step)
        state.step += 1
        match len(calls):
            case 1:
                raise HorovodInternalError("the program asks for it")
            case 2:
                state.save()
                raise Wrapped("ABORTED: 'allreduce.x' failed: rank 2 is lost (it was killed); its own output says why")
            case 3:
                raise Wrapped("fit failed") from HorovodInternalError("lost")
            case 4:
                raise HostsUpdatedInterrupt(skip_sync=True)
        return state.step

    def body(context: Context) -> None:
        resets: list[int] = []
        state = ObjectState(step=0)
        state.register_reset_callbacks([lambda: resets.append(state.step)])
        assert elastic.run_fn(train, lambda commits: None)(state) == 3
        assert (calls, resets) == ([0, 0, 1, 1, 2], [0, 1, 1, 2])

    run_ranks(1, body)


def test_a_loss_in_a_reset_callback_lets_the_ranks_meet_again(in_elastic_job: None) -> None:
    calls: list[str] = []

    def train(state: ObjectState) -> None:
        calls.append("train")
        if calls == ["train"]:
            raise HorovodInternalError("lost")

    def callback() -> None:
        calls.append("callback")
        if calls.count("callback") == 1:
            raise HorovodInternalError("lost again")

    def body(context: Context) -> None:
        state = ObjectState()
        state.register_reset_callbacks([callback])
        elastic.run_fn(train, lambda commits: calls.append("reset"))(state)
        assert calls == ["train", "reset", "callback", "reset", "callback", "train"]

    run_ranks(1, body)


def test_other_errors_end_the_training(in_elastic_job: None) -> None:
    def train(state: ObjectState) -> None:
        raise Wrapped("rank 2 has lost its mind")

    def body(context: Context) -> None:
        with pytest.raises(Wrapped):
            elastic.run_fn(train, lambda commits: pytest.fail("must not begin again"))(ObjectState())

    run_ranks(1, body)


# Loaders


def test_a_loader_goes_on_where_all_ranks_were(tmp_path: Path) -> None:
    require("fsspec", "pyarrow")
    from farandole.data import Loader, ParquetSource
    from helpers.datasets import RAGGED, write_rows

    rows = write_rows(tmp_path, RAGGED["many small"])

    def body(context: Context) -> list[int]:
        def made(rank: int, size: int) -> Loader:
            source = ParquetSource(str(tmp_path))
            return Loader(source, batch_size=3, policy="join", of_all_ranks=True, rank=rank, size=size)

        loader = made(0, 1)  # a rank that trains alone, and a new one
        state = ObjectState(loader=loader, step=0)
        assert state.loader is loader
        seen: list[int] = []
        with use_alone(context.rank == 0):
            for batch in loader if context.rank == 0 else ():
                if state.step == 4:
                    break  # this batch is not committed
                seen += batch["row"].tolist()
                state.step += 1
                state.commit()
            state.restore()
        state.reset()
        state.sync()
        assert state.step == 4
        for batch in loader:
            seen += batch["row"].tolist()
        return seen

    seen = run_ranks(2, body)
    assert sorted(seen[0] + seen[1]) == list(range(rows))


@contextmanager
def use_alone(wanted: bool = True) -> Iterator[None]:
    """Be a job of one rank for the block."""
    if not wanted:
        yield
        return
    with Context(SoloRendezvous()) as alone, use(alone):
        yield


# Process sets


def test_process_sets_come_along_into_the_next_generation() -> None:
    meetings = {1: ThreadRendezvous.group(2), 2: ThreadRendezvous.group(3)}
    places = {1: {0: 0, 2: 1}, 2: {0: 0, 2: 1, 1: 2}}  # by the first rank; rank 1 is lost, then another one comes

    def total(process_set: ProcessSet) -> float:
        return float(allreduce(np.ones(1), op=1, process_set=process_set, name="total")[0])

    def body(context: Context) -> list[object]:
        found: list[object] = []
        first, both, gone = (ProcessSet(ranks) for ranks in ([2], [0, 1], [1, 2]))
        for each in (first, both, gone):
            add_process_set(each)
        made = context.sets.made
        if context.rank == 1:
            made = {}
        for generation in (1, 2):
            if context.rank not in places[generation]:
                continue
            meeting = meetings[generation][places[generation][context.rank]]
            with Context(meeting) as ours, use(ours):
                ours.sets.carry(made)
                if context.rank == 1:  # a new rank runs the program, whose sets are there already
                    both = add_process_set([1, 0])
                    gone = add_process_set([2, 1])
                found += [each.ranks if each.process_set_id else None for each in (both, gone)]
                found += [each.process_set_id for each in (first, both, gone)]
                if both.included():
                    assert total(both) == 2
                if generation == 1:
                    remove_process_set(first)
                made = ours.sets.made
                assert add_process_set([0, 1]).process_set_id == both.process_set_id
        return found

    survivor, new, other = run_ranks(3, body)
    assert survivor == other
    # The set of rank 2 is not there while there are two ranks; the others keep their numbers.
    assert survivor[:5] == [[0, 1], [1], None, 2, 3]
    assert survivor[5:] == [[0, 1], [1, 2], 1, 2, 3]
    assert new == [[0, 1], [1, 2], None, 2, 3]


def test_process_sets_are_halves_of_the_ranks_in_every_generation() -> None:
    sizes = [4, 3, 2, 4]
    meetings = [ThreadRendezvous.group(size) for size in sizes]

    def body(context: Context) -> None:
        made: dict[object, tuple[int, tuple[int, ...]]] = {}
        for size, meeting in zip(sizes, meetings, strict=True):
            if context.rank >= size:
                made = {}  # ends, and is replaced when the job has grown
                continue
            with Context(meeting[context.rank]) as ours, use(ours):
                ours.sets.carry(made)
                halves = [list(range(0, size, 2)), list(range(1, size, 2))]
                halves += [[each] for each in (0, size - 1) if [each] not in halves]
                sets = [add_process_set(ranks) for ranks in halves]
                assert [each.ranks for each in sets] == halves
                numbers = [each.process_set_id for each in sets]
                assert None not in numbers and len(set(numbers)) == len(numbers)
                for each, ranks in zip(sets, halves, strict=True):
                    if each.included():
                        mine = np.array([float(context.rank)])
                        assert allreduce(mine, op=1, process_set=each, name="halves")[0] == sum(ranks)
                made = ours.sets.made

    run_ranks(4, body)


# Frameworks


def test_torch_optimizers_of_one_rank_work_when_it_is_no_longer_alone(in_elastic_job: None) -> None:
    require("torch")
    import torch

    import farandole.torch as hvd

    def body(context: Context) -> list[float]:
        model = torch.nn.Linear(1, 1, bias=False)
        model.weight.data.fill_(1.0 + context.rank)
        with use_alone():
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5), model.named_parameters()
            )
            state = hvd.elastic.TorchState(model, optimizer, step=0)
            if context.rank == 0:
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                state.save()
            model(torch.ones(1, 1)).sum().backward()  # its gradient is in flight when the job ends
        state.restore()
        state.reset()
        assert model.weight.grad is None
        state.sync()
        assert model.weight.item() == 0.0
        model(torch.full((1, 1), 2.0 * context.rank)).sum().backward()
        optimizer.step()
        return [model.weight.item(), optimizer.state[model.weight]["momentum_buffer"].item()]

    # The momentum of rank 0 is 1 after one step; the mean of the gradients 0 and 2 is 1.
    assert run_ranks(2, body) == [[-1.5, 1.5]] * 2


def test_schedulers_in_a_torch_state_still_set_the_rate_of_the_optimizer() -> None:
    require("torch")
    import torch

    import farandole.torch as hvd

    def body(context: Context) -> list[float]:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.1)
        state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler)
        state.sync()
        assert state.scheduler is scheduler  # a copy would set the rate of a copy of the optimizer
        rates = []
        for _ in range(2):
            optimizer.step()
            state.scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        state.restore()
        optimizer.step()
        scheduler.step()
        return [*rates, optimizer.param_groups[0]["lr"]]

    assert run_ranks(2, body) == [pytest.approx([0.1, 0.01, 0.1])] * 2


def test_ranks_with_other_objects_in_their_states_are_refused() -> None:
    require("torch")
    import torch

    from farandole.torch.elastic import TorchState

    def body(context: Context) -> None:
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        state = TorchState(optimizer=optimizer, scheduler=None if context.rank else scheduler)
        with pytest.raises(ValueError, match=r"rank 1 has \['optimizer'\] .* rank 0 \['optimizer', 'scheduler'\]"):
            state.sync()

    run_ranks(2, body)


@pytest.mark.parametrize("hold", [lambda each: [each], lambda each: {"a": (1, each)}], ids=["list", "nested"])
def test_a_warning_names_torch_objects_in_containers(
    hold: Callable[[object], object], caplog: pytest.LogCaptureFixture
) -> None:
    require("torch")
    import torch

    from farandole.torch.elastic import TorchState

    model = torch.nn.Linear(1, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)
    for held in (model, scheduler):
        caplog.clear()
        TorchState(mine=hold(held))
        assert [f"mine= holds a {type(held).__name__} in a" in each for each in caplog.messages] == [True]


def test_gradient_scalers_in_a_torch_state_forget_an_unfinished_step() -> None:
    require("torch")
    import torch

    import farandole.torch as hvd

    def body(context: Context) -> list[float]:
        model = torch.nn.Linear(1, 1, bias=False)
        model.weight.data.fill_(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        state = hvd.elastic.TorchState(model, optimizer, scaler=scaler)
        for is_lost in (True, False):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 1)).sum()).backward()
            if is_lost:
                scaler.unscale_(optimizer)
                state.restore()
        scaler.step(optimizer)
        scaler.update()
        return [model.weight.item(), scaler.get_scale()]

    assert run_ranks(1, body) == [[0.75, 1024.0]]


def test_torch_gradients_of_a_dead_engine_are_dropped(in_elastic_job: None) -> None:
    require("torch")
    import torch

    import farandole.torch as hvd

    def body(context: Context) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        state = hvd.elastic.TorchState(model, optimizer)
        model(torch.ones(1, 1)).sum().backward()
        context.shutdown()
        state.restore()  # the gradients that were held back are not requested any more
        assert model.weight.grad is None

    run_ranks(1, body)


def test_torch_state_without_copies_is_that_of_ranks_whose_optimizer_has_not_stepped() -> None:
    require("torch")
    import torch

    import farandole.torch as hvd

    def body(context: Context) -> None:
        model = torch.nn.BatchNorm1d(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        state = hvd.elastic.TorchState(model, optimizer, copies=False, step=0)
        optimizer.load_state_dict(optimizer.state_dict())  # as in a rank that comes later
        assert not state.is_shared()

        def backward() -> None:
            optimizer.zero_grad()
            model(torch.rand(4, 3)).sum().backward()

        state.sync()
        state.hold()
        backward()
        optimizer.step()
        state.step += 1
        state.commit()
        committed = copy.deepcopy(model.state_dict())
        backward()
        optimizer.synchronize()
        optimizer.param_groups[0]["lr"] = 7.0
        if context.rank == 0:  # this rank was behind when the loss came
            lost = patch.object(optimizer, "_synchronize_once", side_effect=HorovodInternalError("rank 2 is lost"))
            with lost, pytest.raises(HorovodInternalError):
                optimizer.step()
            state.restore()
            assert state.held_commits == 1 and optimizer.param_groups[0]["lr"] == 0.1
            assert all(torch.equal(value, committed[name]) for name, value in model.state_dict().items())
        else:
            with optimizer.skip_synchronize():
                optimizer.step()
            state.restore()
            assert state.held_commits == -1
        assert not state.is_shared()
        state.sync()
        state.hold()
        assert state.is_shared() and state.step == 1 and optimizer.param_groups[0]["lr"] == 0.1
        assert all(torch.equal(value, committed[name]) for name, value in model.named_parameters())

    run_ranks(2, body)


@pytest.mark.parametrize("behind", [0, 1])
def test_torch_ranks_keep_a_state_without_copies_when_rank_0_is_lost_in_a_sync(behind: int) -> None:
    """A newcomer is there, so all ranks take over rank 0's state. Those that hold the same one need no other rank."""
    require("torch")
    import torch

    import farandole.torch as hvd

    def body(context: Context) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        state = hvd.elastic.TorchState(model, optimizer, copies=False, step=0)
        state.sync()
        state.hold()
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            state.commit()
        committed = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        state._commits -= behind * context.rank
        assert state.is_shared() == (not behind)
        with (
            patch.object(state, "_bcast_object", side_effect=HorovodInternalError("rank 0 is lost")),
            pytest.raises(HorovodInternalError),
        ):
            state.sync()
        state.restore()
        assert state.held_commits == (-1 if behind and context.rank else 2)
        held = (model.state_dict(), optimizer.state_dict()["state"])
        assert all(map(torch.equal, tensors_of(held), tensors_of(committed)))

    def tensors_of(tree: Any) -> list[torch.Tensor]:
        if isinstance(tree, torch.Tensor):
            return [tree]
        return [leaf for each in (tree.values() if isinstance(tree, dict) else tree) for leaf in tensors_of(each)]

    run_ranks(2, body)


def test_torch_adasum_and_sets_that_a_rank_leaves_follow_the_job(in_elastic_job: None) -> None:
    require("torch")
    import torch

    import farandole.torch as hvd

    def body(context: Context) -> None:
        model = torch.nn.Linear(1, 1)
        mine = ProcessSet([0])
        add_process_set(mine)
        plain = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), process_set=mine
        )
        adasum = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), op=hvd.Adasum
        )
        assert plain._alone == (context.rank == 1)
        assert adasum._alone is False
        hooks = plain._reducer._hooks
        assert bool(hooks) == (context.rank == 0)
        remove_process_set(mine)
        other = ProcessSet([1])
        add_process_set(other)
        mine._ranks = [1]  # as after a loss, when ranks have other numbers
        context.sets._sets[mine] = context.sets._sets[other]
        for optimizer in (plain, adasum):
            optimizer.rejoin()
        assert plain._alone == (context.rank == 0)
        assert bool(hooks) == (context.rank == 1)
        assert adasum._alone is False

    run_ranks(2, body)


def test_a_new_rank_takes_over_what_torch_modules_have_made_in_training() -> None:
    require("torch")
    import torch

    from farandole.torch.elastic import TorchState

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lazy, self.count = torch.nn.LazyLinear(1), 0

        def get_extra_state(self) -> int:
            return self.count

        def set_extra_state(self, state: int) -> None:
            self.count = state

    def body(context: Context) -> list[object]:
        model = Counting()
        if context.rank == 0:
            model.lazy(torch.ones(1, 3))
            model.count = 4
        state = TorchState(model, epoch=context.rank)
        state.sync()
        return [model.lazy.weight.tolist(), model.count, state.epoch]

    first, second = run_ranks(2, body)
    assert first == second
    assert first[1:] == [4, 0]


def test_a_new_rank_has_memory_for_the_state_of_torch_optimizers(in_elastic_job: None) -> None:
    require("torch")
    import torch

    import farandole.torch as hvd

    makers: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, centered=True),
    ]

    def body(context: Context) -> None:
        for maker in makers:
            model = torch.nn.Linear(3, 2)
            model.bias.requires_grad = False
            optimizer = hvd.DistributedOptimizer(maker(model.parameters()), model.named_parameters())
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
            optimizer.register_step_pre_hook(lambda *_: pytest.fail("no step of the program"))
            before = copy.deepcopy(model.state_dict())
            state = hvd.elastic.TorchState(model, optimizer, step=0)
            state.prepare()
            assert list(optimizer.state) == [model.weight]
            prepared = dict(optimizer.state[model.weight])
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
            assert model.weight.grad is None
            if context.rank == 0:
                optimizer._optimizer_step_pre_hooks.clear()
                real = maker(model.parameters())
                model.weight.grad = torch.ones(2, 3)
                real.step()
                optimizer.load_state_dict(real.state_dict())
                model.weight.grad = None
            state.sync()
            mine = optimizer.state[model.weight]
            if context.rank == 1:
                assert all(mine[name] is value for name, value in prepared.items() if isinstance(value, torch.Tensor))
            total = [value.sum().item() for value in mine.values() if isinstance(value, torch.Tensor)]
            assert total == hvd.broadcast_object(total) and any(total)

        closures = torch.optim.LBFGS(torch.nn.Linear(3, 2).parameters())  # its step needs one
        hvd.elastic.TorchState(optimizer=closures).prepare()
        assert not closures.state

        class Counting(torch.optim.SGD):
            def step(self, closure: object = None) -> None:  # type: ignore[override]
                pytest.fail("a step of the user's class may reduce gradients")

        own = Counting(torch.nn.Linear(3, 2).parameters(), lr=0.1, momentum=0.9)
        hvd.elastic.TorchState(optimizer=own).prepare()
        assert not own.state

    run_ranks(2, body)


def test_tensorflow_variables_are_taken_over_and_restored(frameworks: None) -> None:
    require("tensorflow")
    import tensorflow as tf

    import farandole.tensorflow as hvd

    def body(context: Context) -> None:
        variable = tf.Variable([1.0 + context.rank])
        state = hvd.elastic.TensorFlowState([variable], step=context.rank)
        state.sync()
        assert (variable.numpy().tolist(), state.step) == ([1.0], 0)
        variable.assign([7.0])
        state.restore()
        assert variable.numpy().tolist() == [1.0]
        with pytest.raises(ValueError, match="variables= is needed"):
            hvd.elastic.TensorFlowState()

    run_ranks(2, body)


def test_tensorflow_states_of_graphs(frameworks: None) -> None:
    require("tensorflow")
    import tensorflow as tf

    import farandole.tensorflow as hvd

    def body(context: Context) -> None:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            one = tf.compat.v1.get_variable("one", initializer=1.0 + context.rank, use_resource=True)
            old = tf.compat.v1.get_variable("old", initializer=[1.0 + context.rank], use_resource=False)
            session.run(tf.compat.v1.global_variables_initializer())
            state = hvd.elastic.TensorFlowState(batch=0)
            session.graph.finalize()
            state.sync()
            assert [each.tolist() for each in session.run([one, old])] == [1.0, [1.0]]
            one.load(5.0, session)
            old.load([5.0], session)
            state.restore()
            assert [each.tolist() for each in session.run([one, old])] == [1.0, [1.0]]
        with tf.Graph().as_default(), pytest.raises(ValueError, match="session= is needed"):
            hvd.elastic.TensorFlowState()

    run_ranks(2, body)


def test_tensorflow_states_of_graphs_drop_an_unfinished_step(frameworks: None) -> None:
    require("tensorflow")
    import tensorflow as tf

    import farandole.tensorflow as hvd

    v1 = tf.compat.v1

    def body(context: Context) -> list[float]:
        with tf.Graph().as_default(), v1.Session() as session:
            variable, gradient = v1.get_variable("variable", initializer=1.0), v1.placeholder(tf.float32, [])
            sgd = v1.train.GradientDescentOptimizer(0.25)
            optimizer = hvd.DistributedOptimizer(sgd, backward_passes_per_step=2, average_aggregated_gradients=True)
            step = optimizer.apply_gradients(optimizer.compute_gradients(variable * gradient, [variable]))
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            state = hvd.elastic.TensorFlowState(session=session)
            state.sync()
            found = []
            session.run(step, {gradient: 8.0})
            state.restore()
            for _ in range(2):
                session.run(step, {gradient: 1.0})
                found.append(float(session.run(variable)))
            return found

    assert run_ranks(1, body) == [[1.0, 0.75]]


def test_jax_arrays_need_no_copies(frameworks: None) -> None:
    require("jax")
    import jax.numpy as jnp

    import farandole.jax as hvd

    def body(context: Context) -> None:
        state = hvd.elastic.JaxState(copies=False, tree={"w": jnp.arange(3.0) + context.rank}, steps=[context.rank])
        state.sync()
        committed = state.tree["w"]
        state.save()
        state.tree["w"], state.steps[0] = state.tree["w"] + 1, 7
        state.restore()
        assert state.tree["w"] is committed and committed.tolist() == [0.0, 1.0, 2.0]
        assert state.steps == [0]
        state.tree["w"] = state.tree["w"] + 1
        state.save()
        state.restore()
        assert state.tree["w"].tolist() == [1.0, 2.0, 3.0]

    run_ranks(2, body)


def test_jax_pytrees_are_taken_over_and_restored(frameworks: None) -> None:
    require("jax")
    import jax
    import jax.numpy as jnp

    import farandole.jax as hvd

    add: Callable[[Any], Any] = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)

    def body(context: Context) -> None:
        tree: Any = {"w": jnp.arange(3.0) + context.rank, "half": jnp.ones(2, jnp.bfloat16), "name": "a"}
        if context.rank == 0:
            tree["more"] = (jnp.int32(4), None)  # which a new rank has not made yet
        state = hvd.elastic.JaxState(tree=tree, key=jax.random.key(context.rank), steps=[context.rank])
        state.sync()
        assert jax.tree.structure(state.tree) == jax.tree.structure({**tree, "more": (1, None)})
        assert state.tree["w"].tolist() == [0.0, 1.0, 2.0]
        assert (state.tree["name"], state.tree["more"][0].item(), state.steps) == ("a", 4, [0])
        assert (jax.random.key_data(state.key) == jax.random.key_data(jax.random.key(0))).all()
        for _ in range(2):
            state.tree["w"] = add(state.tree["w"])  # takes the memory of what was restored
            state.steps.append(1)
            state.restore()
            assert (state.tree["w"].tolist(), state.steps) == ([0.0, 1.0, 2.0], [0])

    run_ranks(2, body)


def test_a_rank_that_joins_makes_an_optimizer_with_groups_alone(in_elastic_job: None) -> None:
    require("torch")
    import torch

    import farandole.torch as hvd

    def body(context: Context) -> None:
        if context.rank == 1:  # the other rank has made its own before
            model = torch.nn.Linear(2, 2)
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), groups=1)

    run_ranks(2, body)
