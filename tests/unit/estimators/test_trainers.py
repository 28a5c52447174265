"""Trainers of estimators on one rank in this process, with rows from a file: no Spark."""

import importlib.util
import io
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("torch")
if importlib.util.find_spec("farandole._native") is None:
    pytest.skip("the native core is not built", allow_module_level=True)

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farandole.data import ShardBatch
from farandole.errors import ConfigError, DataError, SourceError
from farandole.estimators.store import Store
from farandole.estimators.trainers import run as running
from farandole.estimators.trainers.checkpoint import Checkpoint
from farandole.estimators.trainers.rows import RowsWanted
from farandole.estimators.trainers.run import RunPlan
from farandole.estimators.trainers.torch import probe as torch_probe
from farandole.estimators.trainers.torch.judge import Judge, TorchJob
from farandole.estimators.trainers.torch.losses import Losses, score_names
from farandole.estimators.trainers.torch.minibatch import MinibatchStep
from farandole.estimators.trainers.torch.tensors import Inputs
from farandole.estimators.trainers.torch.training import TorchTrainer
from helpers.estimator_rows import plain_step, settled_torch, shard_of

settled = pytest.fixture(scope="module", autouse=True)(settled_torch)


def plan_of(columns: dict[str, Any], **changes: Any) -> RunPlan:
    wanted = RowsWanted(
        columns=tuple(columns), validation=None, validation_col=None, batch_size=2, val_batch_size=2, shuffle=False
    )
    settings: dict[str, Any] = {
        "run_id": "here", "store": None, "rows": wanted, "label_cols": ("y",), "epochs": 1, "train_steps": None,
        "validation_steps": None, "start": Checkpoint(seed=1), "verbose": 0,
    }  # fmt: skip
    return RunPlan(**(settings | changes))


def job_of(model: nn.Module, columns: dict[str, Any], plan: RunPlan, **changes: Any) -> TorchJob:
    features = tuple(name for name in columns if name not in ("y", "w"))
    losses: dict[str, Any] = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "losses": (F.mse_loss,), "constructors": (),
        "weights": (1.0,), "metrics": (),
    }  # fmt: skip
    losses |= {name: changes.pop(name) for name in losses if name in changes}
    plan = replace(plan, **{name: changes.pop(name) for name in ("weight_col", "passes") if name in changes})
    return TorchJob(
        plan=plan, model=model, losses=Losses(**losses),
        inputs=Inputs(columns=features, shapes=None, dtype=torch.float32), **changes,
    )  # fmt: skip


def trained(folder: Path, columns: dict[str, Any], job: TorchJob) -> Checkpoint:
    content = running.train(job.plan, lambda run: TorchTrainer(job, run), shard_of(folder, columns))
    assert content is not None
    return Checkpoint.load(content)


def weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    assert checkpoint.state is not None
    found: dict[str, Tensor] = torch.load(io.BytesIO(checkpoint.state), weights_only=True)["model"]
    return found


def zero_line() -> nn.Module:
    model = nn.Linear(2, 1)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


LINE = {"x": [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 1.0]], "y": [1.0, 2.0, 3.0, 4.0]}


@pytest.mark.parametrize("loss", [F.mse_loss, nn.MSELoss()])
def test_rows_count_by_their_weight(tmp_path: Path, loss: Any) -> None:
    columns = {**LINE, "w": [2.0, 0.0, 1.0, 0.0]}
    plan = plan_of(columns)
    plan = replace(plan, rows=replace(plan.rows, batch_size=4))
    got = trained(tmp_path, columns, job_of(zero_line(), columns, plan, losses=(loss,), weight_col="w"))
    # The gradient of sum(w * (0 - y)^2) / rows at weights of 0.
    x, y, w = (np.array(columns[name]) for name in ("x", "y", "w"))
    want = 0.1 * (2 * (w * y)[:, None] * x).sum(0) / 4
    np.testing.assert_allclose(weights(got)["weight"][0], want, rtol=1e-6)
    assert got.history[0]["loss"] == pytest.approx(float((w * y**2).sum() / 4))


