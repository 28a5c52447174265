"""The reducer's own bookkeeping, without ranks."""

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch

from farandole.core.operations.gradients import GradientOptions
from farandole.torch import reducer
from farandole.torch.flight import Flight, InFlight, Origin, reduced
from farandole.torch.reducer import Reducer

STEPS = 30


@pytest.fixture
def restless() -> Iterator[None]:
    """Let the interpreter change threads as often as it can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("restless")
def test_threads_that_accumulate_at_the_same_time_lose_no_gradient() -> None:
    """Autograd has one thread per device, so a model on two devices accumulates gradients in two threads."""
    parameters = [torch.zeros(4, requires_grad=True) for _ in range(300)]
    names = {parameter: f"weight {place}" for place, parameter in enumerate(parameters)}
    reducing = Reducer(names, [[parameter] for parameter in parameters], 1, GradientOptions(), attach=False)
    requested: Counter[str] = Counter()

    def start_each(_request: object, names: list[str], _tensors: object, _wake: bool) -> mock.Mock:
        requested.update(names)
        return mock.Mock()

    def accumulate(places: Sequence[int]) -> None:
        for place in places:
            reducing.accumulated(place)

    with (
        mock.patch.object(reducer.requests, "start_each", start_each),
        mock.patch.object(reducer, "HELD_BYTES", 64),
    ):
        for step in range(1, STEPS + 1):
            for parameter in parameters:
                parameter.grad = torch.ones(4)
            threads = [threading.Thread(target=accumulate, args=(range(device, 300, 2),)) for device in (0, 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            reducing.finish()
            assert requested == dict.fromkeys(names.values(), step)


def test_threads_that_read_gradients_of_a_bucket_copy_its_result_once() -> None:
    """The second copy would undo what the first thread has changed since, as its clipping."""
    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.ones(1)
    both, copies = threading.Barrier(2), []

    def complete() -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.1)  # for the other thread, which must not come
        copies.append(threading.get_ident())

    flight = Flight([parameter], complete)
    threads = [threading.Thread(target=flight.wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(copies) == 1


def test_a_thread_that_reads_a_sparse_gradient_never_sees_one_that_is_not_reduced() -> None:
    total = torch.full((3,), 2.0).to_sparse()
    read: list[torch.Tensor] = []

    class Watched(torch.nn.Parameter):
        """A parameter whose old gradient is read when it has just been replaced, as another thread may."""

        def __setattr__(self, name: str, value: object) -> None:
            held = self.grad
            super().__setattr__(name, value)
            if value is total:
                assert isinstance(held, InFlight)
                read.append(reduced(held))

    parameter = Watched(torch.zeros(3))
    parameter.grad = torch.ones(3).to_sparse()
    InFlight.cover(parameter, Origin(weakref.ref(parameter), lambda: None))
    Flight([parameter], lambda: reducer._complete_sparse(parameter, lambda: total)).wait()
    assert [each is total for each in read] == [True] and parameter.grad is total
