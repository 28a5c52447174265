"""Checks of the trainer of `KerasEstimator` on two ranks, with rows from files and without Spark."""

import importlib
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

import farandole.keras as hvd
from farandole.errors import ConfigError, DataError
from farandole.estimators.data_module import DataModule
from farandole.estimators.keras import KerasEstimator, KerasModel
from farandole.estimators.store import Store
from farandole.estimators.trainers.checkpoint import Checkpoint, last_checkpoint
from farandole.estimators.trainers.keras.model import Inputs, dump_model, dump_object, load_state, outputs_of
from farandole.estimators.trainers.keras.training import KerasJob, KerasTrainer
from farandole.estimators.trainers.rows import RowsWanted
from farandole.estimators.trainers.run import Run, RunPlan
from helpers.estimator_rows import mine, points, shard_of
from helpers.keras_library import is_keras_2, keras, log

RATE = 2.0**-4


def job_of(model: Any, columns: dict[str, Any], **changes: Any) -> KerasJob:
    wanted = RowsWanted(
        columns=tuple(columns), validation=None, validation_col=None, batch_size=4, val_batch_size=4, shuffle=False
    )
    rows = {name: changes.pop(name) for name in ("validation_col", "batch_size", "val_batch_size") if name in changes}
    plan: dict[str, Any] = {
        "run_id": "here", "store": None, "rows": replace(wanted, **rows), "label_cols": ("y",), "epochs": 2,
        "train_steps": None, "validation_steps": None, "start": Checkpoint(seed=1), "verbose": 0,
        "weight_col": None, "label_shapes": None, "passes": 1, "data_module": None,
    }  # fmt: skip
    plan |= {name: changes.pop(name) for name in list(changes) if name in plan}
    features = tuple(name for name in columns if name not in (*plan["label_cols"], "w"))
    settings: dict[str, Any] = {
        "plan": RunPlan(**plan), "model": dump_model(model), "optimizer": dump_object(keras.optimizers.SGD(RATE)),
        "optimizer_state": [], "loss": "mean_squared_error", "loss_weights": None, "metrics": [], "callbacks": [],
        "checkpoint_callback": None, "inputs": Inputs.of(model, features),
    }  # fmt: skip
    return KerasJob(**(settings | changes))


def trained(job: KerasJob, path: Path) -> tuple[Run, KerasTrainer]:
    """Train as `trainers.run.train` does, on the running ranks."""
    run = Run(job.plan, path)
    trainer = KerasTrainer(job, run)
    if run.checkpoint.state is not None:
        trainer.restore(run.checkpoint.state)
    run.trainer = trainer
    trainer.train(run)
    run.seal()
    run.close()
    return run, trainer


def line() -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.set_weights([np.full((2, 1), 0.5, "float32"), np.full(1, 0.25, "float32")])
    return model


def weights_of(trainer: KerasTrainer) -> list[Any]:
    return load_state(trainer.state(whole=False))[0]


def check_steps_are_means_over_all_rows(rank: int, size: int, folder: Path) -> None:
    # 11 rows: one rank has 6, the other 5. An epoch has one step with all rows.
    columns = points(11) | {"w": [1.0 + place % 2 for place in range(11)]}
    optimizer = dump_object(keras.optimizers.SGD(RATE / size))  # ranks multiply the rate by their number
    job = job_of(line(), columns, batch_size=100, epochs=3, optimizer=optimizer, weight_col="w")
    run, trainer = trained(job, shard_of(folder, mine(columns, rank, size)))
    x, y, w = (np.array(columns[name]) for name in ("x", "y", "w"))
    weight, bias = np.array([0.5, 0.5]), 0.25
    for _ in range(3):
        error = (x @ weight + bias - y) * w
        weight, bias = weight - RATE * 2 * x.T @ error / len(y), bias - RATE * 2 * error.mean()
    got = weights_of(trainer)
    np.testing.assert_allclose(got[0][:, 0], weight, rtol=1e-5)
    np.testing.assert_allclose(got[1], [bias], rtol=1e-5)
    assert run.checkpoint.outputs == [("float32", [1])]


