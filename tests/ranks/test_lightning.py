"""Collectives of Lightning's strategy."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("lightning")
pytest.importorskip("torchmetrics")

import torch

from farandole.core.context import Context
from farandole.lightning import FarandoleStrategy
from helpers.ranks import run_ranks


def test_tensors_need_not_be_contiguous() -> None:
    def body(context: Context) -> None:
        strategy, turned = FarandoleStrategy(), torch.arange(6.0).reshape(2, 3).t()
        for sync_grads in (False, True):
            assert torch.equal(strategy.all_gather(turned, sync_grads=sync_grads), torch.stack([turned] * 2))
        for tensor in (turned, turned.long()):
            assert torch.equal(strategy.reduce(tensor, reduce_op="mean"), tensor.to(strategy.reduce(tensor).dtype))

    run_ranks(2, body)
