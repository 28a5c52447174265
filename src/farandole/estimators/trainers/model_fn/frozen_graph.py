"""TensorFlow graph without variables: the form in which a trained model function is sent, saved and applied."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, NotRequired, TypedDict

from farandole.errors import ConfigError

if TYPE_CHECKING:
    import tensorflow as tf
    from tensorflow.compat.v1 import GraphDef, MetaGraphDef, Session, TensorShapeProto

_WRITABLE_TABLES = frozenset({"HashTableV2", "MutableHashTableV2", "MutableHashTableOfTensorsV2"})


class Port(NamedTuple):
    """An input or output tensor of a graph; JSON holds it as a list."""

    tensor: str  # such as "dense/BiasAdd:0"
    dtype: str  # as NumPy names it, or "string"
    shape: tuple[int, ...] | None  # of one row; None if the graph does not know it

    @property
    def is_scalar(self) -> bool:
        """Return True if a row has exactly one value."""
        return self.shape is not None and math.prod(self.shape) == 1


class GraphFacts(TypedDict):
    """What JSON holds of a `FrozenGraph`."""

    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]
    fills: NotRequired[Sequence[str]]  # graphs of earlier versions have none


@dataclass(frozen=True, kw_only=True)
class FrozenGraph:
    """A serialized GraphDef whose variables are constants, with its input and output tensors."""

    graph: bytes
    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]
    fills: tuple[str, ...] = ()  # operations that fill the graph's lookup tables; they run once

    def facts(self) -> GraphFacts:
        """Return everything but the graph, as values that JSON can hold."""
        return {"inputs": self.inputs, "outputs": self.outputs, "fills": self.fills}

    @classmethod
    def revived(cls, graph: bytes, facts: GraphFacts) -> "FrozenGraph":
        """Return the graph with the facts that `facts` returned, or that JSON has made of them."""

        def ports(given: Mapping[str, Port]) -> dict[str, Port]:
            listed = given.items()  # with a list in place of each tuple
            return {name: Port(*each[:2], None if each[2] is None else tuple(each[2])) for name, each in listed}

        inputs, outputs = ports(facts["inputs"]), ports(facts["outputs"])
        return cls(graph=graph, inputs=inputs, outputs=outputs, fills=tuple(facts.get("fills", ())))


def freeze(session: "Session", inputs: "Mapping[str, tf.Tensor]", outputs: "Mapping[str, tf.Tensor]") -> FrozenGraph:
    """Return the part of a session's graph between tensors, with the values of variables and tables as constants.

    Leaves out inputs that no output depends on. Raises `ConfigError` for tables that are not initialized, or of a kind
    that cannot be exported."""
    import tensorflow as tf

    definition = tf.compat.v1.graph_util.convert_variables_to_constants(
        session, session.graph.as_graph_def(add_shapes=True), [each.op.name for each in outputs.values()]
    )
    definition, fills = _with_tables(session, definition)
    kept = {node.name for node in definition.node}
    return FrozenGraph(
        graph=definition.SerializeToString(deterministic=True),
        inputs={name: port_of(each) for name, each in inputs.items() if each.op.name in kept},
        outputs={name: port_of(each) for name, each in outputs.items()},
        fills=fills,
    )


def _with_tables(session: "Session", definition: "GraphDef") -> "tuple[GraphDef, tuple[str, ...]]":
    """Add the content of a session's lookup tables to a GraphDef; return it and the operations that fill them."""
    import tensorflow as tf

    names = [node.name for node in definition.node if "HashTable" in node.op]
    if not names:
        return definition, ()
    contents = []
    for name in names:
        node = session.graph.get_operation_by_name(name)
        if node.type not in _WRITABLE_TABLES:
            raise ConfigError("graph", f"holds the lookup table {name} of the kind {node.type}, which is not supported")
        types = {"Tkeys": node.get_attr("key_dtype"), "Tvalues": node.get_attr("value_dtype")}
        with session.graph.as_default():
            content = tf.raw_ops.LookupTableExportV2(table_handle=node.outputs[0], **types)
        try:
            contents.append((types, session.run(content)))
        except (tf.errors.AbortedError, tf.errors.FailedPreconditionError) as error:
            remedy = "run tf.compat.v1.tables_initializer() in its session"
            raise ConfigError("graph", f"holds the lookup table {name}, which is not filled; {remedy}") from error
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(definition, name="")
        fills = []
        for name, (types, (keys, values)) in zip(names, contents, strict=True):
            rows = tf.constant(keys, types["Tkeys"]), tf.constant(values, types["Tvalues"])
            handle = graph.get_operation_by_name(name).outputs[0]
            fills.append(tf.raw_ops.LookupTableImportV2(table_handle=handle, keys=rows[0], values=rows[1]).name)
        return graph.as_graph_def(add_shapes=True), tuple(fills)


def freeze_signature(session: "Session", meta: "MetaGraphDef", name: str) -> FrozenGraph:
    """Return the graph of the signature `name` of a MetaGraphDef, whose variables the session holds.

    Raises `ConfigError` if there is no such signature."""
    if name not in meta.signature_def:
        there = ", ".join(map(repr, sorted(meta.signature_def)))
        raise ConfigError("signature_def_key", f"there is no {name!r}; there are {there}")
    chosen, graph = meta.signature_def[name], session.graph
    inputs = {key: graph.get_tensor_by_name(each.name) for key, each in chosen.inputs.items()}
    outputs = {key: graph.get_tensor_by_name(each.name) for key, each in chosen.outputs.items()}
    frozen = freeze(session, inputs, outputs)
    # Newer SavedModels consist of function calls, which have no shapes; their signature has the shapes.
    ports = {
        key: port._replace(shape=_row_shape(chosen.outputs[key].tensor_shape)) if port.shape is None else port
        for key, port in frozen.outputs.items()
    }
    return replace(frozen, outputs=ports)


def freeze_saved_model(folder: str, tags: str, signature: str) -> FrozenGraph:
    """Return the graph of a SavedModel's signature; `tags` holds tags with commas between them."""
    import tensorflow as tf

    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        meta = tf.compat.v1.saved_model.load(session, tags.split(","), folder)
        return freeze_signature(session, meta, signature)


def _row_shape(shape: "TensorShapeProto") -> tuple[int, ...] | None:
    sizes = [each.size for each in shape.dim]
    known = not shape.unknown_rank and sizes and min(sizes[1:], default=0) >= 0
    return tuple(sizes[1:]) if known else None


def port_of(tensor: "tf.Tensor") -> Port:
    """Describe a tensor whose first dimension is the batch."""
    shape = tensor.shape
    known = shape.rank is not None and shape.rank > 0 and shape[1:].is_fully_defined()
    return Port(
        tensor=tensor.name, dtype=tensor.dtype.name, shape=tuple(int(each) for each in shape[1:]) if known else None
    )