def check_a_rank_without_rows_takes_part(rank: int, size: int, folder: Path) -> None:
    columns = {"x": [[1.0, 0.0], [0.0, 1.0]], "y": [1.0, 2.0]}
    nothing = {"x": pa.array([], pa.list_(pa.float64())), "y": pa.array([], pa.float64())}
    own = columns if rank == 0 else nothing
    job = job_of(line(), columns, epochs=1, metrics=["mean_absolute_error"], batch_size=2)
    run, _ = trained(job, shard_of(folder, own))
    (record,) = run.checkpoint.history
    assert abs(record["mean_absolute_error"] - (0.25 + 1.25) / 2) < 1e-6
    assert abs(record["loss"] - (0.25**2 + 1.25**2) / 2) < 1e-6


def check_a_rank_without_rows_keeps_losses_finite(rank: int, size: int, folder: Path) -> None:
    columns = {"x": [[1.0, 2.0]], "y": [1.0]}
    nothing = {"x": pa.array([], pa.list_(pa.float64())), "y": pa.array([], pa.float64())}
    given = keras.Input((2,))
    model = keras.Model(given, keras.layers.Dense(1)(log(given)))  # infinite for a row of zeros
    job = job_of(model, columns, epochs=1)
    run, trainer = trained(job, shard_of(folder, columns if rank == 0 else nothing))
    assert np.isfinite(run.checkpoint.history[-1]["loss"])
    assert all(np.isfinite(each).all() for each in weights_of(trainer))


class Doubling(DataModule):
    """Data module that doubles the features of the rank's rows."""

    def train_data(self) -> Any:
        return ((2 * inputs, *rest) for inputs, *rest in self.train_loader)

    def val_data(self) -> Any:
        assert self.val_loader is not None
        return ((2 * inputs, *rest) for inputs, *rest in self.val_loader)


class Constant(DataModule):
    """Data module with its own rows, without weights."""

    def train_data(self) -> Any:
        return [(np.ones((3, 2), "float32"), np.zeros(3, "float32"))]


def check_a_data_module_makes_the_batches(rank: int, size: int, folder: Path) -> None:
    # 11 rows: one rank has fewer rows, and one batch less.
    columns = points(11)
    validates = [int(place % 4 == 0) for place in range(rank, 11, size)]
    path = shard_of(folder, mine(columns, rank, size), validates)
    options = {"batch_size": 3, "val_batch_size": 1, "validation_col": "v", "epochs": 4}
    changed = points(11) | {"x": [[2 * number for number in row] for row in columns["x"]]}
    runs = [trained(job_of(line(), columns, data_module=Doubling, **options), path)]
    (folder / "changed").mkdir(exist_ok=True)
    path = shard_of(folder / "changed", mine(changed, rank, size), validates)
    runs.append(trained(job_of(line(), changed, **options), path))
    for got, want in zip(*(weights_of(trainer) for _, trainer in runs), strict=True):
        np.testing.assert_array_equal(got, want)
    scores = [[(record["loss"], record["val_loss"]) for record in run.checkpoint.history] for run, _ in runs]
    assert scores[0] == scores[1]
    # A model that does not change has the same loss of all rows to validate in each epoch.
    at_rest = dump_object(keras.optimizers.SGD(0.0))
    run, _ = trained(job_of(line(), changed, data_module=Doubling, optimizer=at_rest, **options), path)
    held = [place for place in range(11) if place % 4 == 0]
    x, y = 2 * np.array(changed["x"])[held], np.array(changed["y"])[held]
    want = ((x @ [0.5, 0.5] + 0.25 - y) ** 2).mean()
    np.testing.assert_allclose([record["val_loss"] for record in run.checkpoint.history], [want] * 4, rtol=1e-5)
    run, _ = trained(job_of(line(), columns, data_module=Constant), path)
    assert run.checkpoint.history[1]["loss"] < run.checkpoint.history[0]["loss"]


