"""TensorFlow graph as a Spark ML transformer, from a graph, a checkpoint or a SavedModel."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self, cast

from pyspark.ml import Transformer
from pyspark.sql import DataFrame

from farandole.errors import ConfigError, DataError
from farandole.estimators.checked_params import CheckedParams, Parameter, required
from farandole.estimators.checks import Refused, instance_of, type_name
from farandole.estimators.feed import check_columns, is_text
from farandole.estimators.folders import Folder
from farandole.estimators.persistence import Facts, Saved
from farandole.estimators.predictions.tensorflow import GraphPredictor, output_type
from farandole.estimators.trainers.model_fn.frozen_graph import FrozenGraph, GraphFacts, Port, freeze, freeze_signature
from farandole.estimators.transformer import add_columns
from farandole.spark.rows.column_names import check_names, taken_names

if TYPE_CHECKING:
    from tensorflow import Graph, Tensor
    from tensorflow.compat.v1 import GraphDef, MetaGraphDef, Session

_GRAPH = "graph.pb"
_TAG = "serve"


class TFInputGraph:
    """A graph whose variables are constants, with its inputs and outputs by name.

    The names are those of a signature, or else of tensors. The driver needs TensorFlow to create one, not to apply it.
    """

    def __init__(self, frozen: FrozenGraph) -> None:
        self.frozen = frozen

    @classmethod
    def fromGraph(cls, graph: "Graph", sess: "Session", feed_names: Sequence[str], fetch_names: Sequence[str]) -> Self:
        """Take the part of a session's graph between the tensors `feed_names` and `fetch_names`."""
        with graph.as_default():
            return cls(freeze(sess, _tensors(graph, feed_names), _tensors(graph, fetch_names)))

    @classmethod
    def fromGraphDef(cls, graph_def: "GraphDef", feed_names: Sequence[str], fetch_names: Sequence[str]) -> Self:
        """Take a GraphDef without variables."""
        import tensorflow as tf

        with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
            tf.graph_util.import_graph_def(graph_def, name="")
            return cls.fromGraph(graph, session, feed_names, fetch_names)

    @classmethod
    def fromCheckpoint(cls, checkpointDir: str, feed_names: Sequence[str], fetch_names: Sequence[str]) -> Self:
        """Take the last checkpoint of a folder, whose `.meta` file holds the graph."""
        return cls._from_checkpoint(checkpointDir, None, feed_names, fetch_names)

    @classmethod
    def fromCheckpointWithSignature(cls, checkpointDir: str, signature_def_key: str) -> Self:
        """Take the last checkpoint of a folder; the signature in its `.meta` file names inputs and outputs."""
        return cls._from_checkpoint(checkpointDir, signature_def_key, (), ())

    @classmethod
    def fromSavedModel(
        cls, saved_model_dir: str, tag_set: str, feed_names: Sequence[str], fetch_names: Sequence[str]
    ) -> Self:
        """Take a SavedModel; `tag_set` holds tags with commas between them, such as "serve"."""
        return cls._from_saved_model(saved_model_dir, tag_set, None, feed_names, fetch_names)

    @classmethod
    def fromSavedModelWithSignature(
        cls, saved_model_dir: str, tag_set: str = _TAG, signature_def_key: str = "serving_default"
    ) -> Self:
        """Take a SavedModel; its signature names inputs and outputs."""
        return cls._from_saved_model(saved_model_dir, tag_set, signature_def_key, (), ())

    @classmethod
    def _from_checkpoint(cls, folder: str, signature: str | None, feeds: Sequence[str], fetches: Sequence[str]) -> Self:
        import tensorflow as tf

        last = tf.train.latest_checkpoint(folder)
        if last is None:
            raise ConfigError("checkpointDir", f"{folder} holds no checkpoint")
        with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
            meta = tf.io.gfile.GFile(f"{last}.meta", "rb").read()
            definition = tf.compat.v1.MetaGraphDef.FromString(meta)
            saver = tf.compat.v1.train.import_meta_graph(definition, clear_devices=True)
            if saver is not None:
                saver.restore(session, last)
            return cls._chosen(session, definition, signature, feeds, fetches)

    @classmethod
    def _from_saved_model(
        cls, folder: str, tags: str, signature: str | None, feeds: Sequence[str], fetches: Sequence[str]
    ) -> Self:
        import tensorflow as tf

        with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
            definition = tf.compat.v1.saved_model.load(session, tags.split(","), folder)
            return cls._chosen(session, definition, signature, feeds, fetches)

    @classmethod
    def _chosen(
        cls, sess: "Session", meta: "MetaGraphDef", signature: str | None, feeds: Sequence[str], fetches: Sequence[str]
    ) -> Self:
        if signature is not None:
            return cls(freeze_signature(sess, meta, signature))
        return cls(freeze(sess, _tensors(sess.graph, feeds), _tensors(sess.graph, fetches)))


