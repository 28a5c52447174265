"""The GPU at the local rank, where the program chooses none; over fakes of PyTorch's functions."""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from farandole.torch import own_gpu  # noqa: E402  # after the module that it needs is known to be there


class FakeCuda:
    """PyTorch's start of CUDA, as `torch.cuda` does it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
        self.current, self.started, self.later = 0, False, list[Callable[[], None]]()
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.started)
        monkeypatch.setattr(torch.cuda, "_lazy_call", self.later.append)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)

    def start(self) -> None:
        if not self.started:
            self.started = True
            for each in self.later:
                each()

    def set_device(self, number: int) -> None:
        self.start()
        self.current = number


@pytest.mark.parametrize(
    ("place", "gpus", "current"),
    [(0, 4, 0), (1, 4, 1), (3, 4, 3), (1, 1, 0), (5, 4, 0), (None, 4, 0)],
)
def test_the_first_use_takes_the_gpu_at_the_local_rank(
    monkeypatch: pytest.MonkeyPatch, place: int | None, gpus: int, current: int
) -> None:
    cuda = FakeCuda(monkeypatch, gpus)
    monkeypatch.setattr(own_gpu, "process_local_rank", lambda: place)
    own_gpu.prefer_own_gpu()
    assert not cuda.started  # a program without GPUs starts no CUDA
    cuda.start()
    assert cuda.current == current


def test_the_choice_of_the_program_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_gpu, "process_local_rank", lambda: 1)
    before = FakeCuda(monkeypatch, 4)
    before.set_device(2)
    own_gpu.prefer_own_gpu()
    assert (before.current, before.later) == (2, [])
    after = FakeCuda(monkeypatch, 4)
    own_gpu.prefer_own_gpu()
    after.set_device(3)
    assert after.current == 3


def test_nothing_is_left_to_do_in_a_build_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    own_gpu.prefer_own_gpu()
    assert cuda.later == []