def check_validation_callbacks_and_stopping(rank: int, size: int, folder: Path) -> None:
    columns = points(12)
    validates = [1 if place % 4 == 0 else 0 for place in range(12 // size)]

    seen: list[dict[str, float]] = []

    class StopOnRank1(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(dict(logs))
            if epoch == 1 and hvd.rank() == size - 1:
                self.model.stop_training = True

    store = Store.create(str(folder / "store"))
    checkpoint = keras.callbacks.ModelCheckpoint("mine.keras", save_best_only=False)
    job = job_of(
        line(), columns, epochs=5, store=store, validation_col="held", metrics=["mae"], callbacks=[StopOnRank1()],
        checkpoint_callback=checkpoint,
    )  # fmt: skip
    run, trainer = trained(job, shard_of(folder, mine(columns, rank, size), validates))
    assert [record["epoch"] for record in run.checkpoint.history] == [1, 2], "one rank's callback stops all"
    assert run.checkpoint.stopped
    assert {"loss", "mae", "val_loss", "val_mae", "rows_per_s"} <= set(run.checkpoint.history[0])
    every = hvd.allgather_object(seen)
    assert every[0] == every[-1], "callbacks see values of all ranks"
    model = keras.saving.load_model(folder / "store/runs/here/mine.keras", compile=False)
    np.testing.assert_array_equal(model.get_weights()[0], weights_of(trainer)[0])


def check_only_a_rank_that_writes_files_has_a_folder(rank: int, size: int, folder: Path) -> None:
    """A rank that is killed leaves its folder behind."""
    columns = points(4)
    path = shard_of(folder, mine(columns, rank, size))
    for callback, own in ((None, 0), (keras.callbacks.ModelCheckpoint("mine.keras"), int(rank == 0))):
        store = Store.create(str(folder / f"store{callback is None}"))
        job = job_of(line(), columns, epochs=1, store=store, checkpoint_callback=callback)
        with mock.patch.object(tempfile, "TemporaryDirectory", wraps=tempfile.TemporaryDirectory) as made:
            trained(job, path)
        prefixes = [each.kwargs.get("prefix") for each in made.call_args_list]
        assert prefixes.count("farandole-checkpoints-") == own


def check_a_resumed_run_keeps_a_better_model(rank: int, size: int, folder: Path) -> None:
    columns, best = points(12), folder / "store/runs/here/best.keras"
    path = shard_of(folder, mine(columns, rank, size))
    store = Store.create(str(folder / "store"))
    diverging = dump_object(keras.optimizers.SGD(2.0))  # each epoch is worse than the one before
    written = []
    for epochs in (1, 2, 3):
        checkpoint = keras.callbacks.ModelCheckpoint("best.keras", monitor="loss", save_best_only=True)
        changes = {"epochs": epochs, "store": store, "optimizer": diverging, "checkpoint_callback": checkpoint}
        run, _ = trained(job_of(line(), columns, **changes), path)
        hvd.barrier()
        written.append(best.stat().st_mtime_ns)
    losses = [record["loss"] for record in run.checkpoint.history]
    assert losses == sorted(losses) and len(set(losses)) == 3
    assert len(set(written)) == 1, "the best model is that of the first epoch"


def check_resumed_runs_equal_uninterrupted_ones(rank: int, size: int, folder: Path) -> None:
    columns = points(16)
    store = Store.create(str(folder / "store"))

    def fit(run_id: str, epochs: int) -> tuple[Run, KerasTrainer]:
        keras.utils.set_random_seed(3)
        random = [keras.layers.Dropout(0.5)] if not is_keras_2 else []  # Keras 2 does not seed compiled functions anew
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(8, "relu"), *random, keras.layers.Dense(1)])
        start = {"store": store, "run_id": run_id, "epochs": epochs, "start": Checkpoint(seed=9)}
        optimizer = dump_object((keras.optimizers.legacy if is_keras_2 else keras.optimizers).Adam(0.01))
        return trained(job_of(model, columns, optimizer=optimizer, **start), path)

    path = shard_of(folder, mine(columns, rank, size))
    _, straight = fit("straight", 3)
    for epochs in (1, 2, 3):
        run, resumed = fit("resumed", epochs)
    for one, other in zip(weights_of(straight), weights_of(resumed), strict=True):
        np.testing.assert_array_equal(one, other)
    _, optimizer, _ = load_state(resumed.state(whole=True))
    assert any(each.shape == () and each == np.float32(0.01) for each in optimizer), "the rate of the user"
    assert [record["epoch"] for record in run.checkpoint.history] == [1, 2, 3]


def check_a_finished_run_keeps_the_model_of_its_fit(rank: int, size: int, folder: Path) -> None:
    columns, store = points(12), Store.create(str(folder / "store"))
    path = shard_of(folder, mine(columns, rank, size))

    def fit(run_id: str, epochs: int, *callbacks: Any) -> list[Any]:
        diverging = dump_object(keras.optimizers.SGD(2.0))  # the first epoch is the best
        plan = {"store": store, "run_id": run_id, "epochs": epochs}
        _, trainer = trained(job_of(line(), columns, optimizer=diverging, callbacks=callbacks, **plan), path)
        hvd.barrier()
        return weights_of(trainer)

    def check(one: list[Any], other: list[Any]) -> None:
        for kept, wanted in zip(one, other, strict=True):
            np.testing.assert_array_equal(kept, wanted)

    restored = fit("restored", 2, keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True))
    check(restored, fit("first", 1))
    saved = last_checkpoint(store, "restored", print)
    assert saved is not None
    check(load_state(saved.weights)[0], restored)  # what a later fit of this run returns
    # Further epochs continue after the last one, not after the best one.
    straight = fit("straight", 3)
    check(fit("restored", 3), straight)
    saved = last_checkpoint(store, "straight", print)
    assert saved is not None and saved.final is None


