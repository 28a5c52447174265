"""Devices in Lightning's strategy: the GPU that it chooses for a rank, and where gathered tensors lie."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("lightning")
pytest.importorskip("torchmetrics")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from farandole.lightning import ranks
from farandole.lightning.ranks import gather, gpu_of_rank


@pytest.mark.parametrize(
    ("given", "local_rank", "count", "chosen"),
    [
        ([0], 0, 4, 0),
        ([0], 3, 4, 3),  # devices=1
        ([0], 3, 1, 0),  # CUDA_VISIBLE_DEVICES shows each rank its own
        ([2], 1, 4, 2),  # devices=[2]
        ([0, 1], 1, 4, 1),  # devices=2
        ([3, 1], 0, 4, 3),  # devices=[3, 1]
        ([0, 1], 3, 2, 1),  # more ranks than GPUs
    ],
)
def test_the_gpu_of_a_rank(given: list[int], local_rank: int, count: int, chosen: int) -> None:
    devices = [torch.device("cuda", number) for number in given]
    assert gpu_of_rank(devices, local_rank, count) == torch.device("cuda", chosen)


def test_gathered_tensors_are_on_the_device_of_the_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Tensor] = []

    def allgather_object(mine: torch.Tensor) -> list[torch.Tensor]:
        sent.append(mine)
        return [mine, mine]

    monkeypatch.setattr(ranks.hvd, "allgather_object", allgather_object)
    with FakeTensorMode():
        given = torch.empty(2, 3, device="cuda:1", requires_grad=True)
        assert [each.device for each in gather(given)] == [given.device] * 2
    assert [each.device.type for each in sent] == ["cpu"]
    assert not sent[0].requires_grad
