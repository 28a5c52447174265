"""Collectives of Lightning's strategy."""

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("lightning")
pytest.importorskip("pytorch_lightning")
pytest.importorskip("torchmetrics")

import lightning
import pytorch_lightning
import torch
import torchmetrics

from farandole.core.context import Context
from farandole.errors import ConfigError
from farandole.lightning import FarandoleStrategy, strategy_class
from helpers.ranks import run_ranks

# Lightning's hints on this machine and on so small a training.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:The `srun` command",
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:Using `DistributedSampler` with the dataloaders",
    "ignore:`isinstance",
)


@pytest.fixture(autouse=True)
def without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where mpi4py is installed, Lightning starts MPI, whose sockets stay open."""
    for package in ("lightning.fabric", "lightning_fabric"):
        monkeypatch.setattr(f"{package}.plugins.environments.mpi._MPI4PY_AVAILABLE", False)


def test_tensors_need_not_be_contiguous() -> None:
    def body(context: Context) -> None:
        strategy, turned = FarandoleStrategy(), torch.arange(6.0).reshape(2, 3).t()
        for sync_grads in (False, True):
            assert torch.equal(strategy.all_gather(turned, sync_grads=sync_grads), torch.stack([turned] * 2))
        for tensor in (turned, turned.long()):
            assert torch.equal(strategy.reduce(tensor, reduce_op="mean"), tensor.to(strategy.reduce(tensor).dtype))

    run_ranks(2, body)


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Line(lightning.LightningModule):
    def __init__(self, rows: int = 1) -> None:
        super().__init__()
        self.net, self.rows = torch.nn.Linear(1, 1, bias=False), rows
        torch.nn.init.zeros_(self.net.weight)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(self.rows, 1), batch_size=2)

    val_dataloader = train_dataloader

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("rows", float(self.rows), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_launcher_starts_the_ranks() -> None:
    def body(context: Context) -> None:
        wrong = 3 if context.size == 2 else 2
        for strategy in (FarandoleStrategy(), "farandole", "horovod"):
            with pytest.raises(ConfigError, match=f"devices: asks for {wrong} ranks .*farandole run -np {wrong} "):
                lightning.Trainer(devices=wrong, strategy=strategy, **QUIET)
        with pytest.raises(ConfigError, match=r"num_nodes: asks for 2 hosts, and the job has 1.* -H host1"):
            lightning.Trainer(num_nodes=2, strategy="farandole", **QUIET)
        for devices in (1, context.size):
            trainer = lightning.Trainer(devices=devices, strategy="farandole", **QUIET)
            assert isinstance(trainer.strategy, FarandoleStrategy) and trainer.world_size == context.size

    run_ranks(1, body)
    run_ranks(2, body)


@pytest.mark.parametrize(("name", "rate"), [("farandole", 0.1), ("horovod", 0.2)])
def test_a_strategy_by_its_name(name: str, rate: float) -> None:
    """As in Lightning 1, "horovod" multiplies the learning rates by the number of ranks."""

    def body(context: Context) -> float:
        module = Line()
        lightning.Trainer(strategy=name, max_steps=1, limit_val_batches=0, **QUIET).fit(module)
        return module.net.weight.item()

    assert run_ranks(2, body) == pytest.approx([-rate] * 2)


def test_the_other_package_has_the_names_too() -> None:
    def body(context: Context) -> None:
        strategy = pytorch_lightning.Trainer(strategy="horovod", **QUIET).strategy
        assert isinstance(strategy, strategy_class(pytorch_lightning))

    run_ranks(1, body)


def test_an_epoch_is_the_mean_over_the_rows_of_all_ranks() -> None:
    def body(context: Context) -> float:
        trainer = lightning.Trainer(strategy="farandole", use_distributed_sampler=False, **QUIET)
        trainer.validate(Line(rows=1 + 4 * context.rank), verbose=False)
        return float(trainer.callback_metrics["rows"])

    assert run_ranks(2, body) == pytest.approx([(1 * 1 + 5 * 5) / 6] * 2)


def test_a_layer_made_by_a_hook_is_trained_over_all_ranks() -> None:
    """It starts as rank 0's, although each rank makes another one."""

    class Growing(Line):
        def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.net = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.constant_(self.net.weight, 1.0 + self.global_rank)
            self.optimizers().param_groups[0]["params"] = list(self.net.parameters())

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch).mean() * (1 + 2 * self.global_rank)

    def body(context: Context) -> float:
        module = Growing()
        lightning.Trainer(strategy="farandole", max_steps=1, limit_val_batches=0, **QUIET).fit(module)
        return module.net.weight.item()

    assert run_ranks(2, body) == pytest.approx([1 - 0.1 * (1 + 3) / 2] * 2)


def test_metrics_that_are_no_layers_have_the_values_of_all_ranks() -> None:
    class Counting(lightning.pytorch.Callback):
        def __init__(self) -> None:
            self.metric = torchmetrics.SumMetric()

    class Measured(Line):
        def on_validation_start(self) -> None:
            self.late = torchmetrics.SumMetric()
            self.held = {"a": torchmetrics.SumMetric()}

        def metrics(self) -> list[torchmetrics.Metric]:
            return [self.late, self.held["a"], self.trainer.callbacks[0].metric]

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            for metric in self.metrics():
                metric.update(1.0 + self.global_rank)

        def on_validation_epoch_end(self) -> None:
            self.found = [metric.compute().item() for metric in self.metrics()]

    def body(context: Context) -> list[float]:
        module = Measured()
        lightning.Trainer(strategy="farandole", callbacks=[Counting()], **QUIET).validate(module, verbose=False)
        return module.found

    assert run_ranks(2, body) == [[3.0] * 3] * 2