def check_schedules_are_multiplied(rank: int, size: int, folder: Path) -> None:
    decay = keras.optimizers.schedules.ExponentialDecay(RATE, 1, 0.5)
    kinds = [keras.optimizers, keras.optimizers.legacy] if is_keras_2 else [keras.optimizers]
    columns = {"x": [[1.0, 0.0]] * 8, "y": [1.0] * 8}
    path = shard_of(folder, mine(columns, rank, size))
    for kind in kinds:
        _, trainer = trained(job_of(line(), columns, optimizer=dump_object(kind.SGD(decay)), epochs=2), path)
        weight, bias = 0.5, 0.25
        for step in range(2):
            change = size * RATE * 0.5**step * 2 * (weight + bias - 1.0)
            weight, bias = weight - change, bias - change
        np.testing.assert_allclose(weights_of(trainer)[0][:, 0], [weight, 0.5], rtol=1e-5)


def check_losses_of_a_compiled_model_are_taken(rank: int, size: int, folder: Path) -> None:
    columns = points(8) | {"z": [1.0] * 8}
    keras.utils.set_random_seed(4)
    given = keras.Input((2,))
    model = keras.Model(given, [keras.layers.Dense(1, name="one")(given), keras.layers.Dense(1, name="two")(given)])
    weights = {"two": 0.25, "one": 0.75}
    model.compile(keras.optimizers.SGD(0.0), loss={"two": "mae", "one": "mse"}, loss_weights=weights)
    estimator = KerasEstimator(model=model, feature_cols=["x"], label_cols=["y", "z"])
    plan = job_of(model, columns, label_cols=("y", "z"), epochs=1).plan
    estimator._check()
    (job,) = estimator._task(plan).args  # type: ignore[attr-defined]
    run, _ = trained(job, shard_of(folder, mine(columns, rank, size)))
    x, y = np.array(columns["x"]), np.array(columns["y"])
    of_y, of_z = (each[:, 0] for each in model.predict_on_batch(x.astype("float32")))
    wanted = 0.75 * np.mean((of_y - y) ** 2) + 0.25 * np.mean(abs(of_z - 1.0))
    np.testing.assert_allclose(run.checkpoint.history[0]["loss"], wanted, rtol=1e-5)
    for loss in (("mse", "mae"), ["mse", "mae"], "mse"):
        model.compile("sgd", loss=loss, loss_weights=[1, 2])
        assert (estimator.getLoss(), estimator.getLossWeights()) == ([*loss] if loss != "mse" else ["mse"], [1, 2])
    model.compile("sgd", loss={"one": "mse"})
    with pytest.raises(ConfigError, match=r"^loss: of the model has the names \['one'\], and its outputs are"):
        estimator.getLoss()
    estimator.setLoss({"two": "mae", "one": "mse"}).setMetrics({"two": ["mae"]})
    assert (estimator.getLoss(), estimator.getMetrics()) == (["mse", "mae"], [[], ["mae"]])
    estimator.setMetrics({"one": "mae", "two": ["mse"]})
    assert estimator.getMetrics() == [["mae"], ["mse"]]
    with pytest.raises(ConfigError, match=r"^metrics: of the model has the names"):
        estimator.setMetrics({"three": "mae"}).getMetrics()
    if not is_keras_2:
        divided = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        with pytest.raises(ConfigError, match=r"^loss: has reduction='mean_with_sample_weight', which removes"):
            estimator.copy({estimator.loss: ["mae", divided]})._check()
    single = keras.Model(given, keras.layers.Dense(1, name="one")(given))
    assert KerasEstimator(model=single, metrics={"one": "mae"}).getMetrics() == ["mae"]


