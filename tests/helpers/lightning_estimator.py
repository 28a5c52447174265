"""Checks of the trainer of `LightningEstimator` on two ranks, with rows from files and without Spark."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as lightning
import numpy as np
import pyarrow as pa
import pytorch_lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError

import farandole.torch as hvd
from farandole.errors import ConfigError
from farandole.estimators.store import Store
from farandole.estimators.trainers.checkpoint import Checkpoint
from farandole.estimators.trainers.lightning.data import Tensors
from farandole.estimators.trainers.lightning.files import loaded, weights_of
from farandole.estimators.trainers.lightning.training import LightningJob, LightningTrainer
from farandole.estimators.trainers.rows import RowsWanted
from farandole.estimators.trainers.run import Run, RunPlan
from farandole.estimators.trainers.torch.losses import Losses
from farandole.estimators.trainers.torch.tensors import Inputs
from helpers.estimator_rows import mine, points, shard_of

RATE = 2.0**-5


class Net(lightning.LightningModule):
    """Module with dropout, two running statistics, a metric, Adam and a scheduler."""

    seen: Tensor
    told: Tensor

    def __init__(self, rate: float = RATE, *, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("told", torch.zeros(()))
        self.error, self.rate = MeanSquaredError(), rate

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        output = self(batch["x"]).squeeze(1)
        return output, nn.functional.mse_loss(output, batch["y"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.seen += len(batch["y"])
        self.told = self.told + len(batch["y"])  # replaces the buffer's tensor
        output, loss = self.loss(batch)
        self.error.update(output.detach(), batch["y"])
        self.log("train_error", self.error, on_step=False, on_epoch=True)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return {"loss": loss}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch)[1], sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Plateau(Net):
    """Module that lowers the rate when the validation loss does not fall."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.rate)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Recorder(lightning.Callback):
    """Callback that records the metrics at the end of each epoch."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def job_of(model: Any, columns: dict[str, Any], **changes: Any) -> LightningJob:
    wanted = RowsWanted(
        columns=tuple(columns), validation=None, validation_col=None, batch_size=4, val_batch_size=4, shuffle=False
    )
    rows = {name: changes.pop(name) for name in ("validation_col", "batch_size") if name in changes}
    plan: dict[str, Any] = {
        "run_id": "here", "store": None, "rows": replace(wanted, **rows), "label_cols": ("y",), "epochs": 2,
        "train_steps": None, "validation_steps": None, "start": Checkpoint(seed=1), "verbose": 0,
    }  # fmt: skip
    plan |= {"weight_col": "w" if "w" in columns else None, "passes": 1, "compression": None, "data_module": None}
    plan |= {name: changes.pop(name) for name in list(changes) if name in plan}
    tensors = Tensors(
        inputs=Inputs(columns=("x",), shapes=None, dtype=torch.float32),
        label_cols=plan["label_cols"], label_shapes=None, weight_col=plan["weight_col"],
    )  # fmt: skip
    settings: dict[str, Any] = {
        "plan": RunPlan(**plan), "package": "lightning.pytorch", "model": model, "losses": None, "tensors": tensors,
        "callbacks": (), "logger": None, "profiler": None, "log_every_n_steps": 50, "trainer_args": {},
        "queues": (None, None), "debug_data_loader": False, "terminate_on_nan": False,
    }  # fmt: skip
    return LightningJob(**(settings | changes))


def trained(job: LightningJob, path: Path) -> tuple[Run, LightningTrainer]:
    """Train as `trainers.run.train` does, on the running ranks."""
    with ExitStack() as stack:
        run = Run(job.plan, path)
        trainer = LightningTrainer(job, run, stack)
        if run.checkpoint.state is not None:
            trainer.restore(run.checkpoint.state)
        run.trainer = trainer
        trainer.train(run)
        run.seal()
        run.close()
        return run, trainer


def weights_in(trainer: LightningTrainer) -> dict[str, Tensor]:
    return weights_of(trainer.state(whole=False))


def check_two_ranks_train_as_one_trainer_does(rank: int, size: int, folder: Path) -> None:
    columns, seen = points(24), Recorder()
    held = [1 if place % 4 == 3 else 0 for place in range(24 // size)]
    job = job_of(
        Net(RATE / size), columns, epochs=3, validation_col="held", callbacks=(seen,), passes=2,
        trainer_args={"gradient_clip_val": 0.5},
    )  # fmt: skip
    run, trainer = trained(job, shard_of(folder, mine(columns, rank, size), held))

    # One process makes the same steps, each with the rows of all ranks.
    x, y = torch.tensor(columns["x"]), torch.tensor(columns["y"])
    shares = [[row for place, row in enumerate(range(each, 24, size)) if place % 4 != 3] for each in range(size)]
    kept = [[row for place, row in enumerate(range(each, 24, size)) if place % 4 == 3] for each in range(size)]
    steps = [[row for share in shares for row in share[first : first + 4]] for first in range(0, len(shares[0]), 4)]
    alone, model = Recorder(), Net(RATE)
    single = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, callbacks=[alone], gradient_clip_val=0.5, accumulate_grad_batches=2,
        num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    batches, others = (
        [{"x": x[rows], "y": y[rows]} for rows in each] for each in (steps, [[row for share in kept for row in share]])
    )
    single.fit(model, DataLoader(batches, batch_size=None), DataLoader(others, batch_size=None))  # type: ignore[arg-type]
    for name, value in weights_in(trainer).items():
        if name not in ("seen", "told"):
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-6)
    for mine_, theirs in zip(seen.values, alone.values, strict=True):
        for name in ("train_loss", "train_error", "val_loss"):
            np.testing.assert_allclose(mine_[name], theirs[name], rtol=1e-4)
    assert seen.rates == [each / size for each in alone.rates], "hooks see the rates of the program"
    assert run.checkpoint.outputs == [("float32", [1])]
    for record, logged in zip(run.checkpoint.history, seen.values, strict=True):
        np.testing.assert_allclose(record["loss"], record["train_loss"], rtol=1e-6)
        assert record["val_loss"] == logged["val_loss"]


def check_a_rank_without_rows_takes_part(rank: int, size: int, folder: Path) -> None:
    columns = {"x": [[1.0, 0.0], [0.0, 1.0]], "y": [1.0, 2.0]}
    nothing = {"x": pa.array([], pa.list_(pa.float64())), "y": pa.array([], pa.float64())}
    before = Net().state_dict()
    for empty in range(size):
        (folder / str(empty)).mkdir(exist_ok=True)
        path = shard_of(folder / str(empty), nothing if rank == empty else columns)
        run, trainer = trained(job_of(Net(), columns, epochs=1, batch_size=2), path)
        weights = weights_in(trainer)
        # All ranks have rank 0's statistics.
        assert weights["seen"] == weights["told"] == (2 if empty else 0), "the row that stands in leaves no trace"
    (record,) = run.checkpoint.history
    model = Net()
    error = (model(torch.tensor(columns["x"])).squeeze(1) - torch.tensor(columns["y"])).square().mean().item()
    for name in ("loss", "train_loss", "train_error"):
        np.testing.assert_allclose(record[name], error, rtol=1e-5)
    assert not torch.equal(weights["net.3.weight"], before["net.3.weight"])
    assert all(hvd.allgather_object(torch.equal(each, hvd.broadcast(each, 0))) for each in weights.values())


def check_resumed_runs_equal_uninterrupted_ones(rank: int, size: int, folder: Path) -> None:
    columns, store = points(32), Store.create(str(folder / "store"))
    path = shard_of(folder, mine(columns, rank, size), [1 if place % 4 == 0 else 0 for place in range(32 // size)])

    def fit(run_id: str, epochs: int) -> tuple[Run, LightningTrainer, list[Any]]:
        callbacks: list[Any] = [
            lightning.callbacks.EarlyStopping("val_loss", patience=9),
            lightning.callbacks.ModelCheckpoint(monitor="val_loss", mode="max", filename="worst"),
        ]
        job = job_of(
            Plateau(dropout=0.5), columns, epochs=epochs, run_id=run_id, store=store, start=Checkpoint(seed=9),
            validation_col="held", callbacks=tuple(callbacks),
        )  # fmt: skip
        return *trained(job, path), callbacks

    _, straight, (stopper, worst) = fit("straight", 4)
    for epochs in (1, 3, 4):
        run, resumed, (again, _) = fit("resumed", epochs)
    one, other = (cast(Any, loaded(each._whole)["lightning"] if rank == 0 else {}) for each in (straight, resumed))
    for name, value in one.get("state_dict", {}).items():
        assert torch.equal(value, other["state_dict"][name]), name
    assert one.get("lr_schedulers") == other.get("lr_schedulers")
    if rank == 0:
        (scheduler,) = one["lr_schedulers"]
        assert scheduler["_last_lr"][0] < RATE, "the scheduler has lowered the rate"
        for state, same in zip(*(each["optimizer_states"][0]["state"].values() for each in (one, other)), strict=True):
            assert all(torch.equal(state[name], same[name]) for name in state)
    assert (stopper.wait_count, stopper.best_score) == (again.wait_count, again.best_score)
    assert [record["epoch"] for record in run.checkpoint.history] == [1, 2, 3, 4]
    # The fitted model has the weights of the ModelCheckpoint, also if an earlier attempt wrote it.
    if rank == 0:
        chosen = torch.load(worst.best_model_path, weights_only=False)["state_dict"]
        for trainer in (straight, resumed):
            assert all(torch.equal(value, chosen[name]) for name, value in weights_in(trainer).items())
        assert Path(worst.best_model_path).parent == folder / "store" / "runs" / "straight"


def check_one_rank_stops_all(rank: int, size: int, folder: Path) -> None:
    class Stopper(lightning.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            stop = trainer.current_epoch == 1 and hvd.rank() == hvd.size() - 1
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(stop, all=False)

    columns, store = points(12), Store.create(str(folder / "store"))
    job = job_of(Net(), columns, epochs=5, store=store, callbacks=(Stopper(),), queues=(2, 0.5))
    path = shard_of(folder, mine(columns, rank, size))
    run, trainer = trained(job, path)
    assert [record["epoch"] for record in run.checkpoint.history] == [1, 2]
    assert run.checkpoint.stopped
    # If a rank dies after that, the next attempt has nothing to do.
    again, same = trained(job, path)
    assert [record["epoch"] for record in again.checkpoint.history] == [1, 2]
    assert all(torch.equal(value, weights_in(same)[name]) for name, value in weights_in(trainer).items())


def check_a_store_that_is_no_folder(rank: int, size: int, folder: Path) -> None:
    columns, store = points(12), Store.create("memory://lightning")
    path = shard_of(folder, mine(columns, rank, size), [1 if place % 3 == 0 else 0 for place in range(12 // size)])
    folders = []
    for epochs in (1, 3):
        writer = lightning.callbacks.ModelCheckpoint(monitor="val_loss", mode="max", filename="worst-{epoch}")
        job = job_of(Net(), columns, epochs=epochs, store=store, validation_col="held", callbacks=(writer,))
        run, trainer = trained(job, path)
        folders.append(str(trainer.folder))
    assert folders[0] != folders[1]
    worst = max(range(3), key=lambda each: run.checkpoint.history[each]["val_loss"])
    assert worst == 0, "the weights of the first fit are the chosen ones"
    if rank == 0:
        assert store.read(f"{store.get_run_path('here')}/worst-epoch=0.ckpt") is not None
        assert not Path(folders[1]).exists()
        saved = loaded(trainer.state(whole=True))
        (state,) = (each for name, each in saved["lightning"]["callbacks"].items() if name.startswith("ModelCheckp"))
        assert state["dirpath"] == folders[1]
        assert state["best_model_score"].item() == run.checkpoint.history[0]["val_loss"]
        last = saved["lightning"]["state_dict"]
        assert not all(torch.equal(value, last[name]) for name, value in weights_in(trainer).items())


class TwoOptimizers(lightning.LightningModule):
    """Module with manual optimization: two layers with an optimizer each, trained in turn."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.rate = nn.Linear(2, 4), nn.Linear(4, 1), rate
        self.automatic_optimization = False

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            with optimizer.toggle_model():
                loss = nn.functional.mse_loss(self(batch["x"]).squeeze(1), batch["y"])
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=self.rate) for each in (self.first, self.second)]


