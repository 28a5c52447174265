"""GPUs of a host that ranks do not compute on."""

from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("torch")

import torch

from farandole.core import builds
from farandole.spark.torch import TorchEstimator
from farandole.spark.trainers import gpus


def test_gpus_are_counted_without_a_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus.unused_gpus(tmp_path / "nowhere") == 0
    for number in range(2):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    assert gpus.unused_gpus(tmp_path) == 2
    monkeypatch.setattr(gpus, "cuda_built", lambda: True)
    assert gpus.unused_gpus(tmp_path) == 0


def test_ranks_see_no_gpu_whose_tensors_are_not_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = TorchEstimator(model=torch.nn.Linear(1, 1))
    assert not builds.cuda_built()
    assert estimator._environment() == {"CUDA_VISIBLE_DEVICES": ""}
    monkeypatch.setattr("farandole.spark.estimator.cuda_built", lambda: True)
    assert estimator._environment() == {}
    assert estimator.setUseGpu(False)._environment() == {"CUDA_VISIBLE_DEVICES": ""}
