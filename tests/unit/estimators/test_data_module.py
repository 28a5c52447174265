"""Data modules of the Torch and Keras estimators, on one rank in this process."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("torch")
if importlib.util.find_spec("farandole._native") is None:
    pytest.skip("the native core is not built", allow_module_level=True)

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farandole.errors import ConfigError
from farandole.estimators.data_module import DataModule, PetastormDataModule
from farandole.estimators.torch import TorchEstimator
from farandole.estimators.trainers import run as running
from farandole.estimators.trainers.checkpoint import Checkpoint
from farandole.estimators.trainers.rows import RowsWanted
from farandole.estimators.trainers.run import RunPlan
from farandole.estimators.trainers.torch.judge import TorchJob
from farandole.estimators.trainers.torch.losses import Losses
from farandole.estimators.trainers.torch.tensors import Inputs
from farandole.estimators.trainers.torch.training import TorchTrainer, weights_of
from helpers.estimator_rows import plain_step, points, settled_torch, shard_of

settled = pytest.fixture(scope="module", autouse=True)(settled_torch)


class Doubling(DataModule):
    """Doubles the features of the rank's rows."""

    def train_data(self) -> Iterator[dict[str, Tensor]]:
        return map(doubled, self.train_loader)

    def val_data(self) -> Iterator[dict[str, Tensor]] | None:
        return None if self.val_loader is None else map(doubled, self.val_loader)


def doubled(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch | {"x": 2 * batch["x"]}


class Twice(nn.Module):
    """The net, of features that are doubled by itself if `own`."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net, self.factor = nn.Linear(2, 1), 2.0 if own else 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.factor * x)  # type: ignore[no-any-return]


def trained(folder: Path, module: Any, *, own: bool = False, **changes: Any) -> Checkpoint:
    columns = points(11)
    wanted = RowsWanted(
        columns=("x", "y"), validation=0.3, validation_col=None, batch_size=2, val_batch_size=2, shuffle=True
    )
    plan = RunPlan(
        run_id="here", store=None, rows=wanted, label_cols=("y",), epochs=3,
        train_steps=changes.pop("train_steps", None), validation_steps=None, start=Checkpoint(seed=1), verbose=0,
        data_module=module,
    )  # fmt: skip
    model = Twice(own=own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = Losses(optimizer=optimizer, losses=(F.mse_loss,), weights=(1.0,), metrics=())
    job = TorchJob(
        plan=plan, model=model, losses=losses, inputs=Inputs(columns=("x",), shapes=None, dtype=torch.float32),
    )  # fmt: skip
    job = replace(job, **changes)
    content = running.train(plan, lambda run: TorchTrainer(job, run), shard_of(folder, columns))
    assert content is not None
    return Checkpoint.load(content)


@pytest.mark.parametrize("changes", [{}, {"train_steps": 3}, {"train_minibatch": plain_step}])
def test_a_data_module_changes_the_rows(tmp_path: Path, changes: dict[str, Any]) -> None:
    want, got = trained(tmp_path, None, own=True, **changes), trained(tmp_path, Doubling, **changes)
    assert want.state is not None and got.state is not None
    for name, value in weights_of(want.state).items():
        assert torch.equal(weights_of(got.state)[name], value)
    scores = [[(record["loss"], record["val_loss"]) for record in each.history] for each in (want, got)]
    assert scores[0] == scores[1]


def test_a_data_module_brings_rows_of_its_own(tmp_path: Path) -> None:
    asked: list[str] = []

    class Own(DataModule):
        def __enter__(self) -> "Own":
            asked.append("entered")
            return self

        def __exit__(self, *_: Any) -> None:
            asked.append("left")

        def train_data(self) -> Any:
            asked.append("train")
            return [{"x": torch.ones(5, 2), "y": torch.zeros(5)}] * 6

        def val_data(self) -> Any:
            asked.append("held")
            return [{"x": torch.ones(3, 2), "y": torch.zeros(3)}] * 50

    got = trained(tmp_path, Own, train_steps=4)
    assert len(got.history) == 3 and got.history[2]["loss"] < got.history[0]["loss"]
    # Twelve steps take six batches twice; each validation begins anew.
    assert asked == ["entered", "train", "held", "train", "held", "held", "left"]


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        ([], "gives no batch: .*train_data"),
        ([(1, 2)], "must give batches as dictionaries of tensors by column, got tuple"),
        ([{"x": torch.ones(2, 2), "z": torch.ones(2)}], "gives batches without y; they have x, z"),
        (
            [{"x": torch.ones(2, 2), "y": torch.ones(3)}],
            "gives a batch whose columns have these numbers of rows: {'x': 2, 'y': 3}",
        ),
    ],
)
def test_batches_that_cannot_be_used_are_refused(tmp_path: Path, batches: Any, text: str) -> None:
    class Broken(DataModule):
        def train_data(self) -> Any:
            return batches

    with pytest.raises(ConfigError, match=f"data_module: {text}"):
        trained(tmp_path, Broken)


def test_the_models_shapes_are_checked_with_the_modules_batch(tmp_path: Path) -> None:
    class Wide(DataModule):
        def train_data(self) -> Any:
            return [{"x": torch.ones(2, 3), "y": torch.ones(2)}]

    with pytest.raises(ConfigError, match="model: fails on the first row"):
        trained(tmp_path, Wide)


def test_the_folder_of_parquet_files_is_there_or_refused() -> None:
    module = PetastormDataModule(train_loader=[1], train_dir="file:///rows")
    assert (module.train_dir, [*module.train_data()]) == ("file:///rows", [1])
    with pytest.raises(ConfigError, match=r"has no val_dir: no Parquet is written; take .* self\.val_loader"):
        _ = module.val_dir


def test_an_estimator_takes_data_modules_only() -> None:
    assert TorchEstimator(data_module=PetastormDataModule)._batch_maker() is None
    assert TorchEstimator().setDataModule(Doubling)._batch_maker() is Doubling
    with pytest.raises(ConfigError, match=r"data_module: must be a subclass of farandole.spark.data_module.DataModule"):
        TorchEstimator(data_module=dict)