def check_manual_optimization(rank: int, size: int, folder: Path) -> None:
    columns = points(11)  # one rank has a row more
    job = job_of(TwoOptimizers(RATE / size), columns, batch_size=100, epochs=2)
    run, trainer = trained(job, shard_of(folder, mine(columns, rank, size)))
    model = TwoOptimizers(RATE)
    x, y = torch.tensor(columns["x"]), torch.tensor(columns["y"])
    optimizers = model.configure_optimizers()
    for optimizer in optimizers * 2:
        model.zero_grad()
        nn.functional.mse_loss(model(x).squeeze(1), y).backward()
        optimizer.step()
    for name, value in weights_in(trainer).items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-6)
    assert "loss" not in run.checkpoint.history[0]


def check_plain_modules_of_either_package(rank: int, size: int, folder: Path) -> None:
    columns = points(12) | {"w": [1.0 + place % 2 for place in range(12)]}
    path = shard_of(folder, mine(columns, rank, size))
    got = []
    for package in (lightning, pytorch_lightning):
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, 0.5)
        nn.init.constant_(model.bias, 0.25)
        losses = Losses(
            optimizer=torch.optim.SGD(model.parameters(), lr=RATE / size),
            losses=(), constructors=(lambda train_rows: nn.MSELoss(),), weights=(1.0,),
            metrics=(nn.functional.l1_loss,),
        )  # fmt: skip
        job = job_of(
            model, columns, package=package.__name__, losses=losses, batch_size=100,
            compression=hvd.Compression.none, profiler="simple",
        )  # fmt: skip
        run, trainer = trained(job, path)
        assert {"loss", "l1_loss"} <= set(run.checkpoint.history[0])
        got.append(weights_in(trainer))
    x, y, w = (np.array(columns[name]) for name in ("x", "y", "w"))
    weight, bias = np.array([0.5, 0.5]), 0.25
    for _ in range(2):
        error = (x @ weight + bias - y) * w
        weight, bias = weight - RATE * 2 * x.T @ error / len(y), bias - RATE * 2 * error.mean()
    for weights in got:
        np.testing.assert_allclose(weights["weight"][0], weight, rtol=1e-5)
        np.testing.assert_allclose(weights["bias"], [bias], rtol=1e-5)


