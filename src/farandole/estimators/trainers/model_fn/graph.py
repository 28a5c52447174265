"""Model functions in graphs of TensorFlow 1: training, evaluation and export, each in a graph of its own."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

import farandole.tensorflow as hvd
from farandole.core.operations.objects import allgather_object
from farandole.data import Number
from farandole.errors import ConfigError
from farandole.estimators.trainers.keras.model import DumpedModel
from farandole.estimators.trainers.model_fn.frozen_graph import FrozenGraph, freeze
from farandole.estimators.trainers.model_fn.job import Batch, Batches, ModelFnJob, Program, Table
from farandole.tensorflow.estimator import EstimatorSpec, ModeKeys, RunConfig
from farandole.tensorflow.estimator.spec import SERVING

if TYPE_CHECKING:
    from tensorflow.core.framework.function_pb2 import FunctionDef

v1 = tf.compat.v1


class GraphProgram(Program):
    """A model function that returns an `EstimatorSpec`.

    All ranks start with rank 0's variables. Evaluation and export use the variables of the last checkpoint.
    """

    def __init__(self, job: ModelFnJob, table: Table, folder: Path | None, training: "Built") -> None:
        """Start a session of the graph `training` from the last checkpoint in `folder`, which only rank 0 has."""
        super().__init__(folder)
        self._job, self._table = job, table
        last = None if folder is None else tf.train.latest_checkpoint(str(folder))
        # Built before the training, so that a function that cannot be exported fails now and not after hours.
        self._predict = None if folder is None else Built(job, table, ModeKeys.PREDICT)
        self._graph, self._inputs, self._labels = training.graph, training.features, training.labels
        _require_exchange(training)
        spec = training.spec
        with training.graph.as_default():
            step = v1.train.get_global_step()
            with tf.control_dependencies([spec.train_op]):
                after = step.read_value()
            self._fetches = {"loss": spec.loss, "step": after}
            self._scaffold = spec.scaffold or v1.train.Scaffold(saver=_saver(training.config))
            hooks = [hvd.BroadcastGlobalVariablesHook(0), *spec.training_hooks]
            if folder is not None:
                writer, every = self._writers.of(""), training.config.save_summary_steps
                hooks += spec.training_chief_hooks
                hooks.append(v1.train.SummarySaverHook(every, summary_writer=writer, scaffold=self._scaffold))
                hooks.append(v1.train.StepCounterHook(every, summary_writer=writer))
            self._session = v1.train.SingularMonitoredSession(
                hooks=hooks, scaffold=self._scaffold, config=_session_config(), checkpoint_filename_with_path=last
            )
            self._step = int(self._raw.run(step))
        if folder is not None and (state := tf.train.get_checkpoint_state(str(folder))) is not None:
            self._scaffold.saver.recover_last_checkpoints(state.all_model_checkpoint_paths)

    @property
    def step(self) -> int:
        """Steps that are finished."""
        return self._step

    @property
    def stops(self) -> bool:
        """Return True once a hook has requested the end of the training."""
        return bool(self._session.should_stop())

    def train(self, batch: Batch) -> float:
        """Take one step; raises `ConfigError` if `train_op` does not increase the global step."""
        before = self._step
        with self._graph.as_default():  # the user's hooks need it, too
            got = self._session.run(self._fetches, self._fed(self._inputs, self._labels, batch))
        self._step = int(got["step"])
        if self._step <= before:
            raise ConfigError(
                "modelFn", "train_op does not count steps; give global_step=tf.train.get_global_step() to minimize()"
            )
        return float(got["loss"])

    def save(self, folder: Path) -> None:
        """Write the variables and, as `.meta` file, the graph of the predictions, which plain TensorFlow can import."""
        assert self._predict is not None
        saver, path = self._scaffold.saver, str(folder / "model.ckpt")
        with self._graph.as_default():  # outside of a graph the saver expects eager execution
            written = saver.save(self._raw, path, global_step=self._step, write_meta_graph=False)
        predict = self._predict
        with predict.graph.as_default():
            meta = v1.train.export_meta_graph(
                graph=predict.graph, saver_def=predict.saver.as_saver_def(), clear_devices=True
            )
        for name, signature in predict.signatures.items():
            meta.signature_def[name].CopyFrom(signature)
        Path(f"{written}.meta").write_bytes(meta.SerializeToString())

    def evaluate(self, folder: Path | None, batches: Batches) -> dict[str, object]:
        """Evaluate in a new graph. Metric variables are sums over rows, so summing them over ranks is exact."""
        built = Built(self._job, self._table, ModeKeys.EVAL)
        spec, losses, rows = built.spec, 0.0, 0
        with built.graph.as_default():
            local = v1.get_collection(v1.GraphKeys.METRIC_VARIABLES)
            _require_sums(local)
            values = {name: pair[0] for name, pair in spec.eval_metric_ops.items()}
            updates = [pair[1] for pair in spec.eval_metric_ops.values()]
            fed = [v1.placeholder(each.dtype.base_dtype, each.shape) for each in local]
            load = [v1.assign(each, value) for each, value in zip(local, fed, strict=True)]
            scaffold = spec.scaffold or v1.train.Scaffold(saver=_saver(built.config))
            session = v1.train.SingularMonitoredSession(
                hooks=[hvd.BroadcastGlobalVariablesHook(0), *spec.evaluation_hooks],
                scaffold=scaffold,
                config=_session_config(),
                checkpoint_filename_with_path=None if folder is None else tf.train.latest_checkpoint(str(folder)),
            )
            with session:
                for batch in batches:
                    got = session.run([spec.loss, *updates], self._fed(built.features, built.labels, batch))
                    losses, rows = losses + float(got[0]) * len(batch[1]), rows + len(batch[1])
                raw = session.raw_session()
                each_rank = allgather_object((losses, rows, raw.run(local)))
                sums = [np.sum(values, axis=0) for values in zip(*(each[2] for each in each_rank), strict=True)]
                raw.run(load, dict(zip(fed, sums, strict=True)))
                metrics: dict[str, object] = raw.run(values)
        total = sum(each[1] for each in each_rank)
        return {"loss": sum(each[0] for each in each_rank) / total, **metrics}

    def export(self, folder: Path, to: Path) -> FrozenGraph:
        """Write the SavedModel; return the graph of the serving signature without variables."""
        predict = self._predict
        assert predict is not None
        with predict.graph.as_default(), v1.Session(graph=predict.graph, config=_session_config()) as session:
            if predict.variables:
                predict.saver.restore(session, tf.train.latest_checkpoint(str(folder)))
            session.run([predict.start, *([] if predict.variables else [v1.global_variables_initializer()])])
            builder = v1.saved_model.Builder(str(to))
            builder.add_meta_graph_and_variables(
                session,
                [v1.saved_model.SERVING],
                signature_def_map=predict.signatures,
                assets_collection=v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS),
                main_op=predict.start,
                clear_devices=True,
                saver=predict.saver,
            )
            builder.save()
            return freeze(session, predict.features, predict.spec.export_outputs[SERVING].outputs)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            with self._graph.as_default():
                self._session.__exit__(kind, error, at)
        finally:
            super().__exit__(kind, error, at)

    @property
    def _raw(self) -> tf.compat.v1.Session:
        return self._session.raw_session()

    def _fed(
        self, features: Mapping[str, tf.Tensor], labels: tf.Tensor, batch: Batch
    ) -> dict[tf.Tensor, NDArray[Number]]:
        return {**{features[name]: values for name, values in batch[0].items()}, labels: batch[1]}


class Built:
    """The graph of one mode, with placeholders for the columns, and the model function's result in it."""

    def __init__(self, job: ModelFnJob, table: Table, mode: str, seed: int | None = None) -> None:
        self.mode, self.graph = mode, tf.Graph()
        self.config = config_of(job)
        assert not isinstance(job.model_fn, DumpedModel)
        with self.graph.as_default():
            v1.set_random_seed(job.seed if seed is None else seed)
            v1.train.get_or_create_global_step()
            self.features = {name: _placeholder(name, *kind) for name, kind in table.features.items()}
            self.labels = None if mode == ModeKeys.PREDICT else _placeholder("label", *table.label)
            self.given = call(job.model_fn, dict(self.features), self.labels, mode, dict(job.params), self.config)
            if mode == ModeKeys.PREDICT:
                self._prepare_export()

    @property
    def spec(self) -> EstimatorSpec:
        """The model function's result; raises `ConfigError` unless it is an `EstimatorSpec` of this mode."""
        if not isinstance(self.given, EstimatorSpec):
            raise ConfigError(
                "modelFn",
                f"must return a farandole.tensorflow.estimator.EstimatorSpec, got {type(self.given).__name__}",
            )
        if self.given.mode != self.mode:
            problem = f"was called with mode={self.mode!r}, and returned a spec of {self.given.mode!r}"
            raise ConfigError("modelFn", problem)
        return self.given

    def _prepare_export(self) -> None:
        if SERVING not in self.spec.export_outputs:
            names = ", ".join(map(repr, self.spec.export_outputs))
            raise ConfigError("modelFn", f"export_outputs need the key {SERVING!r}; there are {names}")
        self.variables = v1.global_variables()
        self.saver = v1.train.Saver(sharded=False, allow_empty=True, save_relative_paths=True)
        self.start = tf.group(v1.local_variables_initializer(), v1.tables_initializer())
        self.signatures = {
            name: v1.saved_model.predict_signature_def(self.features, each.outputs)
            for name, each in self.spec.export_outputs.items()
        }


