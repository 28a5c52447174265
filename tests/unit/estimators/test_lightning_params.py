"""Parameters that a `LightningEstimator` takes or refuses, without a Spark session."""

import inspect
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("torch")
pytest.importorskip("lightning")

import lightning.pytorch as lightning
import numpy as np
import pytorch_lightning
import torch

from farandole.data import ShardBatch
from farandole.errors import ConfigError
from farandole.estimators.lightning import LightningEstimator, LightningModel
from farandole.estimators.trainers.checkpoint import Checkpoint
from farandole.estimators.trainers.lightning.data import Tensors, ahead, queue_length
from farandole.estimators.trainers.lightning.files import dumped, moved
from farandole.estimators.trainers.lightning.plain import wrapped
from farandole.estimators.trainers.torch.losses import Losses
from farandole.estimators.trainers.torch.tensors import Inputs
from farandole.lightning.packages import package_of
from farandole.lightning.stepping import stepping


@pytest.fixture(scope="module", autouse=True)
def settled_torch() -> None:
    """The first optimizer makes torch set a variable of its compiler, for good."""
    torch.optim.SGD(torch.nn.Linear(1, 1).parameters())


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)


# Horovod's names and defaults; spec of horovod.spark.lightning.TorchEstimator.
VALUES: dict[str, Any] = {
    "callbacks": [lightning.callbacks.EarlyStopping("val_loss")],
    "trainer_args": {"gradient_clip_val": 0.5},
    "logger": object(),
    "log_every_n_steps": 5,
    "profiler": "simple",
    "num_gpus": 0,
    "data_module": lightning.LightningDataModule,
    "loader_num_epochs": 3,
    "terminate_on_nan": True,
    "debug_data_loader": True,
    "train_async_data_loader_queue_size": 4,
    "val_async_data_loader_queue_size": 0.5,
}
SPELLED = {"num_gpus": "NumGPUs", "log_every_n_steps": "LogEveryNSteps"}


def test_defaults_are_those_of_horovod() -> None:
    estimator = LightningEstimator()
    assert (estimator.getLogEveryNSteps(), estimator.getTerminateOnNan(), estimator.getDebugDataLoader()) == (
        (50, False, False)
    )
    others = [estimator.getTrainerArgs(), estimator.getLogger(), estimator.getProfiler(), estimator.getNumGPUs()]
    assert others == [None] * 4
    assert (estimator.getCallbacks(), estimator.getDataModule(), estimator.getLoaderNumEpochs()) == ([], None, None)
    assert estimator.getTrainAsyncDataLoaderQueueSize() is estimator.getValAsyncDataLoaderQueueSize() is None


def test_each_parameter_has_an_argument_a_setter_and_a_getter() -> None:
    given, chained = LightningEstimator(**VALUES), LightningEstimator()
    for name, value in VALUES.items():
        camel = SPELLED.get(name) or "".join(part.capitalize() for part in name.split("_"))
        assert getattr(given, f"get{camel}")() == value
        assert getattr(chained, f"set{camel}")(value) is chained
        assert getattr(chained, f"get{camel}")() == value
    named = set(inspect.signature(LightningEstimator).parameters)
    assert set(VALUES) <= named
    shared = LightningEstimator(model=Net(), epochs=3, inmemory_cache_all=True)
    assert (shared.getEpochs(), shared.getInMemoryCacheAll()) == (3, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_gpus", 2),
        ("num_gpus", True),
        ("trainer_args", ["max_epochs"]),
        ("log_every_n_steps", 0),
        ("data_module", "rows"),
        ("loader_num_epochs", 0),
        ("terminate_on_nan", 1),
        ("train_async_data_loader_queue_size", -1),
        ("val_async_data_loader_queue_size", 1.5),
    ],
)
def test_a_value_that_cannot_be_right_is_refused_at_once(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: must be"):
        LightningEstimator(**{name: value})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"trainer_args": {"max_epochs": 3}}, "trainer_args: may not hold .*: max_epochs: set epochs"),
        ({"trainer_args": {"gpus": 1}}, "trainer_args: holds gpus, which the Trainer of lightning.pytorch .* not know"),
        (
            {"callbacks": [pytorch_lightning.callbacks.EarlyStopping("val_loss")]},
            "must be callbacks of lightning.pytorch, .*; got a EarlyStopping of pytorch_lightning",
        ),
        ({"callbacks": [3]}, "must be callbacks of lightning.pytorch, as the model's class is; got int"),
        ({"input_shapes": [[-1, 2], [-1]]}, "input_shapes: has 2 shapes for 1 feature columns"),
        ({"model": Net().to("meta")}, "model: is on meta, which the ranks may not have"),
        ({"model": torch.nn.Linear(2, 1)}, "loss: is not set"),
        ({"train_minibatch_fn": print}, "train_minibatch_fn: is for TorchEstimator; write the training_step"),
        ({"loss_weights": [0.5, 0.5]}, "loss_weights: has 2 weights for 1 label"),
        ({"num_gpus": 1, "use_gpu": False}, "num_gpus: is 1, but use_gpu is False; set one of them"),
    ],
)
def test_settings_that_do_not_go_together(changes: dict[str, Any], text: str) -> None:
    settings: dict[str, Any] = {"model": Net(), "feature_cols": ["x"], "label_cols": ["y"]}
    with pytest.raises(ConfigError, match=text):
        LightningEstimator(**(settings | changes))._check()


def test_losses_of_a_lightning_module_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    estimator = LightningEstimator(model=Net(), feature_cols=["x"], label_cols=["y"], loss=torch.nn.MSELoss())
    with caplog.at_level(logging.WARNING):
        estimator._check()
    assert "loss have no effect: the model is a LightningModule" in caplog.text