class Doubling(lightning.LightningDataModule):
    """Data module that doubles the features of the rank's rows."""

    def __init__(self, train_loader: Any, val_loader: Any, **settings: Any) -> None:
        super().__init__()
        self.train_loader, self.settings = train_loader, settings

    def train_dataloader(self) -> Any:
        return self.train_loader

    def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> Any:
        assert self.settings["shard_count"] == hvd.size()
        return batch | {"x": 2 * batch["x"]}


def check_a_data_module_gets_the_rows(rank: int, size: int, folder: Path) -> None:
    columns = points(8)
    doubled = columns | {"x": [[2 * number for number in row] for row in columns["x"]]}
    results = []
    for place, (given, module) in enumerate([(columns, Doubling), (doubled, None)]):
        (folder / str(place)).mkdir(exist_ok=True)
        job = job_of(Net(), given, data_module=module, epochs=1, debug_data_loader=not place)
        results.append(weights_in(trained(job, shard_of(folder / str(place), mine(given, rank, size)))[1]))
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def check_errors(rank: int, size: int, folder: Path) -> None:
    columns = points(8)
    own = mine(columns, rank, size)
    (folder / "extreme").mkdir(exist_ok=True)
    extreme = shard_of(folder / "extreme", own | {"y": [float("nan")] * len(own["y"])})
    wide = {"x": [[1.0, 2.0, 3.0]] * 4, "y": [1.0] * 4}

    good = shard_of(folder, own)
    (folder / "wide").mkdir(exist_ok=True)
    broken = [
        (job_of(Net(), columns, terminate_on_nan=True), extreme, "terminate_on_nan: the loss of rank"),
        (job_of(Net(), wide), shard_of(folder / "wide", wide), "model: fails on the first row: RuntimeError"),
        (job_of(Net(), columns, data_module=dict), good, "data_module: must make a lightning.pytorch.Lightning"),
    ]
    for job, path, text in broken:
        try:
            trained(job, path)
        except ConfigError as error:
            assert text in str(error), str(error)
        else:
            raise AssertionError(f"not refused: {text}")