def config_of(job: ModelFnJob) -> RunConfig:
    """Return the `config` of a model function."""
    return RunConfig(
        model_dir=job.model_dir,
        save_checkpoints_secs=job.save_secs,
        tf_random_seed=job.seed,
        global_id_in_cluster=hvd.rank(),
        num_worker_replicas=hvd.size(),
    )


def call(
    model_fn: Callable[..., object],
    features: Mapping[str, object],
    labels: object,
    mode: str,
    params: dict[str, object],
    config: RunConfig,
) -> object:
    """Call a model function with the arguments that it takes; raises `ConfigError` if it needs others."""
    given = {"features": features, "labels": labels, "mode": mode, "params": params, "config": config}
    taken = inspect.signature(model_fn).parameters
    if any(each.kind == each.VAR_KEYWORD for each in taken.values()):
        return model_fn(**given)
    unknown = [name for name, each in taken.items() if name not in given and each.default is each.empty]
    if unknown:
        raise ConfigError("modelFn", f"has the arguments {', '.join(unknown)}; it is given {', '.join(given)}")
    return model_fn(**{name: value for name, value in given.items() if name in taken})


def _placeholder(name: str, dtype: str, width: int | None) -> tf.Tensor:
    known = re.fullmatch(r"[A-Za-z0-9.][A-Za-z0-9_.\\/-]*", name)  # TensorFlow refuses other names
    return v1.placeholder(dtype, [None] if width is None else [None, width], name=name if known else None)