def test_two_passes_are_one_step_of_twice_the_batch(tmp_path: Path) -> None:
    whole, halves = plan_of(LINE), plan_of(LINE)
    whole = replace(whole, rows=replace(whole.rows, batch_size=4))
    one = trained(tmp_path, LINE, job_of(zero_line(), LINE, whole))
    two = trained(tmp_path, LINE, job_of(zero_line(), LINE, halves, passes=2))
    left_over = trained(tmp_path, LINE, job_of(zero_line(), LINE, halves, passes=3))
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(two)[name], value)
        torch.testing.assert_close(weights(left_over)[name], value)


def test_epochs_of_given_steps_go_through_all_rows(tmp_path: Path) -> None:
    seen: list[float] = []

    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :1] * self.weight

    def noting(output: Tensor, label: Tensor) -> Tensor:
        if not torch.is_inference_mode_enabled():
            seen.extend(label.flatten().tolist())
        return F.mse_loss(output, label)

    columns = {"x": [[float(n), 0.0] for n in range(6)], "y": [float(n) for n in range(6)]}
    plan = plan_of(columns, epochs=3, train_steps=2)
    got = trained(tmp_path, columns, job_of(Noting(), columns, plan, losses=(noting,)))
    assert seen == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5], "three natural steps: the second epoch goes on where it was"
    assert [record["steps"] for record in got.history] == [2, 2, 2]


def test_epochs_of_another_length_go_on_where_the_run_has_ended(tmp_path: Path) -> None:
    seen: list[float] = []

    def noting(output: Tensor, label: Tensor) -> Tensor:
        if not torch.is_inference_mode_enabled():
            seen.extend(label.flatten().tolist())
        return F.mse_loss(output, label)

    store = Store.create(str(tmp_path / "store"))
    columns = {"x": [[float(n), 0.0] for n in range(6)], "y": [float(n) for n in range(6)]}
    for epochs, steps in ((1, 2), (3, 1), (4, 2)):  # of three for a pass over all rows
        plan = plan_of(columns, store=store, epochs=epochs, train_steps=steps)
        trained(tmp_path, columns, job_of(zero_line(), columns, plan, losses=(noting,)))
    assert seen == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))
    columns = {"x": [[float(n % 7), float(n % 3)] for n in range(20)], "y": [n / 20 for n in range(20)]}

    def fit(run_id: str, epochs: int) -> Checkpoint:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        plan = plan_of(columns, run_id=run_id, store=store, epochs=epochs)
        plan = replace(plan, rows=replace(plan.rows, validation=0.2, shuffle=True))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return trained(tmp_path, columns, job_of(model, columns, plan, optimizer=optimizer))

    straight = fit("straight", 3)
    for epochs in (1, 2, 3):
        resumed = fit("resumed", epochs)
    for name, value in weights(straight).items():
        assert torch.equal(weights(resumed)[name], value)
    losses = [[(record["loss"], record["val_loss"]) for record in each.history] for each in (straight, resumed)]
    assert losses[0] == losses[1]
    saved = store.read(store.get_checkpoint_path("resumed"))
    assert saved is not None
    state = Checkpoint.load(saved).state
    assert state is not None
    (group,) = torch.load(io.BytesIO(state), weights_only=True)["optimizer"]["param_groups"]
    assert group["lr"] == 0.01
    assert store.read(store.get_best_path("resumed")) is not None
    assert list(Path(store.get_logs_path("resumed")).iterdir())


def test_a_resumed_run_keeps_a_changed_learning_rate(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))

    def slower(model: Any, optimizer: Any, transform: Any, loss_fn: Any, inputs: Any, labels: Any, rows: Any) -> Any:
        optimizer.zero_grad()
        outputs, labels = transform(model(*inputs), labels)
        loss = loss_fn(outputs, labels, rows)
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        return outputs, loss

    def fit(run_id: str, epochs: int) -> Checkpoint:
        plan = plan_of(LINE, run_id=run_id, store=store, epochs=epochs)
        return trained(tmp_path, LINE, job_of(zero_line(), LINE, plan, train_minibatch=slower))

    straight = fit("straight", 3)
    for epochs in (1, 3):
        resumed = fit("resumed", epochs)
    for name, value in weights(straight).items():
        assert torch.equal(weights(resumed)[name], value)


