"""GPUs of an estimator's ranks: who computes where, and what is said where a GPU is missing."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyspark")
pytest.importorskip("torch")

import torch

from farandole.core.context import Context
from farandole.data import ShardBatch
from farandole.errors import ConfigError
from farandole.estimators.torch import TorchEstimator
from farandole.estimators.trainers import gpus
from farandole.estimators.trainers.torch import devices as torch_devices
from farandole.estimators.trainers.torch.judge import Judge
from farandole.estimators.trainers.torch.losses import Losses
from farandole.estimators.trainers.torch.tensors import Inputs
from helpers.outcomes import RanksFailed
from helpers.ranks import run_ranks


@pytest.fixture(scope="module", autouse=True)
def warmed_up() -> None:
    """Let frameworks set their variables of the environment."""
    torch.nn.functional.mse_loss(torch.ones(1, device="meta"), torch.ones(1, device="meta"))
    if find_spec("keras"):
        import farandole.estimators.trainers.keras.devices  # noqa: F401


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(gpus, "log_to_driver", lines.append)
    return lines


def chosen(wanted: bool | None, *, seen: tuple[int, ...], listed: Path = Path("/nowhere")) -> list[int | None]:
    """Return what the ranks choose, of which each sees so many GPUs."""

    def body(context: Context) -> int | None:
        count = seen[context.rank]
        return gpus.choose_gpu(wanted, lambda: (count, f"PyTorch sees {count} GPUs"), listed=listed)

    return run_ranks(len(seen), body)


def test_each_rank_has_the_gpu_at_its_local_rank(told: list[str]) -> None:
    assert chosen(None, seen=(2, 2)) == chosen(True, seen=(2, 2)) == [0, 1]
    assert chosen(False, seen=(2, 2)) == chosen(None, seen=(0, 0)) == [None, None]
    assert told == []


def test_gpus_that_are_wanted_and_missing_end_all_ranks() -> None:
    for seen in ((1, 1), (2, 0)):
        with pytest.raises(RanksFailed) as failed:
            chosen(True, seen=seen)
        error = failed.value.__cause__
        assert isinstance(error, ConfigError)
        assert str(error).startswith("use_gpu: is True, but rank 1, local rank 1 on ")
        assert f" has no GPU of its own: PyTorch sees {seen[1]} GPUs; start fewer ranks on a host, " in str(error)


def test_gpus_that_not_all_ranks_have_are_left_and_said(told: list[str], tmp_path: Path) -> None:
    assert chosen(None, seen=(1, 1)) == [None, None]
    assert len(told) == 1
    assert told[0].startswith("warning: 1 GPUs are on the host of rank 0, but the ranks compute on the CPU, because ")
    for number in range(2):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    assert chosen(None, seen=(0,), listed=tmp_path) == [None]
    assert told[1].startswith("warning: 2 GPUs are on the host of rank 0")
    assert chosen(False, seen=(0,), listed=tmp_path) == [None]
    assert len(told) == 2


def test_ranks_see_gpus_unless_these_are_refused() -> None:
    estimator = TorchEstimator(model=torch.nn.Linear(1, 1))
    for _ in range(2):
        assert ("CUDA_VISIBLE_DEVICES" in estimator._environment(), estimator._wanted_gpu()) == (False, None)
        estimator.setUseGpu(estimator.getUseGpu())
    assert estimator.setUseGpu(True)._wanted_gpu() is True
    assert estimator.setUseGpu(False)._environment()["CUDA_VISIBLE_DEVICES"] == ""


def test_pytorch_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpus.seen_by_torch() == (0, "PyTorch is built without CUDA")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert gpus.seen_by_torch() == (1, "PyTorch sees 1 GPU")


def test_batches_and_losses_are_on_the_ranks_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On "meta", which takes tensors without memory, in place of a GPU."""
    set_devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", set_devices.append)
    assert torch_devices.device_of(None) == torch_devices.CPU
    assert torch_devices.device_of(1) == torch.device("cuda", 1)
    assert set_devices == [1]
    model, loss = torch.nn.Linear(2, 1), torch.nn.CrossEntropyLoss(weight=torch.ones(2))
    meta = torch.device("meta")
    torch_devices.to_device((model, loss, torch.nn.functional.mse_loss), meta)
    assert {each.device for each in (*model.parameters(), loss.weight) if each is not None} == {meta}
    inputs = Inputs(columns=("x",), shapes=None, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters())
    losses = Losses(optimizer=optimizer, losses=(torch.nn.functional.mse_loss,), weights=(1.0,), metrics=())
    plan = SimpleNamespace(label_cols=("y",), label_shapes=None, weight_col="w")
    job: Any = SimpleNamespace(inputs=inputs, model=model, plan=plan, losses=losses)
    judge = Judge(job, meta)
    rows = {"x": np.ones((3, 2), np.float32), "y": np.ones(3, np.float32), "w": np.ones(3, np.float32)}
    batch = ShardBatch(rows, 3, 1.0)
    outputs = judge.predict(model, batch)
    pairs = judge.pairs(batch, outputs)
    weights = judge.weights(batch)
    assert weights is not None
    assert {each.device for each in (*judge.labels(batch), *pairs[0], weights, judge.loss(pairs, weights))} == {meta}