def _saver(config: RunConfig) -> tf.compat.v1.train.Saver:
    return v1.train.Saver(
        max_to_keep=config.keep_checkpoint_max, sharded=False, allow_empty=True, save_relative_paths=True
    )


def _session_config() -> tf.compat.v1.ConfigProto:
    config = v1.ConfigProto()
    config.gpu_options.allow_growth = True
    return config


def _require_exchange(training: Built) -> None:
    """Raise `ConfigError` for a graph that does not exchange gradients: its ranks would train separately, unnoticed."""
    variables = training.graph.get_collection(v1.GraphKeys.TRAINABLE_VARIABLES)
    nodes = training.graph.as_graph_def()
    kinds = {node.op for part in (nodes, *nodes.library.function) for node in _nodes_of(part)}
    exchanges = {kind for kind in kinds if kind.startswith("Farandole")} - {"FarandoleBroadcast", "FarandolePlace"}
    if hvd.size() > 1 and variables and not exchanges:
        raise ConfigError(
            "modelFn", "exchanges no gradients between ranks; wrap its optimizer in hvd.DistributedOptimizer"
        )


def _nodes_of(part: "tf.compat.v1.GraphDef | FunctionDef") -> "Iterable[tf.compat.v1.NodeDef]":
    nodes: Iterable[tf.compat.v1.NodeDef] = part.node if hasattr(part, "node") else part.node_def
    return nodes


def _require_sums(variables: list[tf.Variable]) -> None:
    means = [each.op.name for each in variables if each.op.name.rpartition("/")[2].startswith("comoment")]
    if means:
        raise ConfigError(
            "modelFn",
            f"has a metric whose variable {means[0]} is no sum over rows, so ranks cannot add it; use another",
        )