def test_the_best_epoch_is_stored_before_the_checkpoint_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(str(tmp_path / "store"))

    def crash(*args: object) -> None:
        raise OSError("the rank is lost here")

    plan = plan_of(LINE, store=store)
    job = job_of(zero_line(), LINE, replace(plan, rows=replace(plan.rows, validation_col="held")))
    path = shard_of(tmp_path, LINE, validates=[0, 0, 1, 1])
    monkeypatch.setattr(running, "write_checkpoint", crash)
    with pytest.raises(OSError, match="lost here"):
        running.train(job.plan, lambda run: TorchTrainer(job, run), path)
    content = store.read(store.get_best_path("here"))
    assert content is not None and Checkpoint.load(content).epoch == 1


def test_integers_that_the_model_cannot_hold_are_refused() -> None:
    inputs = Inputs(columns=("x",), shapes=None, dtype=torch.float16)
    assert inputs.tensor(0, np.array([2048, -5], np.int16)).tolist() == [2048.0, -5.0]
    for values in (np.array([2049], np.int16), np.array([2049], np.int32)):
        with pytest.raises(DataError, match="column 'x': holds integers that float16 cannot hold"):
            inputs.tensor(0, values)


def test_an_epoch_seeds_all_random_generators(tmp_path: Path) -> None:
    def drawn(seed: int) -> list[float]:
        numbers: list[float] = []

        def drawing(output: Tensor, label: Tensor) -> Tensor:
            if not torch.is_inference_mode_enabled():
                numbers.extend((random.random(), np.random.random(), float(torch.rand(()))))
            return F.mse_loss(output, label)

        plan = plan_of(LINE, epochs=2, start=Checkpoint(seed=seed))
        trained(tmp_path, LINE, job_of(zero_line(), LINE, plan, losses=(drawing,)))
        return numbers

    first = drawn(1)
    assert drawn(1) == first and set(drawn(2)).isdisjoint(first)


def test_an_epoch_without_a_number_is_never_the_best(tmp_path: Path) -> None:
    losses = iter([1.0, math.nan, 2.0, math.nan, 3.0])  # of the trial with one row, and of each validation

    def loss(output: Tensor, label: Tensor) -> Tensor:
        whole = F.mse_loss(output, label)
        return whole if output.requires_grad else whole * 0 + next(losses)

    plan = plan_of(LINE, epochs=4, start=Checkpoint(seed=1, best={"val_loss": math.nan}))  # as in old checkpoints
    job = job_of(zero_line(), LINE, replace(plan, rows=replace(plan.rows, validation_col="held")), losses=(loss,))
    path = shard_of(tmp_path, LINE, validates=[0, 0, 1, 1])
    content = running.train(job.plan, lambda run: TorchTrainer(job, run), path)
    assert content is not None
    got = Checkpoint.load(content)
    assert [record["epoch"] for record in got.history] == [1, 2, 3, 4]
    assert got.best is not None and (got.best["epoch"], got.best["val_loss"]) == (2, 2.0)


def test_metrics_have_distinct_names() -> None:
    first, second = (lambda output, label: output.mean()), (lambda output, label: label.mean())
    assert score_names([first, second, F.l1_loss], ["y"]) == ["lambda", "lambda_2", "l1_loss"]


class Huber(nn.Module):
    """A loss of the user's own, without `reduction`."""

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        return F.huber_loss(output, label)


PAIRS = {"x": [[1.0, 1.0]] * 4}


def scalar(value: float) -> dict[str, Any]:
    return {"x": [value] * 4, "y": [1.0, 2.0, 3.0, 4.0]}