def check_losses_of_named_outputs_are_taken_by_name(rank: int, size: int, folder: Path) -> None:
    columns = points(8) | {"z": [1.0] * 8}
    keras.utils.set_random_seed(4)
    given = keras.Input((2,))
    model = keras.Model(given, {name: keras.layers.Dense(1)(given) for name in ("two", "one")})
    model.compile(keras.optimizers.SGD(0.0), loss={"two": "mae", "one": "mse"}, loss_weights={"two": 0.25, "one": 0.75})
    estimator = KerasEstimator(model=model, feature_cols=["x"], label_cols=["y", "z"], metrics={"two": ["mse"]})
    plan = job_of(model, columns, label_cols=("y", "z"), epochs=1).plan
    (job,) = estimator._task(plan).args  # type: ignore[attr-defined]
    run, _ = trained(job, shard_of(folder, mine(columns, rank, size)))
    x, y = np.array(columns["x"]), np.array(columns["y"])
    of_y, of_z = (each[:, 0] for each in outputs_of(model.predict_on_batch(x.astype("float32"))))
    wanted = 0.75 * np.mean((of_y - y) ** 2) + 0.25 * np.mean(abs(of_z - 1.0))
    np.testing.assert_allclose(run.checkpoint.history[0]["loss"], wanted, rtol=1e-5)
    of_two = [value for name, value in run.checkpoint.history[0].items() if name.endswith("_mse")]
    np.testing.assert_allclose(of_two, [np.mean((of_z - 1.0) ** 2)], rtol=1e-5)


def check_inputs_in_a_dictionary_are_columns_by_name(rank: int, size: int) -> None:
    inputs = {name: keras.Input((1,), name=name) for name in ("tall", "broad")}
    both = keras.layers.Concatenate()([inputs["tall"], inputs["broad"]])
    output = keras.layers.Dense(1, kernel_initializer="ones")(keras.layers.Rescaling(1.0)(both))
    model = keras.Model(inputs, output)
    model.layers[-1].set_weights([np.array([[1.0], [10.0]]), np.zeros(1)])
    given = {"tall": np.array([1.0]), "broad": np.array([2.0]), "a": np.array([3.0]), "b": np.array([4.0])}
    for names, wanted in ((("tall", "broad"), 21.0), (("broad", "tall"), 21.0), (("a", "b"), 34.0)):
        made = model.predict_on_batch(Inputs.of(model, names).arrays(given))
        np.testing.assert_allclose(made, [[wanted]])


def check_integers_hold_no_fractions(rank: int, size: int) -> None:
    model = keras.Sequential([keras.Input((1,), dtype="int32"), keras.layers.Embedding(5, 3)])
    inputs = Inputs.of(model, ["kind"])
    np.testing.assert_array_equal(inputs.arrays({"kind": np.array([2.0])}), [[2]])
    for wrong in (0.5, np.nan):
        with pytest.raises(DataError, match="column 'kind': holds numbers that int32 cannot hold"):
            inputs.arrays({"kind": np.array([wrong])})


def check_losses_of_outputs_are_means_over_all_rows(rank: int, size: int, folder: Path) -> None:
    # Batches differ in size, within a rank and between ranks.
    columns = points(19) | {"z": [float(n * n) for n in range(19)]}
    keras.utils.set_random_seed(4)
    given = keras.Input((2,))
    model = keras.Model(given, [keras.layers.Dense(1, name=name)(given) for name in ("one", "two")])
    own = {"label_cols": ("y", "z"), "loss": ["mse", "mae"], "optimizer": dump_object(keras.optimizers.SGD(0.0))}
    job = job_of(model, columns, **own, validation_col="held", batch_size=3, val_batch_size=3)
    validates = [int(place % 19 < 8) for place in range(rank, 19, size)]
    run, _ = trained(job, shard_of(folder, mine(columns, rank, size), validates))
    x, y, z = (np.array(columns[name]) for name in ("x", "y", "z"))
    of_y, of_z = (each[:, 0] for each in model.predict_on_batch(x.astype("float32")))
    for kind, rows in (("", np.arange(19) >= 8), ("val_", np.arange(19) < 8)):
        one, two = np.mean((of_y - y)[rows] ** 2), np.mean(abs(of_z - z)[rows])
        for record in run.checkpoint.history:
            got = [record[f"{kind}{name}"] for name in ("loss", "one_loss", "two_loss")]
            np.testing.assert_allclose(got, [one + two, one, two], rtol=1e-4)