def _names(value: object) -> dict[str, str]:
    pairs = list(value.items()) if isinstance(value, Mapping) else []
    if not pairs or not all(isinstance(text, str) for pair in pairs for text in pair):
        raise Refused(f"must be a dict of names, got {value!r}")
    return dict(pairs)


class TFTransformer(Transformer, CheckedParams, Saved):
    """Applies a graph to a DataFrame's rows: keeps all columns, and adds one for each entry of `outputMapping`.

    `inputMapping` maps columns to tensors or names of the graph's inputs, `outputMapping` tensors or names of its
    outputs to new columns. The first dimension of each tensor counts the rows. The graph gives the types of the new
    columns, without a job.
    """

    tfInputGraph: Parameter[TFInputGraph, TFInputGraph] = Parameter(
        "TFInputGraph to apply", instance_of(TFInputGraph, "a TFInputGraph", named=type_name)
    )
    setTfInputGraph, getTfInputGraph = required(tfInputGraph)

    inputMapping: Parameter[Mapping[str, str], dict[str, str]] = Parameter("column -> input", _names)
    setInputMapping, getInputMapping = required(inputMapping)

    outputMapping: Parameter[Mapping[str, str], dict[str, str]] = Parameter("output -> new column", _names)
    setOutputMapping, getOutputMapping = required(outputMapping)

    def __init__(
        self,
        *,
        tfInputGraph: TFInputGraph | None = None,
        inputMapping: Mapping[str, str] | None = None,
        outputMapping: Mapping[str, str] | None = None,
        tfHParms: object | None = None,
    ) -> None:
        """Set parameters by name; raises `ConfigError` for `tfHParms`, which needs TensorFlow 1's `contrib`."""
        if tfHParms is not None:
            raise ConfigError("tfHParms", "is an HParams of tf.contrib, which TensorFlow 2 does not have; leave it out")
        super().__init__(tfInputGraph=tfInputGraph, inputMapping=inputMapping, outputMapping=outputMapping)

    def _contents(self) -> tuple[dict[str, object], dict[str, bytes]]:
        frozen = self.getTfInputGraph().frozen
        facts = {**frozen.facts(), "mappings": [self.getInputMapping(), self.getOutputMapping()]}
        return facts, {_GRAPH: frozen.graph}

    @classmethod
    def _revived(cls, facts: Facts, folder: Folder) -> Self:
        inputs, outputs = facts["mappings"]
        graph = TFInputGraph(FrozenGraph.revived(folder.read(_GRAPH), cast(GraphFacts, facts)))
        return cls(tfInputGraph=graph, inputMapping=inputs, outputMapping=outputs)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        frozen = self.getTfInputGraph().frozen
        inputs = [(column, _name(frozen.inputs, each)) for column, each in self.getInputMapping().items()]
        outputs = [(_name(frozen.outputs, each), column) for each, column in self.getOutputMapping().items()]
        missing = frozen.inputs.keys() - {name for _, name in inputs}
        if missing:
            raise ConfigError("inputMapping", f"lacks the inputs {', '.join(sorted(missing))}")
        fed = [name for _, name in inputs]
        if twice := sorted({name for name in fed if fed.count(name) > 1}):
            raise ConfigError("inputMapping", f"maps several columns to {', '.join(twice)}; map one to each input")
        columns = [column for column, _ in inputs]
        check_columns(dataset.schema, columns, texts=True)
        for column, name in inputs:
            if is_text(dataset.schema, column) != (frozen.inputs[name].dtype == "string"):
                kind = "texts" if is_text(dataset.schema, column) else "numbers"
                raise DataError(column, f"holds {kind}, and {name} of the graph takes {frozen.inputs[name].dtype}")
        check_names(dataset, columns)
        taken = taken_names(dataset)
        for _, column in outputs:
            if taken(column):
                raise DataError(column, "is in the DataFrame already; choose another name with setOutputMapping")
        fields = [f"o{place}" for place in range(len(outputs))]
        predictor = GraphPredictor(
            names=tuple(fields), frozen=frozen, inputs=inputs, outputs_of_graph=[name for name, _ in outputs]
        )
        types = [output_type(frozen.outputs[name]) for name, _ in outputs]
        return add_columns(dataset, columns, fields, [column for _, column in outputs], types, predictor)


def _name(ports: Mapping[str, Port], given: str) -> str:
    """Return the name of an input or output, given that name or its tensor's, with or without ":0"."""
    for name, port in ports.items():
        if given in (name, port.tensor) or f"{given}:0" == port.tensor:
            return name
    there = ", ".join(f"{name} ({port.tensor})" for name, port in ports.items())
    raise ConfigError("inputMapping or outputMapping", f"the graph has no {given!r}; it has {there}")


def _tensors(graph: "Graph", names: Sequence[str]) -> "dict[str, Tensor]":
    whole = [name if ":" in name else f"{name}:0" for name in names]
    return {name: graph.get_tensor_by_name(name) for name in whole}
