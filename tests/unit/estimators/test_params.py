"""What an estimator's parameters accept, before there is any Spark session."""

import inspect
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyspark")


pytest.importorskip("torch")

import torch
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

from farandole.errors import ConfigError
from farandole.estimators import estimator as base
from farandole.estimators.backend import SparkBackend
from farandole.estimators.data_module import PetastormDataModule
from farandole.estimators.store import FilesystemStore, Store
from farandole.estimators.torch import TorchEstimator
from farandole.estimators.trainers.checkpoint import Checkpoint
from farandole.estimators.trainers.run import RunPlan
from farandole.integrations.tensorboard import TensorBoardLogger
from farandole.refusals import IGNORED_PARAMS


@pytest.fixture(scope="module", autouse=True)
def settled_torch() -> None:
    """The first optimizer makes torch set a variable of its compiler, for good."""
    torch.optim.SGD(torch.nn.Linear(1, 1).parameters())


def test_defaults() -> None:
    estimator = TorchEstimator()
    assert (estimator.getBatchSize(), estimator.getEpochs(), estimator.getShuffle(), estimator.getVerbose()) == (
        (32, 1, True, 1)
    )
    assert estimator.getValBatchSize() == 32
    assert (estimator.getNumProc(), estimator.getStore(), estimator.getRunId(), estimator.getValidation()) == (
        None,
    ) * 4
    with pytest.raises(ConfigError, match="feature_cols: is not set: columns that the model takes"):
        estimator.getFeatureCols()


