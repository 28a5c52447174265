"""The GPU that Lightning's strategy chooses for a rank."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("lightning")
pytest.importorskip("torchmetrics")

import torch

from farandole.lightning.ranks import gpu_of_rank


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
