"""Checks of `HorovodEstimator`'s ranks on two processes, with rows from files and without Spark."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import keras
import numpy as np
import pyarrow as pa
import tensorflow as tf

import farandole.tensorflow as hvd
from farandole.errors import ConfigError, DataError, SourceError
from farandole.estimators.predictions.tensorflow import GraphPredictor
from farandole.estimators.store import Store
from farandole.estimators.tensorflow import HorovodEstimator
from farandole.estimators.tf_transformer import TFInputGraph
from farandole.estimators.trainers.keras.model import DumpedModel
from farandole.estimators.trainers.model_fn import loop
from farandole.estimators.trainers.model_fn.frozen_graph import FrozenGraph
from farandole.estimators.trainers.model_fn.intact import choose_intact
from farandole.estimators.trainers.model_fn.job import ModelFnJob, Writers
from farandole.estimators.trainers.model_fn.loop import fit
from farandole.estimators.trainers.rows import HASH, VALIDATES, RowsWanted, fed_as
from farandole.tensorflow.estimator import EstimatorSpec, ModeKeys, export

v1 = tf.compat.v1

RATE, CLASSES, WIDTH = 0.1, 3, 4


def rows_of(count: int) -> dict[str, Any]:
    """Return points around three centres, and the number of each point's centre."""
    random = np.random.default_rng(5)
    kind = np.arange(count) % CLASSES
    x = random.normal(size=(count, WIDTH)) + np.eye(CLASSES, WIDTH)[kind] * 2
    return {"x": x.astype(np.float32), "kind": kind.astype(np.int64), "held": np.isin(np.arange(count) % 8, (3, 4))}


def start(rank: int) -> Any:
    """Return the initial weights of a rank; training starts with those of rank 0."""
    return np.random.default_rng(rank).normal(size=(WIDTH, CLASSES)).astype(np.float32)


def logits_of(x: Any) -> Any:
    with v1.variable_scope("line", reuse=v1.AUTO_REUSE):
        kernel = v1.get_variable("kernel", [WIDTH, CLASSES], initializer=v1.constant_initializer(start(hvd.rank())))
        bias = v1.get_variable("bias", [CLASSES], initializer=v1.zeros_initializer())
    return tf.matmul(tf.reshape(x, [-1, WIDTH]), kernel) + bias


def classify(features: Any, labels: Any, mode: str, params: Any, config: Any) -> EstimatorSpec:
    """Return the specification of a model, as in a notebook of HorovodEstimator; the `model_fn` of the checks."""
    assert config.num_worker_replicas == hvd.size()
    logits = logits_of(features["points"])
    predictions = {"probabilities": tf.nn.softmax(logits), "classes": tf.argmax(logits, 1)}
    serving = v1.saved_model.signature_constants.DEFAULT_SERVING_SIGNATURE_DEF_KEY
    if mode == ModeKeys.PREDICT:
        outputs = {serving: export.PredictOutput(predictions), "classes": export.PredictOutput(predictions["classes"])}
        return EstimatorSpec(mode, predictions=predictions, export_outputs=outputs)
    loss = v1.losses.sparse_softmax_cross_entropy(labels, logits)
    metrics = {
        "accuracy": v1.metrics.accuracy(labels, predictions["classes"]),
        "of_first": v1.metrics.recall(tf.equal(labels, 0), tf.equal(predictions["classes"], 0)),
    }
    if mode == ModeKeys.EVAL:
        return EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    v1.summary.scalar("length", tf.norm(logits))
    optimizer = v1.train.MomentumOptimizer(params["rate"], 0.9)
    if params.get("distributed", True):
        optimizer = hvd.DistributedOptimizer(optimizer)
    train_op = optimizer.minimize(loss, global_step=v1.train.get_global_step() if params.get("counts", True) else None)
    hooks = [each() for each in params.get("hooks", ())]
    return EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=hooks)


def job_of(folder: Path, **changes: Any) -> ModelFnJob:
    rows = RowsWanted(
        columns=("x", "kind"), validation=None, validation_col=changes.pop("validation_col", "held"),
        batch_size=changes.pop("batch_size", 4), val_batch_size=4, shuffle=True,
    )  # fmt: skip
    settings: dict[str, Any] = {
        "model_fn": classify, "params": {"rate": RATE}, "features": {"x": "points"}, "label_col": "kind", "rows": rows,
        "store": Store.create(str(folder)), "model_dir": str(folder), "max_steps": 6, "save_secs": 600.0, "seed": 1,
        "verbose": 0,
    }  # fmt: skip
    return ModelFnJob(**(settings | changes))