def test_each_parameter_has_an_argument_a_setter_and_a_getter(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    values = {
        "num_proc": 2,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "loss": [torch.nn.functional.mse_loss],
        "loss_constructors": [torch.nn.MSELoss],
        "backend": SparkBackend(num_proc=2, env={"A": "b"}),
        "sample_weight_col": "w",
        "gradient_compression": object(),
        "label_shapes": [(-1, 1)],
        "train_steps_per_epoch": 4,
        "validation_steps_per_epoch": 5,
        "backward_passes_per_step": 2,
        "loss_weights": [1.0],
        "metrics": [torch.nn.functional.l1_loss],
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "input_shapes": [(-1, 2)],
        "validation": 0.25,
        "batch_size": 8,
        "val_batch_size": 16,
        "epochs": 3,
        "shuffle": False,
        "random_seed": 5,
        "store": Store.create(str(tmp_path)),
        "run_id": "mine",
        "verbose": 2,
        "max_attempts": 2,
        "ranks_per_task": 2,
        "resource_profile": ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build,
        "loggers": [TensorBoardLogger(tmp_path)],
        "transformation_fn": dict,
        "transformation_edit_fields": [("x", float, (2,), False)],
        "transformation_removed_fields": ["word"],
        "inmemory_cache_all": True,
        "compress_sparse_cols": True,
        "data_module": PetastormDataModule,
        "use_gpu": False,
        "train_minibatch_fn": dict,
        "callbacks": [print],
    }
    given = TorchEstimator(**values)  # type: ignore[arg-type]
    assert set(values) == {param.name for param in given.params}
    chained = TorchEstimator()
    for name, value in values.items():
        camel = "".join(part.capitalize() for part in name.replace("inmemory", "in_memory").split("_"))
        assert getattr(given, f"get{camel}")() == value
        assert getattr(chained, f"set{camel}")(value) is chained
        assert getattr(chained, f"get{camel}")() == value
    assert {*values, "others"} == set(inspect.signature(TorchEstimator).parameters)
    assert given.copy({given.epochs: 7}).getEpochs() == 7
    assert given.getEpochs() == 3


def test_signatures_and_documentation_come_from_the_declarations() -> None:
    arguments = inspect.signature(TorchEstimator).parameters
    assert str(arguments["epochs"]) == "epochs: int | None = 1"
    assert arguments["num_proc"].default is None
    assert "* `epochs`: number of epochs, counted over all fits of the run; default: 1\n" in (
        TorchEstimator.__doc__ or ""
    )
    assert inspect.getdoc(TorchEstimator.setEpochs) == "Number of epochs, counted over all fits of the run."
    assert TorchEstimator.setEpochs.__qualname__ == "EstimatorParams.setEpochs"
    assert str(inspect.signature(TorchEstimator().getLabelCols)) == "() -> list[str]"

    class Mine(TorchEstimator):
        def __init__(self, labels: int, **options: Any) -> None:
            super().__init__(**options)

    assert list(inspect.signature(Mine).parameters) == ["labels", "options"]
    assert Mine(3, epochs=2).getEpochs() == 2


def test_a_default_is_explained() -> None:
    estimator = TorchEstimator(epochs=3)
    assert estimator.explainParam("epochs").endswith("(default: 1, current: 3)")
    assert estimator.explainParam("use_gpu").endswith("(default: None)")
    assert estimator.explainParam("store").endswith("(undefined)")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_proc", 0),
        ("model", "net"),
        ("optimizer", torch.optim.SGD),
        ("loss", "mse"),
        ("loss", torch.nn.MSELoss),
        ("loss_weights", [-1.0]),
        ("metrics", [3]),
        ("feature_cols", "x"),
        ("feature_cols", []),
        ("label_cols", [1]),
        ("input_shapes", [[8, 0]]),
        ("validation", 1.0),
        ("validation", True),
        ("batch_size", 0),
        ("batch_size", 2.5),
        ("batch_size", float("inf")),
        ("batch_size", np.array([8])),
        ("loss_weights", ["1"]),
        ("loss_weights", [float("nan")]),
        ("feature_cols", np.array([["x"]])),
        ("epochs", True),
        ("shuffle", 1),
        ("random_seed", -1),
        ("store", "/tmp/store"),
        ("run_id", 7),
        ("verbose", 3),
        ("backend", object()),
        ("ranks_per_task", 0),
        ("resource_profile", {"cpus": 2}),
        ("label_shapes", [[]]),
        ("train_steps_per_epoch", 0),
        ("backward_passes_per_step", 0),
        ("loss_constructors", 1),
        ("train_minibatch_fn", 1),
        ("callbacks", [1]),
        ("transformation_fn", 1),
        ("transformation_edit_fields", [("x", "no type", ())]),
        ("transformation_edit_fields", [("x", float)]),
        ("transformation_removed_fields", "word"),
        ("inmemory_cache_all", 1),
        ("compress_sparse_cols", None.__class__),
        ("use_gpu", "yes"),
    ],
)
def test_a_value_that_cannot_be_right_is_refused_at_once(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: must be"):
        TorchEstimator(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("batch_size", np.int64(8), 8),
        ("epochs", 3.0, 3),  # of a tuner that draws floats
        ("random_seed", np.float64(7), 7),
        ("verbose", np.int32(2), 2),
        ("validation", np.float32(0.25), 0.25),
        ("loss_weights", np.array([1, 2]), [1.0, 2.0]),
        ("feature_cols", np.array(["x", "y"]), ["x", "y"]),
    ],
)
def test_numbers_and_lists_of_numpy_are_taken_as_by_pyspark_ml(name: str, value: object, taken: object) -> None:
    estimator = TorchEstimator(**{name: value})  # type: ignore[arg-type]
    found = estimator.getOrDefault(name)
    assert found == taken
    assert type(found) is type(taken)


def test_a_value_given_to_fit_is_checked_as_well() -> None:
    estimator = TorchEstimator()
    with pytest.raises(ConfigError, match="epochs: must be a whole number >= 1, got 0"):
        estimator.copy({estimator.epochs: 0}).getEpochs()


def test_what_horovod_had_and_means_nothing_is_named_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        TorchEstimator(partitions_per_process=10, mp_start_method="spawn", data_module=None)
    (record,) = caplog.records
    assert "partitions_per_process (no Parquet is written)" in record.getMessage()
    assert "mp_start_method" in record.getMessage()
    assert "data_module" not in record.getMessage()


def test_what_is_refused_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        TorchEstimator(input_shape=[1], data_modul=object(), partitions_per_process=10)
    assert str(refused.value).startswith(
        "data_modul, input_shape: no such parameter; did you mean data_module, input_shapes? "
    )


def test_what_the_example_of_horovod_passes_is_taken() -> None:
    """The defaults of Horovod's parameters among them."""
    estimator = TorchEstimator(
        backend=SparkBackend(num_proc=2), backward_passes_per_step=1, train_steps_per_epoch=None, label_shapes=None
    )
    assert estimator.getBackend().num_processes() == 2  # type: ignore[union-attr]
    assert estimator.getBackwardPassesPerStep() == 1