def test_the_package_is_that_of_the_model() -> None:
    class Other(pytorch_lightning.LightningModule):
        pass

    assert package_of(Net()) is lightning
    assert package_of(Other()) is pytorch_lightning
    assert package_of(torch.nn.Linear(1, 1)) is None
    assert LightningEstimator(model=Other())._package is pytorch_lightning
    callbacks = [pytorch_lightning.Callback()]
    assert LightningEstimator(model=torch.nn.Linear(1, 1), callbacks=callbacks)._package is pytorch_lightning
    assert LightningEstimator(model=torch.nn.Linear(1, 1))._package is lightning


def test_layers_may_be_made_late() -> None:
    class Late(lightning.LightningModule):
        def configure_model(self) -> None:
            self.linear = torch.nn.Linear(2, 1, dtype=torch.float64)

    estimator = LightningEstimator(model=Late(), feature_cols=["x"], label_cols=["y"])
    estimator._check()
    assert estimator._inputs().dtype == torch.float64
    assert not list(estimator.getModel().parameters()), "the user's model stays as it is"


def test_history_has_the_form_of_horovod() -> None:
    history = [{"epoch": 1, "loss": 3.0, "seconds": 1.0}, {"epoch": 2, "loss": 2.0, "val_loss": 1.0, "seconds": 1.0}]
    model = LightningModel(model=Net(), feature_columns=["x"], label_columns=["y"], history=history)
    assert model.getHistory() == {"loss": 2.0, "val_loss": 1.0}


@pytest.mark.parametrize("closed", [True, False])
def test_rates_are_multiplied_while_an_optimizer_updates(closed: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    seen = []

    def closure() -> float:
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.param_groups[0]["lr"] = 0.25  # as a warm-up does
        weight.grad = torch.ones(1)
        return 1.0

    before = optimizer.step
    with stepping(optimizer, 4.0):
        if closed:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    assert seen == [0.5]
    assert weight.item() == -1.0, "the update takes 0.25 * 4"
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.step == before
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_thread_makes_values_ahead_and_ends() -> None:
    made: list[int] = []

    def source() -> Iterator[int]:
        for value in range(9):
            made.append(value)
            yield value

    taken = ahead(source(), 3)
    assert next(taken) == 0
    assert list(taken) == [1, 2, 3, 4, 5, 6, 7, 8]
    given_up = ahead(source(), 3)
    assert next(given_up) == 0
    given_up.close()
    assert len(made) <= 9 + 5, "at most three are made ahead"
    assert not [each for each in threading.enumerate() if each.name.startswith("farandole-ahead")]
    with pytest.raises(ZeroDivisionError):
        list(ahead((1 // value for value in (1, 0)), 2))


def test_lengths_of_queues() -> None:
    assert [queue_length(asked, 8) for asked in (None, 0, 0.0, 3, 0.25, 0.01, 1.0)] == [0, 0, 0, 3, 2, 1, 8]


@pytest.mark.parametrize(("shapes", "shape"), [(None, (2, 6)), (((-1, 2, 3),), (2, 2, 3))])
def test_labels_of_a_plain_module_have_the_shapes_that_were_given(shapes: Any, shape: tuple[int, ...]) -> None:
    seen: list[tuple[int, ...]] = []

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(label.shape))
        return (output.flatten() - label.flatten()).square().mean()

    model = torch.nn.Linear(1, 6)
    optimizer = torch.optim.SGD(model.parameters())
    losses = Losses(optimizer=optimizer, losses=(loss,), weights=(1.0,), metrics=())
    inputs = Inputs(columns=("x",), shapes=((-1, 1),), dtype=torch.float32)
    tensors = Tensors(inputs=inputs, label_cols=("y",), label_shapes=shapes, weight_col=None)
    module = wrapped(lightning, model, losses, tensors, None)  # type: ignore[arg-type]
    module.training_step(tensors.of(ShardBatch({"x": np.ones(2), "y": np.ones((2, 6))}, 2, 1.0)), 0)
    assert seen == [shape]


def test_paths_of_an_earlier_attempt_are_moved() -> None:
    state = {"ModelCheckpoint": {"dirpath": "/a", "best_k_models": {"/a/x.ckpt": 1.0}, "last": "/ab/x", "score": 1.0}}
    assert moved(state, "/a", "/b") == {
        "ModelCheckpoint": {"dirpath": "/b", "best_k_models": {"/b/x.ckpt": 1.0}, "last": "/ab/x", "score": 1.0}
    }


class Labelled(LightningModel):
    """A fitted model with an argument of its own."""

    def __init__(self, *, labels: list[str], **options: Any) -> None:
        super().__init__(**options)
        self.labels = labels


class Classifier(LightningEstimator):
    def get_model_class(self) -> type:
        return Labelled

    def _get_model_kwargs(self, model: Any, history: Any, optimizer: Any, run_id: str, metadata: Any) -> dict[str, Any]:
        return super()._get_model_kwargs(model, history, optimizer, run_id, metadata) | {"labels": ["cat", "dog"]}


def test_a_subclass_chooses_the_class_and_the_arguments_of_the_fitted_model() -> None:
    state = dumped({"lightning": {"state_dict": Net().state_dict()}, "best": None, "prefix": ""})
    checkpoint = Checkpoint(seed=1, state=state, outputs=[("float32", [1])])
    fitted = Classifier(model=Net(), feature_cols=["x"], label_cols=["y"])._trained("mine", checkpoint)
    assert type(fitted) is Labelled and fitted.labels == ["cat", "dog"]
    assert fitted.getRunId() == "mine"