def test_a_state_is_for_machines_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[torch.Tensor] = []
    plain = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: moved.append(tensor) or plain(tensor))
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: {"m": torch.ones(1), "step": 3}}, "groups": [1]}}
    assert torch_devices.on_cpu(state) == state
    assert len(moved) == 2


class FakeTensorFlow:
    """The functions of `tf.config` that choose devices."""

    def __init__(self, count: int, *, late: bool = False) -> None:
        self.shown: list[str] | None = None
        self.growing: list[str] = []
        devices = [f"GPU:{number}" for number in range(count)]

        def show(own: list[str], kind: str) -> None:
            if late:
                raise RuntimeError("Visible devices cannot be modified after being initialized")
            self.shown = own

        grow = SimpleNamespace(set_memory_growth=lambda device, on: self.growing.append(device))
        self.config = SimpleNamespace(
            list_physical_devices=lambda kind: devices, set_visible_devices=show, experimental=grow
        )


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets Keras' backend, for `keras_devices` only."""
    pytest.importorskip("keras")
    from farandole.estimators.trainers.keras import devices as keras_devices

    def use(name: str, **modules: Any) -> Any:
        fake = SimpleNamespace(config=SimpleNamespace(backend=lambda: name), device=lambda where: where)
        monkeypatch.setattr(keras_devices, "keras", fake)
        for module, stand_in in modules.items():
            monkeypatch.setitem(sys.modules, module, stand_in)
        return keras_devices

    return use


def test_keras_on_tensorflow_sees_its_own_gpu_only(backend: Any) -> None:
    fake = FakeTensorFlow(2)
    devices = backend("tensorflow", tensorflow=fake)
    assert devices.visible_gpus() == (2, "TensorFlow sees 2 GPUs")
    devices.own_device(1)
    assert (fake.shown, fake.growing) == (["GPU:1"], ["GPU:1"])
    devices.own_device(None)
    assert fake.shown == []
    backend("tensorflow", tensorflow=FakeTensorFlow(1, late=True))
    with pytest.raises(ConfigError, match="use_gpu: comes too late, as TensorFlow has started its devices: Visible"):
        devices.own_device(0)


def test_keras_on_jax_and_torch(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, str] = {}
    fake = SimpleNamespace(config=SimpleNamespace(update=settings.__setitem__))
    devices = backend("jax", jax=fake)
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    assert devices.visible_gpus() == (0, "JAX has no plugin for CUDA")
    devices.own_device(None)
    assert settings == {}
    monkeypatch.setattr(devices, "find_spec", lambda name: name)
    monkeypatch.setattr(devices, "_seen_by_driver", lambda: 2)
    assert devices.visible_gpus() == (2, "NVIDIA's driver sees 2 GPUs")
    devices.own_device(1)
    assert settings.pop("jax_cuda_visible_devices") == "1"
    devices.own_device(None)
    assert settings == {"jax_platforms": "cpu"}
    devices = backend("torch")
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    devices.own_device(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.own_device(None) == "cpu:0"
    assert chosen == [1]