@pytest.mark.parametrize("setter", ["setPartitionsPerProcess", "setTrainReaderNumWorker"])
def test_setters_without_meaning_warn(setter: str, caplog: pytest.LogCaptureFixture) -> None:
    estimator = TorchEstimator()
    assert getattr(estimator, setter)(2) is estimator
    (record,) = caplog.records
    assert "these parameters have no effect: " in record.getMessage()


def test_a_shape_may_be_that_of_one_row() -> None:
    estimator = TorchEstimator(input_shapes=[[2], [-1, 3], (4, 5)], label_shapes=[[1]])
    assert estimator.getInputShapes() == [(-1, 2), (-1, 3), (-1, 4, 5)]
    assert estimator.getLabelShapes() == [(-1, 1)]


def test_getters_of_what_has_no_effect_give_what_was_set_or_horovods_default() -> None:
    estimator = TorchEstimator(mp_start_method="spawn")
    copy = estimator.copy().setMpStartMethod("forkserver").setReaderPoolType("process")
    assert (estimator.getMpStartMethod(), copy.getMpStartMethod()) == ("spawn", "forkserver")
    assert (estimator.getReaderPoolType(), copy.getReaderPoolType()) == ("thread", "process")
    assert (estimator.getPartitionsPerProcess(), estimator.getShufflingBufferSize()) == (10, None)


def test_setters_of_what_is_not_there() -> None:
    estimator = TorchEstimator()
    with pytest.raises(AttributeError, match="'TorchEstimator' object has no attribute 'setNothing'"):
        estimator.setNothing(1)


def test_a_slip_is_named_with_its_neighbor() -> None:
    with pytest.raises(ConfigError, match="batchsize: no such parameter; did you mean batch_size"):
        TorchEstimator(batchsize=3)


def test_no_parameter_is_both_known_and_refused() -> None:
    known = set(inspect.signature(TorchEstimator).parameters)
    assert not known & set(IGNORED_PARAMS)


def test_settings_that_do_not_go_together() -> None:
    model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    estimator = TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(other.parameters()),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
    )
    with pytest.raises(ConfigError, match="optimizer: updates parameters that are not the model's"):
        estimator._check()
    estimator.setOptimizer(torch.optim.SGD(model.parameters()))
    estimator._check()
    with pytest.raises(ConfigError, match="loss_weights: has 2 weights for 1 label"):
        estimator.copy({estimator.loss_weights: [0.5, 0.5]})._check()
    with pytest.raises(ConfigError, match="loss: has 2 functions for 1 label"):
        estimator.copy({estimator.loss: [torch.nn.functional.mse_loss] * 2})._check()
    with pytest.raises(ConfigError, match="label_shapes: has 2 shapes for 1 label"):
        estimator.copy({estimator.label_shapes: [(-1,), (-1,)]})._check()
    fields = {estimator.transformation_removed_fields: ["word"]}
    with pytest.raises(ConfigError, match="transformation_fn: is not set, but transformation_edit_fields or"):
        estimator.copy(fields)._check()
    fields = {estimator.transformation_fn: dict, estimator.transformation_removed_fields: ["word", "x"]}
    with pytest.raises(ConfigError, match="transformation_removed_fields: holds x, which the model is trained on"):
        estimator.copy(fields)._check()
    fields = {**fields, estimator.transformation_removed_fields: ["w"], estimator.sample_weight_col: "w"}
    with pytest.raises(ConfigError, match="transformation_removed_fields: holds w, which the model is trained on"):
        estimator.copy(fields)._check()
    with pytest.raises(ConfigError, match="backward_passes_per_step: is for steps without train_minibatch_fn"):
        estimator.copy({estimator.train_minibatch_fn: dict, estimator.backward_passes_per_step: 2})._check()
    with pytest.raises(ConfigError, match="loss_constructors: is set, and loss as well"):
        estimator.copy({estimator.loss_constructors: [torch.nn.MSELoss]})._check()
    with pytest.raises(ConfigError, match="backend: is set, and num_proc as well"):
        estimator.copy({estimator.backend: SparkBackend(2), estimator.num_proc: 2})._check()
    with pytest.raises(ConfigError, match=r"model: is on meta, which the ranks may not have; move it with"):
        elsewhere = torch.nn.Linear(2, 1, device="meta")
        estimator.copy({estimator.model: elsewhere})._check()
    with pytest.raises(ConfigError, match="model: has no parameters"):
        estimator.copy({estimator.model: torch.nn.ReLU()})._check()