def check_a_model_is_saved_once(rank: int, size: int) -> None:
    own = {"Doubling": Doubling}
    fitted = KerasModel(model=line(), feature_columns=["x"], label_columns=["y"], custom_objects=own)
    with mock.patch.object(keras.Model, "save", autospec=True, side_effect=keras.Model.save) as save:
        files = fitted.to_files()
    assert save.call_count == 1
    again = KerasModel.from_files(files.__getitem__)
    np.testing.assert_array_equal(again.getModel().get_weights()[0], line().get_weights()[0])
    assert again.getCustomObjects().keys() == own.keys()
    with pytest.raises(ConfigError, match="backend_env: holds values that are not texts, of OMP_NUM_THREADS"):
        KerasEstimator(backend_env={"OMP_NUM_THREADS": 4})  # type: ignore[dict-item]


def check_secrets_among_the_variables_are_not_saved(rank: int, size: int) -> None:
    estimator = KerasEstimator(backend_env={"HF_TOKEN": "hidden", "OMP_NUM_THREADS": "4"})
    files = estimator.to_files()
    assert b"hidden" not in b"".join(files.values())
    assert KerasEstimator.from_files(files.__getitem__).getBackendEnv() == {"OMP_NUM_THREADS": "4"}
    assert estimator.getBackendEnv()["HF_TOKEN"] == "hidden"


def check_the_optimizer_is_of_the_models_library(rank: int, size: int) -> None:
    columns: dict[str, Any] = {"feature_cols": ["x"], "label_cols": ["y"], "loss": "mse"}
    named = KerasEstimator(model=line(), optimizer="sgd", **columns)
    named._check()
    assert isinstance(named.getOptimizer(), keras.optimizers.SGD)
    assert named._environment().get("TF_USE_LEGACY_KERAS") == ("1" if is_keras_2 else None)
    if is_keras_2:
        other = importlib.import_module("keras").optimizers.SGD()
        with pytest.raises(ConfigError, match=r"^optimizer: is of keras, and the model of tf_keras"):
            KerasEstimator(model=line(), optimizer=other, **columns)._check()


def check_outputs_of_several_dimensions(rank: int, size: int, folder: Path) -> None:
    given = keras.Input((2,))
    square = keras.layers.Dense(4, use_bias=False, kernel_initializer="ones")(given)
    model = keras.Model(given, keras.layers.Reshape((2, 2))(square))
    columns = points(7)
    columns["y"] = [[float(n % k) for k in (1, 2, 3, 4)] for n in range(7)]
    optimizer = dump_object(keras.optimizers.SGD(RATE / size))
    job = job_of(model, columns, batch_size=100, epochs=1, optimizer=optimizer, label_shapes=((-1, 2, 2),))
    _, trainer = trained(job, shard_of(folder, mine(columns, rank, size)))
    x, y = (np.array(columns[name]) for name in ("x", "y"))
    want = np.ones((2, 4)) - RATE * 2 * x.T @ (x @ np.ones((2, 4)) - y) / y.size
    np.testing.assert_allclose(weights_of(trainer)[0], want, rtol=1e-5)


def check_several_inputs_outputs_and_errors(rank: int, size: int, folder: Path) -> None:
    a, b = keras.Input((2,), name="a"), keras.Input((1,), name="b", dtype="int32")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(5, 3)(b))
    both = keras.layers.Concatenate()([a, embedded])
    model = keras.Model([a, b], [keras.layers.Dense(1)(both), keras.layers.Dense(5, "softmax")(both)])
    count = 8
    columns = {"a": [[1.0, 2.0]] * count, "b": [n % 5 for n in range(count)], "y": [0.5] * count, "kind": [1] * count}
    job = job_of(
        model, columns, label_cols=("y", "kind"), loss_weights=[0.5, 0.5], passes=2, batch_size=2,
        loss=["mse", "sparse_categorical_crossentropy"], metrics=[["mae"], ["accuracy"]],
    )  # fmt: skip
    path = shard_of(folder, mine(columns, rank, size))
    run, _ = trained(job, path)
    assert run.checkpoint.outputs == [("float32", [1]), ("float32", [5])]
    assert run.checkpoint.history[-1]["loss"] < run.checkpoint.history[0]["loss"]
    try:
        Inputs.of(model, ("a",))
    except ConfigError as error:
        assert "are 1 columns, the model has 2 inputs" in str(error)
    else:
        raise AssertionError("a column too few was taken")
    wide = {"x": [[1.0, 2.0]] * 4, "y": [[1.0, 2.0, 3.0]] * 4}
    try:
        trained(job_of(line(), wide), shard_of(folder, wide))
    except ConfigError as error:
        assert "label 'y' has the shape [3], the model's output [1]" in str(error)
    else:
        raise AssertionError("a label of three numbers was taken for an output of one")
