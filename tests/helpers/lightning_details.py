"""More checks of the trainer of `LightningEstimator`: hooks, late layers, and foreign objects in files."""

from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from torch import nn

import farandole.torch as hvd
from farandole.errors import ConfigError
from farandole.estimators.store import Store
from helpers.estimator_rows import mine, points, shard_of
from helpers.lightning_estimator import Net, job_of, trained, weights_in


def check_a_backward_pass_after_the_training_is_a_ranks_own(rank: int, size: int, folder: Path) -> None:
    columns = points(8)
    _, trainer = trained(job_of(Net(), columns, epochs=1), shard_of(folder, mine(columns, rank, size)))
    if rank == 0:
        trainer.module.zero_grad()
        trainer.module(torch.ones(1, 2)).sum().backward()
        assert all(
            each.grad is not None and each.grad.isfinite().all() for each in trainer.module.parameters()
        )  # and no wait for other ranks


class Late(Net):
    """Module that makes its layers in `configure_model`."""

    net: Any

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 1))


def check_layers_may_be_made_by_configure_model(rank: int, size: int, folder: Path) -> None:
    columns, store = points(12), Store.create(str(folder / "store"))
    path = shard_of(folder, mine(columns, rank, size))
    _, straight = trained(job_of(Net(), columns), path)
    for _ in range(2):  # the second run has no epoch left
        run, late = trained(job_of(Late(), columns, store=store), path)
        assert run.checkpoint.outputs == [("float32", [1])]
        assert all(torch.equal(value, weights_in(late)[name]) for name, value in weights_in(straight).items())


class Misnamed(Net):
    """Module whose training logs a name that begins with "val", and whose validation logs one that does not."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.log("value", batch["y"].mean(), on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("held_out", batch["y"].mean())


def check_means_count_the_rows_that_were_logged(rank: int, size: int, folder: Path) -> None:
    columns = {"x": [[float(place), 1.0] for place in range(4)], "y": [10.0 * rank + place for place in range(4)]}
    held = [0, 0, 0, 1] if rank == 0 else [0, 1, 1, 1]
    apart = {"value": (0 + 1 + 2 + 10) / 4, "held_out": (3 + 11 + 12 + 13) / 4}
    together = {"value": (0 + 1 + 2 + 3 + 10 + 11 + 12 + 13) / 8}
    for validates, column, wanted in ((held, "held", apart), (None, None, together)):
        path = shard_of(folder, columns, validates)
        run, _ = trained(job_of(Misnamed(), columns, epochs=2, validation_col=column), path)
        for record in run.checkpoint.history:
            got = {name: record[name] for name in ("value", "held_out") if name in record}
            assert got == wanted and record["value_epoch"] == wanted["value"]


class Planted:
    """Object that makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def check_a_file_of_an_earlier_attempt_runs_no_code(rank: int, size: int, folder: Path) -> None:
    columns, store = points(12), Store.create(str(folder / "store"))
    path = shard_of(folder, mine(columns, rank, size), [1 if place % 3 == 0 else 0 for place in range(12 // size)])
    for epochs in (1, 3):
        writer = lightning.callbacks.ModelCheckpoint(monitor="val_loss", mode="max", filename="worst")
        job = job_of(Net(), columns, epochs=epochs, store=store, validation_col="held", callbacks=(writer,))
        _, trainer = trained(job, path)
        if rank == 0 and epochs == 1:
            chosen = weights_in(trainer)
            torch.save({"state_dict": Planted(folder / "ran")}, writer.best_model_path)
        hvd.barrier()
    assert not (folder / "ran").exists()
    if rank == 0:
        assert all(torch.equal(value, chosen[name]) for name, value in weights_in(trainer).items())


class Keeper(lightning.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"folder": Path("/")}


def keep_objects(folder: Path) -> str:
    """Train on one rank with a callback that keeps an object; return the error's text; only rank 0 raises it."""
    columns = points(8)
    try:
        trained(job_of(Net(), columns, callbacks=(Keeper(),)), shard_of(folder, columns))
    except ConfigError as error:
        return str(error)
    return "not refused"