def shard_of(folder: Path, table: dict[str, Any], rank: int, size: int) -> Path:
    """Write every `size`-th row to a file like those that are fed to a rank; return its path."""
    mine = {name: values[rank::size] for name, values in table.items()}
    arrays = {
        fed_as(0): pa.array(list(mine["x"]), pa.list_(pa.float32())),
        fed_as(1): pa.array(mine["kind"]),
        HASH: pa.array(np.arange(len(mine["kind"])), pa.int64()),
        VALIDATES: pa.array(mine["held"].astype(np.int8)),
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"rows-{rank}.arrow"
    written = pa.table(arrays)
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, written.schema) as stream:
        stream.write_table(written)
    return path


def variables(folder: Path) -> dict[str, Any]:
    """Read the variables of the last checkpoint with plain TensorFlow."""
    reader = tf.train.load_checkpoint(str(folder))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read the curves of a folder's event files."""
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.glob("events.*")):
        for event in v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def fails(job: ModelFnJob, path: Path, kind: type[Exception], text: str) -> None:
    try:
        fit(job, path)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no error about {text}")


def check_steps_are_those_of_one_process(rank: int, size: int, folder: Path) -> None:
    # Of 24 rows, 6 validate. A step takes all 18 others, so their order does not matter.
    table = rows_of(24)
    path, model = shard_of(folder, table, rank, size), folder / "model"
    frozen = fit(job_of(model, batch_size=18 // size, max_steps=5), path)
    assert (frozen is None) == (rank != 0)
    if frozen is None:
        return
    got = variables(model)
    train, held = ~table["held"], table["held"]
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        x, kind = v1.placeholder(tf.float32, [None, WIDTH]), v1.placeholder(tf.int64, [None])
        logits = logits_of(x)
        loss = v1.losses.sparse_softmax_cross_entropy(kind, logits)
        step = v1.train.MomentumOptimizer(RATE, 0.9).minimize(loss)
        session.run(v1.global_variables_initializer())
        for _ in range(5):
            last = session.run([loss, step], {x: table["x"][train], kind: table["kind"][train]})[0]
        want = {
            each.op.name: value
            for each, value in zip(v1.global_variables(), session.run(v1.global_variables()), strict=True)
        }
        probabilities = session.run(tf.nn.softmax(logits), {x: table["x"][held]})
        held_loss = session.run(loss, {x: table["x"][held], kind: table["kind"][held]})
    assert got.pop("global_step") == 5
    assert sorted(got) == sorted(want), "momentum too"
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-6)
    classes, kinds = probabilities.argmax(1), table["kind"][held]
    evaluated = {name: points[-1] for name, points in events(model / "eval").items()}
    of_first = (classes[kinds == 0] == 0).mean()
    for name, value in {"accuracy": (classes == kinds).mean(), "of_first": of_first, "loss": held_loss}.items():
        assert evaluated[name][0] == 5
        np.testing.assert_allclose(evaluated[name][1], value, rtol=1e-4)
    curves = events(model)
    assert curves["loss"][-1][0] == 5 and "length" in curves
    np.testing.assert_allclose(curves["loss"][-1][1], last, rtol=1e-4)
    compare_exported(model, frozen, table["x"][held], probabilities)


def compare_exported(model: Path, frozen: FrozenGraph, x: Any, probabilities: Any) -> None:
    """Compare predictions of the SavedModel, the checkpoint's graph and the frozen graph with those of one process."""
    loaded = tf.saved_model.load(str(model / "export" / "5"))
    served = loaded.signatures["serving_default"](points=tf.constant(x))
    np.testing.assert_allclose(served["probabilities"], probabilities, rtol=1e-4)
    assert sorted(loaded.signatures) == ["classes", "serving_default"]
    assert sorted(each.name for each in (model / "export").iterdir()) == ["5"]
    graphs = {
        "rank 0's": TFInputGraph(frozen),
        "checkpoint's": TFInputGraph.fromCheckpointWithSignature(str(model), "serving_default"),
        "SavedModel's": TFInputGraph.fromSavedModelWithSignature(str(model / "export" / "5")),
    }
    for graph in graphs.values():
        ports = graph.frozen.outputs
        assert (ports["classes"].dtype, ports["classes"].shape) == ("int64", ())
        predictor = GraphPredictor(
            names=("o0", "o1"), frozen=graph.frozen, inputs=[("x", "points")],
            outputs_of_graph=["classes", "probabilities"],
        )  # fmt: skip
        classes, given = (np.asarray(each, float) for each in predictor.load()([x]))
        np.testing.assert_array_equal(classes, probabilities.argmax(1))
        np.testing.assert_allclose(given, probabilities, rtol=1e-4)
    named = TFInputGraph.fromSavedModel(str(model / "export" / "5"), "serve", ["points"], ["ArgMax:0"])
    assert list(named.frozen.inputs) == ["points:0"]
    with tf.Graph().as_default() as graph, v1.Session(graph=graph) as session:
        v1.saved_model.load(session, [v1.saved_model.SERVING], str(model / "export" / "5"))
        again = TFInputGraph.fromGraph(graph, session, ["points"], ["Softmax"])
    definition = v1.GraphDef.FromString(again.frozen.graph)
    meta = v1.MetaGraphDef.FromString((model / "model.ckpt-5.meta").read_bytes())
    strange = [node.op for node in meta.graph_def.node if node.op.startswith("Farandole")]
    assert not strange, "plain TensorFlow does not know these"
    assert TFInputGraph.fromGraphDef(definition, ["points"], ["Softmax"]).frozen.outputs == again.frozen.outputs


def check_resumed_runs_are_the_uninterrupted_one(rank: int, size: int, folder: Path) -> None:
    path = shard_of(folder, rows_of(27), rank, size)
    straight, resumed = folder / "straight", folder / "resumed"
    fit(job_of(straight, max_steps=9), path)
    for steps in (4, 9, 9, 7):  # the last two runs have nothing left to do
        before = variables(resumed) if rank == 0 and steps != 4 else {}
        frozen = fit(job_of(resumed, max_steps=steps), path)
        assert (frozen is not None) == (rank == 0)
    if rank == 0:
        want, got = variables(straight), variables(resumed)
        assert sorted(got) == sorted(want) == sorted(before) and got["global_step"] == 9
        for name, value in want.items():
            np.testing.assert_array_equal(got[name], value)
            np.testing.assert_array_equal(before[name], value)
        assert [step for step, _ in events(resumed / "eval")["accuracy"]] == [4, 9]
        state = tf.train.get_checkpoint_state(str(resumed))
        assert [Path(each).name for each in state.all_model_checkpoint_paths] == ["model.ckpt-4", "model.ckpt-9"]


def check_checkpoints_in_time_and_an_object_store(rank: int, size: int, folder: Path) -> None:
    path = shard_of(folder, rows_of(24), rank, size)
    memory = {"store": Store.create("memory://models/one"), "save_secs": 1e-9}  # of rank 0's process
    fit(job_of(folder, max_steps=7, **memory), path)
    frozen = fit(job_of(folder, max_steps=8, **memory), path)
    if rank == 0:
        assert frozen is not None
        files = fsspec.filesystem("memory")
        names = {each.removeprefix("/models/one/") for each in files.find("/models/one")}
        steps = sorted(int(name[11:-6]) for name in names if name.startswith("model.ckpt-") and name.endswith(".index"))
        assert steps == [4, 5, 6, 7, 8], "the last five, of two runs"
        assert {"checkpoint", "export/7/saved_model.pb", "export/8/saved_model.pb"} <= names
        files.get("/models/one/eval/", str(folder / "eval"), recursive=True)
        assert [step for step, _ in events(folder / "eval")["loss"]] == [*range(1, 9)]


def check_a_run_continues_after_its_newest_intact_checkpoint(rank: int, size: int, folder: Path) -> None:
    path, model = shard_of(folder, rows_of(27), rank, size), folder / "model"
    for steps in (2, 3):
        fit(job_of(model, max_steps=steps), path)
    want = variables(model) if rank == 0 else {}
    if rank == 0:
        damage(model / "model.ckpt-3.data-00000-of-00001")
    fit(job_of(model, max_steps=3), path)
    if rank == 0:
        for name, value in variables(model).items():
            np.testing.assert_array_equal(want[name], value)
        (model / "checkpoint").write_text("model_checkpoint_path: {")
    fit(job_of(model, max_steps=3), path)
    if rank == 0:
        assert variables(model)["global_step"] == 3, "it has not begun anew"
        told: list[str] = []
        (model / "model.ckpt-3.index").unlink()
        choose_intact(model, "there", told.append)
        assert told[0].startswith("there: model.ckpt-3 is damaged (") and told[0].endswith("after model.ckpt-2")
        assert tf.train.latest_checkpoint(str(model)) == str(model / "model.ckpt-2")
        damage(model / "model.ckpt-2.data-00000-of-00001")
        try:
            choose_intact(model, "there", told.append)
        except SourceError as error:
            assert "there is no intact checkpoint: remove the folder to start the run" in str(error)
        else:
            raise AssertionError("a run without an intact checkpoint begins anew")


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


class Stopping(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]  # TensorFlow ships no types
    """Hook that requests a stop in its third step, on the last rank."""

    ended = 0

    def __init__(self) -> None:
        self.steps = 0

    def after_run(self, context: Any, values: Any) -> None:
        self.steps += 1
        if self.steps == 3 and hvd.rank() == hvd.size() - 1:
            context.request_stop()

    def end(self, session: Any) -> None:
        Stopping.ended += 1


def check_hooks_stop_all_ranks(rank: int, size: int, folder: Path) -> None:
    path = shard_of(folder, rows_of(24), rank, size)
    fit(job_of(folder / "model", max_steps=50, params={"rate": RATE, "hooks": [Stopping]}), path)
    assert Stopping.ended == 1
    if rank == 0:
        assert variables(folder / "model")["global_step"] == 3


def check_keras_models(rank: int, size: int, folder: Path) -> None:
    table = rows_of(24)
    path = shard_of(folder, table, rank, size)

    def made(params: Any) -> keras.Model:
        points = keras.Input([WIDTH], name="points")
        model = keras.Model(points, keras.layers.Dense(CLASSES, kernel_initializer="zeros")(points))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(params["rate"], momentum=0.9), loss, metrics=["accuracy"])
        return model

    def given(features: Any, labels: Any, mode: str, params: Any) -> keras.Model:
        return made(params)

    model = made({"rate": RATE})
    steps = {"batch_size": 18 // size}
    ways = {"function": (made, (2, 5, 5)), "model_fn": (given, (5,)), "model": (DumpedModel.of(model), (5,))}
    for name, (model_fn, fits) in ways.items():
        for most in fits:
            frozen = fit(job_of(folder / name, model_fn=model_fn, max_steps=most, **steps), path)
    if rank != 0:
        return
    assert frozen is not None
    train, held = ~table["held"], table["held"]
    for _ in range(5):
        model.train_on_batch(table["x"][train], table["kind"][train])
    logits = model.predict_on_batch(table["x"][held])
    accuracy = (logits.argmax(1) == table["kind"][held]).mean()
    for name, (_, fits) in ways.items():
        evaluated = events(folder / name / "eval")
        assert [step for step, _ in evaluated["accuracy"]] == sorted(set(fits))
        np.testing.assert_allclose(evaluated["accuracy"][-1][1], accuracy)
        served = tf.saved_model.load(str(folder / name / "export" / "5")).signatures["serving_default"]
        answers = served(points=tf.constant(table["x"][held]))["predictions"]
        np.testing.assert_allclose(answers, logits, rtol=1e-3, atol=1e-5)
        assert variables(folder / name)["global_step/.ATTRIBUTES/VARIABLE_VALUE"] == 5
    predictor = GraphPredictor(
        names=("o0",), frozen=frozen, inputs=[("x", "points")], outputs_of_graph=["predictions"]
    )  # fmt: skip
    assert frozen.outputs["predictions"].shape == (CLASSES,)
    np.testing.assert_allclose(np.asarray(predictor.load()([table["x"][held]])[0], float), logits, rtol=1e-3, atol=1e-5)


def check_mistakes_are_named(rank: int, size: int, folder: Path) -> None:
    path = shard_of(folder, rows_of(24), rank, size)

    def apart(**params: Any) -> ModelFnJob:
        return job_of(folder / "model", params={"rate": RATE, **params})

    if size > 1:
        fails(apart(distributed=False), path, ConfigError, "wrap its optimizer in hvd.DistributedOptimizer")
    fails(apart(counts=False), path, ConfigError, "train_op does not count steps")
    nan = rows_of(24)
    nan["x"][0, 0] = np.nan
    logged: list[str] = []
    with mock.patch.object(loop, "log_to_driver", logged.append):
        fit(job_of(folder / "nan", features={"x": "points"}, max_steps=6), shard_of(folder / "nan", nan, rank, size))
    if rank == 0:
        assert logged[0] == "warning: column 'x': 1 of 24 rows hold NaN; fill them or drop these rows first"
        assert logged[1].startswith("the loss is nan in step ") and len(logged) == 2
    nothing = replace(apart(), model_fn=lambda features, labels, mode: 5)
    fails(nothing, path, ConfigError, "must return a farandole.tensorflow.estimator.EstimatorSpec, got int")
    anything = replace(apart(), model_fn=lambda **given: sorted(given))
    fails(anything, path, ConfigError, "EstimatorSpec, got list")
    strange = replace(apart(), model_fn=lambda features, targets: None)
    fails(strange, path, ConfigError, "has the arguments targets; it is given features, labels, mode")
    few = {name: values[: size + 1] for name, values in rows_of(24).items()}
    few["held"] = np.arange(size + 1) > 0
    few_path = shard_of(folder / "few", few, rank, size)
    if size > 1:
        fails(apart(), few_path, DataError, "1 rows to train on leave rank 1 of 2 none; use fewer ranks")


def check_specs(rank: int, size: int, folder: Path) -> None:
    with tf.Graph().as_default():
        one, rows = tf.constant(1.0), tf.constant([1.0, 2.0])
        several = {"a": export.ClassificationOutput(scores=rows), "b": export.RegressionOutput(rows)}
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("mode must be one of 'train', 'eval', 'infer', got 'test'", {"mode": "test"}),
            ("mode 'train' needs loss and train_op", {"mode": ModeKeys.TRAIN}),
            ("mode 'eval' needs loss", {"mode": ModeKeys.EVAL}),
            ("mode 'infer' needs predictions", {"mode": ModeKeys.PREDICT}),
            ("loss must be one number", {"mode": ModeKeys.EVAL, "loss": rows}),
            ("must be a pair (value, update)", {"mode": ModeKeys.EVAL, "loss": one, "eval_metric_ops": {"x": one}}),
            ("hooks must be of", {"mode": ModeKeys.EVAL, "loss": one, "evaluation_hooks": [3]}),
            ("must be a PredictOutput", {"mode": ModeKeys.PREDICT, "predictions": rows, "export_outputs": {"x": rows}}),
        ]
        for text, given in wrong:
            try:
                EstimatorSpec(**given)
            except ValueError as error:
                assert text in str(error), error
            else:
                raise AssertionError(f"no error about {text}")
        alone = EstimatorSpec(ModeKeys.PREDICT, {"y": rows})
        assert list(alone.export_outputs["serving_default"].outputs) == ["y"]
        assert alone._replace(loss=one).loss is one
        first = EstimatorSpec(ModeKeys.PREDICT, rows, export_outputs={"a": several["a"]}).export_outputs
        assert first["serving_default"] is first["a"] and list(first["a"].outputs) == ["scores"]
        assert sorted(EstimatorSpec(ModeKeys.PREDICT, rows, export_outputs=several).export_outputs) == ["a", "b"]