@pytest.mark.parametrize(
    ("columns", "model", "loss", "text"),
    [
        (scalar(1.0), nn.Linear(1, 1), F.mse_loss, r"model: fails on the first row: RuntimeError: .*x float64 as "
         r"float32 \[rows\]; give input_shapes, or put the columns together .*VectorAssembler"),
        ({"a": [1.0] * 4, "b": [1.0] * 4, "y": [1.0] * 4}, nn.Linear(1, 1), F.mse_loss,
         "model: fails on the first row: TypeError"),
        ({**PAIRS, "y": [[1.0, 2.0, 3.0]] * 4}, nn.Linear(2, 1), F.mse_loss,
         r"label_cols: label 'y' has the shape \[3\], the model's output \[1\], without the rows"),
        ({**PAIRS, "y": [12, 3, 4, 5]}, nn.Linear(2, 1), F.cross_entropy,
         "loss: compares classes, but the model gives one"),
        ({**PAIRS, "y": [12, 3, 4, 5]}, nn.Linear(2, 3), nn.CrossEntropyLoss(),
         "loss: fails on the first row: IndexError"),
        ({**PAIRS, "y": [1.0] * 4}, nn.Linear(2, 1), lambda output, label: 3.0,
         "loss: has to return a tensor, got float"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_before_training(
    tmp_path: Path, columns: dict[str, Any], model: nn.Module, loss: Any, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        trained(tmp_path, columns, job_of(model, columns, plan_of(columns), losses=(loss,)))


def test_a_label_shape_has_the_numbers_of_its_column(tmp_path: Path) -> None:
    columns = {**PAIRS, "y": [1.0] * 4}
    with pytest.raises(ConfigError, match=r"label_shapes: has \[3\] for the rows of a label whose shape is \[\]"):
        trained(tmp_path, columns, job_of(nn.Linear(2, 1), columns, plan_of(columns, label_shapes=((-1, 3),))))


@pytest.mark.parametrize(
    ("loss", "weighted", "text"),
    [
        (lambda output, label: (output - label) ** 2, False, r"gives the shape \[4, 1\], and has to give one number"),
        (nn.MSELoss(reduction="none"), False, r"gives the shape \[4, 1\], and has to give one number"),
        (lambda output, label: ((output - label) ** 2).mean(), True, "does not take reduction='none'; with sample_"),
        (Huber(), True, "does not take reduction='none'; with sample_weight_col a loss has to give the loss of each"),
        (
            lambda output, label, reduction="mean": ((output - label) ** 2).mean(),
            True,
            r"gives the shape \[\] for 4 rows",
        ),
    ],
)
def test_a_loss_gives_one_number_or_one_per_row(tmp_path: Path, loss: Any, weighted: bool, text: str) -> None:
    columns = {**LINE, "w": [1.0] * 4} if weighted else LINE
    plan = plan_of(columns)
    plan = replace(plan, rows=replace(plan.rows, batch_size=4))
    job = job_of(zero_line(), columns, plan, losses=(loss,), weight_col="w" if weighted else None)
    with pytest.raises(ConfigError, match=f"^loss: {text}"):
        trained(tmp_path, columns, job)


def test_a_metric_gives_one_number(tmp_path: Path) -> None:
    job = job_of(zero_line(), LINE, plan_of(LINE), metrics=(lambda output, label: (output - label).abs(),))
    with pytest.raises(ConfigError, match=r"^metrics: gives the shape \[\d, 1\], and has to give one number for all"):
        trained(tmp_path, LINE, job)


def test_a_loss_that_compares_all_rows_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(torch_probe, "log_to_driver", told.append)

    def square(output: Tensor, label: Tensor) -> Tensor:
        return ((output.squeeze(1) - label) ** 2).mean()  # (rows,) - (rows, 1)

    trained(tmp_path, LINE, job_of(zero_line(), LINE, plan_of(LINE), losses=(square,)))
    (warning,) = told
    assert "the loss of 'y' compares every row with every other one" in warning
    trained(tmp_path, LINE, job_of(zero_line(), LINE, plan_of(LINE)))
    assert told == [warning], "torch's own loss over equal shapes"


def test_columns_may_have_any_widths(tmp_path: Path) -> None:
    widths = (5, 7, 11, 13, 17, 19, 23)

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, *columns: Tensor) -> Tensor:
            return self.weight * torch.stack([each.sum(1) for each in columns]).sum(0)

    columns = {**{f"x{width}": [[1.0] * width] * 2 for width in widths}, "y": [1.0, 2.0]}
    assert trained(tmp_path, columns, job_of(Sums(), columns, plan_of(columns))).epoch == 1


def test_numbers_that_are_none_are_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(running, "log_to_driver", told.append)
    columns = {"x": [[1.0, 0.0], [float("nan"), 1.0], [1.0, 1.0], [2.0, 1.0]], "y": [1.0, 2.0, 3.0, 4.0]}
    got = trained(tmp_path, columns, job_of(zero_line(), columns, plan_of(columns)))
    assert np.isnan(got.history[0]["loss"])
    assert told[0] == "warning: column 'x': 1 of 4 rows hold NaN; fill them or drop these rows first"
    assert told[1].startswith("the loss of rank 0 is nan in step 1; ")
    assert len(told) == 2


@pytest.mark.parametrize("fraction, warned", [(1e-9, True), (None, False), (0.5, False)])
def test_a_validation_without_rows_is_said(
    fraction: float | None, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(running, "log_to_driver", told.append)
    plan = plan_of(LINE)
    plan = replace(plan, rows=replace(plan.rows, validation=fraction))
    trained(tmp_path, LINE, job_of(zero_line(), LINE, plan))
    wanted = ["warning: none of 4 rows validates by validation=1e-09, so that there is no val_loss"]
    assert told == (wanted if warned else [])


def test_a_checkpoint_is_no_pickle() -> None:
    content = Checkpoint(seed=3, epoch=2, state=b"weights", history=[{"loss": 0.5}]).dump()
    got = Checkpoint.load(content)
    assert (got.seed, got.epoch, got.state, got.history) == (3, 2, b"weights", [{"loss": 0.5}])
    with pytest.raises(SourceError, match="or not a checkpoint of farandole's estimators"):
        Checkpoint.load(b"\x80\x05N.")


def test_outputs_are_those_of_the_last_batch(tmp_path: Path) -> None:
    judge = Judge(job_of(zero_line(), LINE, plan_of(LINE)))
    assert judge.outputs is None
    assert trained(tmp_path, LINE, judge.job).outputs == [("float32", [1])]


def test_a_step_of_the_users_own(tmp_path: Path) -> None:
    columns = {**LINE, "w": [2.0, 0.0, 1.0, 3.0]}
    plan = plan_of(columns, epochs=2)
    plan = replace(plan, rows=replace(plan.rows, batch_size=3))  # the second batch has one row
    settings: dict[str, Any] = {"weight_col": "w", "metrics": (F.l1_loss,)}
    want = trained(tmp_path, columns, job_of(zero_line(), columns, plan, **settings))
    got = trained(tmp_path, columns, job_of(zero_line(), columns, plan, **settings, train_minibatch=plain_step))
    for name, value in weights(want).items():
        assert torch.equal(weights(got)[name], value)
    for name in ("loss", "l1_loss"):
        assert [each[name] for each in got.history] == pytest.approx([each[name] for each in want.history])
    assert got.outputs == [("float32", [1])]

    def clipped(model: Any, optimizer: Any, transform_outputs: Any, loss_fn: Any, *given: Any) -> Any:
        assert [each.dtype for each in (*given[0], *given[1])] == [torch.float32] * 2
        outputs, labels = transform_outputs(model(*given[0]), given[1])
        assert labels[0].shape == outputs[0].shape
        loss = ((outputs[0] - labels[0]) ** 2).mean()
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-9)
        with optimizer.skip_synchronize():
            optimizer.step()
        return outputs, loss

    still = trained(tmp_path, columns, job_of(zero_line(), columns, plan, train_minibatch=clipped))
    assert all(value.abs().max() < 1e-8 for value in weights(still).values())
    with pytest.raises(ConfigError, match=r"train_minibatch_fn: must return \(outputs, loss\), got NoneType"):
        trained(tmp_path, columns, job_of(zero_line(), columns, plan, train_minibatch=lambda *given: None))


def a_step(batch: ShardBatch, sample: ShardBatch | None, loss: Any, returned: Any) -> tuple[nn.Module, Any]:
    """Take one step by a user's function, which returns the loss as `returned` makes it; return the model, too."""
    model = zero_line()
    job = job_of(model, LINE, plan_of(LINE), losses=(loss,))
    columns = {"x": np.empty((0, 2)), "y": np.empty(0)}
    run: Any = SimpleNamespace(
        sample=lambda: sample, rows=SimpleNamespace(train=SimpleNamespace(take=lambda rows: columns))
    )
    run.stand_in = lambda: running.Run.stand_in(run)

    def step(*given: Any) -> Any:
        outputs, loss = plain_step(*given)
        return outputs, returned(loss)

    return model, MinibatchStep(step, Judge(job), run)(model, job.losses.optimizer, batch)


def test_a_rank_without_rows_changes_no_gradient_by_its_stand_in() -> None:
    def relative(output: Tensor, label: Tensor) -> Tensor:
        return ((output - label) / label).abs().mean()  # NaN for the stand-in, which is zeros

    batch = ShardBatch({"x": np.empty((0, 2)), "y": np.empty(0)}, 0, 0.0)
    model, made = a_step(batch, None, relative, lambda loss: loss)
    assert made is None
    assert [each.grad is not None and not each.grad.any() for each in model.parameters()] == [True, True]


@pytest.mark.parametrize("returned", [lambda loss: loss, lambda loss: loss.detach(), lambda loss: loss.item()])
def test_the_weight_of_a_batch_is_not_in_the_loss_that_is_reported(returned: Any) -> None:
    batch = ShardBatch({name: np.array(values) for name, values in LINE.items()}, 4, 0.5)
    _, (loss, _) = a_step(batch, batch, F.mse_loss, returned)
    assert loss == pytest.approx(np.mean(np.square(LINE["y"])))


def test_losses_are_made_on_the_rank(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Held:
        def __reduce__(self) -> Any:
            raise TypeError("cannot be pickled")

        def __call__(self, output: Tensor, label: Tensor) -> Tensor:
            return F.mse_loss(output, label)

    def by_name(model: nn.Module, train_rows: int) -> Held:
        seen.append((type(model), train_rows))
        return Held()

    def by_all(**offered: Any) -> Held:
        seen.append(sorted(offered))
        return Held()

    job = job_of(zero_line(), LINE, plan_of(LINE))
    want = weights(trained(tmp_path, LINE, job))
    for constructor in (by_name, by_all, nn.MSELoss, lambda: F.mse_loss):
        job = job_of(zero_line(), LINE, plan_of(LINE), losses=(), constructors=(constructor,))
        got = weights(trained(tmp_path, LINE, job))
        assert all(torch.equal(got[name], value) for name, value in want.items())
    assert seen == [(nn.Linear, 4), ["hvd", "model", "torch", "train_rows", "val_rows"]]
    job = job_of(zero_line(), LINE, plan_of(LINE), losses=(), constructors=(lambda: 3,))
    with pytest.raises(ConfigError, match="loss_constructors: return a function of"):
        trained(tmp_path, LINE, job)


def test_callbacks_see_epochs_and_stop_them(tmp_path: Path) -> None:
    told: list[Any] = []

    class Stopping:
        stop_training = False

        def set_model(self, model: nn.Module) -> None:
            told.append(type(model))

        def on_train_batch_end(self, batch: int, logs: dict[str, float]) -> None:
            told.append((batch, sorted(logs)))

        def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
            self.stop_training = epoch == 1

    plan = plan_of(LINE, epochs=5, store=Store.create(str(tmp_path / "store")))
    callbacks = (Stopping(), lambda epoch, values: told.append((epoch, values["loss"])))
    got = trained(tmp_path, LINE, job_of(zero_line(), LINE, plan, callbacks=callbacks))
    assert [record["epoch"] for record in got.history] == [1, 2]
    assert got.stopped
    steps = [(0, ["loss"]), (1, ["loss"])]
    ends = [(epoch, record["loss"]) for epoch, record in enumerate(got.history)]
    assert told == [nn.Linear, *steps, ends[0], *steps, ends[1]]
    # A second attempt of the same fit, as if a rank had died after the stop.
    again = trained(tmp_path, LINE, job_of(zero_line(), LINE, plan, callbacks=callbacks))
    assert (len(told), again.history) == (8, got.history)
    assert all(torch.equal(one, weights(again)[name]) for name, one in weights(got).items())