def plan_of(store: FilesystemStore | None) -> RunPlan:
    return RunPlan(
        run_id="mine", store=store, rows=None, label_cols=("y",), epochs=3, train_steps=None, validation_steps=None,  # type: ignore[arg-type]
        start=Checkpoint(seed=3), verbose=0,
    )  # fmt: skip


@pytest.mark.parametrize("shared", [True, False])
def test_the_driver_looks_for_the_checkpoint_without_reading_it(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store.create(str(tmp_path))
    trained = Checkpoint(kind="pytorch", epoch=1, seed=3, state=b"weights", history=[{"epoch": 1}])
    if shared:
        store.write(store.get_checkpoint_path("mine"), b"large")
    monkeypatch.setattr(base, "run_training_job", lambda *_, **__: trained.dump())
    monkeypatch.setattr(type(store), "read", lambda *_: pytest.fail("the checkpoint was read"))
    monkeypatch.setattr(TorchEstimator, "_task", lambda *_: None)
    assert TorchEstimator(num_proc=2)._run(plan_of(store), None, None) == trained
    assert ("which the driver does not see" in caplog.text) is not shared


def test_a_fit_of_a_finished_run_says_that_it_trains_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(TorchEstimator, "_trained", lambda *given: given[1:])
    finished = Checkpoint(seed=3, epoch=3)
    assert TorchEstimator()._train_rest(plan_of(None), finished, None, None) == ("mine", finished)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "mine: no epoch is left after 3, as all of them are finished" in record.message
    assert record.message.endswith(": raise epochs, or set a new run_id, to train")


def test_fits_of_a_grid_do_not_share_a_run(tmp_path: Path) -> None:
    estimator = TorchEstimator(store=Store.create(str(tmp_path)), run_id="mine")
    with pytest.raises(ConfigError, match="run_id: names one run, which each of several fits would resume"):
        estimator.fitMultiple(None, [{estimator.epochs: 1}, {estimator.epochs: 2}])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="run_id: names one run"):
        estimator.fitMultiple(None, [{estimator.run_id: "one", estimator.epochs: 2}, {estimator.run_id: "one"}])  # type: ignore[arg-type]
    named = [{estimator.run_id: "one"}, {estimator.run_id: "two"}]
    assert estimator.fitMultiple(None, named)  # type: ignore[arg-type]
    assert estimator.setStore(None).fitMultiple(None, [{}])  # type: ignore[arg-type]


def test_a_grid_that_pyspark_cannot_save_is_named() -> None:
    """pyspark.ml would raise "Object of type function is not JSON serializable" after all fits."""
    estimator = TorchEstimator()
    losses = [torch.nn.functional.mse_loss, torch.nn.functional.l1_loss]
    with pytest.warns(UserWarning, match=r"not saved: JSON does not hold the values of loss; save the bestModel"):
        estimator.fitMultiple(None, [{estimator.loss: each, estimator.epochs: 2} for each in losses])  # type: ignore[arg-type]


def test_secrets_among_the_ranks_variables_are_not_saved(caplog: pytest.LogCaptureFixture) -> None:
    env = {"HF_TOKEN": "hidden", "AWS_SECRET_ACCESS_KEY": "hidden too", "TOKENIZERS_PARALLELISM": "false"}
    backend = SparkBackend(num_proc=2, env=env, verbose=2)
    files = TorchEstimator(backend=backend).to_files()
    assert b"hidden" not in b"".join(files.values())
    assert "without the variables AWS_SECRET_ACCESS_KEY, HF_TOKEN; set them again with setBackend" in caplog.text
    again = TorchEstimator.from_files(files.__getitem__).getBackend()
    assert isinstance(again, SparkBackend)
    assert again.tasks() == replace(backend.tasks(), env={"TOKENIZERS_PARALLELISM": "false"})
    assert backend.env == env
