"""CUDA tensors in the torch binding, as far as a build of PyTorch for the CPU has them: fake ones, without memory."""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402  # after the module that it needs is known to be there

from farandole.integrations import torch_backend  # noqa: E402
from farandole.torch.adapter import TorchAdapter  # noqa: E402
from farandole.torch.distributed import backend  # noqa: E402
from farandole.torch.distributed.tensors import readable  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def fake_tensors() -> None:
    """Make the first one: torch then sets a variable of the environment."""
    with FakeTensorMode():
        torch.empty(1, device="cuda")


class Result:
    """A result of the engine for a tensor on a GPU."""

    shape = (4, 3)

    def __init__(self) -> None:
        self.copied_to: list[torch.Tensor] = []

    def copy_to(self, tensor: object) -> None:
        assert isinstance(tensor, torch.Tensor)
        self.copied_to.append(tensor)


def test_tensors_on_the_cpu_and_on_cuda_are_taken() -> None:
    adapter = TorchAdapter()
    with FakeTensorMode():
        assert adapter.refusal(torch.empty(3)) is None
        assert adapter.refusal(torch.empty(3, device="cuda")) is None
        refused = adapter.refusal(torch.empty(3, device="meta"))
    assert refused == "the tensor is on meta; tensors on the CPU and on CUDA can be sent, move it with .cpu()"


def test_a_result_is_copied_to_the_device_of_the_input() -> None:
    result = Result()
    with FakeTensorMode():
        like = torch.empty(2, 3, device="cuda", dtype=torch.bfloat16)
        made = TorchAdapter().adopt(result, like)
    assert result.copied_to == [made]
    assert (tuple(made.shape), made.device, made.dtype) == ((4, 3), like.device, torch.bfloat16)


def test_a_process_group_takes_cuda_tensors() -> None:
    with FakeTensorMode():
        tensor = torch.empty(3, device="cuda")
        assert readable(tensor, "all_reduce") is tensor


@pytest.mark.parametrize("register", [backend.register, torch_backend.register], ids=["import", "autoload"])
def test_the_process_group_is_for_both_kinds_of_device(register: Callable[[], None]) -> None:
    register()
    assert torch.distributed.Backend.backend_capability["farandole"] == ["cpu", "cuda"]