def check_writers_of_one_second_keep_their_files(rank: int, size: int, folder: Path) -> None:
    own = folder / str(rank)
    for step in (1, 2, 3):
        writers = Writers(own)
        writers.add("eval", {"loss": 0.5}, step)
        writers.close()
    assert events(own / "eval") == {"loss": [(1, 0.5), (2, 0.5), (3, 0.5)]}


def check_an_estimator_with_a_keras_model_is_kept(rank: int, size: int, folder: Path) -> None:
    model = keras.Sequential([keras.Input([WIDTH]), keras.layers.Dense(CLASSES)])
    model.compile(keras.optimizers.SGD(0.125, momentum=0.5), "mse", metrics=["mae"])
    facts, files = HorovodEstimator(modelFn=model, featureMapping={"x": "points"})._contents()
    kept = mock.Mock(read=files.__getitem__)
    again = HorovodEstimator._revived(facts, kept)
    assert again.getFeatureMapping() == {"x": "points"}
    loaded: Any = again.getModelFn()
    assert (float(loaded.optimizer.learning_rate), loaded.optimizer.momentum, loaded.loss) == (0.125, 0.5, "mse")
    for one, other in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)

    def plain(features: Any, **others: Any) -> Any:
        return features

    facts, files = HorovodEstimator(modelFn=plain)._contents()
    assert HorovodEstimator._revived(facts, mock.Mock(read=files.__getitem__)).getModelFn()(3) == 3
