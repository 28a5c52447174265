"""Graph of TensorFlow without variables: the form in which a trained model function travels and is applied."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from farandole.errors import ConfigError

__all__ = ["FrozenGraph", "Port", "freeze", "freeze_saved_model", "freeze_signature", "port_of"]


@dataclass(frozen=True, kw_only=True)
class Port:
    """An input or output tensor of a graph."""

    tensor: str  # such as "dense/BiasAdd:0"
    dtype: str  # as NumPy names it, or "string"
    shape: tuple[int, ...] | None  # of one row; None if the graph does not know it

    @property
    def is_scalar(self) -> bool:
        """Return True if a row has exactly one value."""
        return self.shape is not None and math.prod(self.shape) == 1


@dataclass(frozen=True, kw_only=True)
class FrozenGraph:
    """A serialized GraphDef whose variables are constants, with the tensors that rows go into and come out of."""

    graph: bytes
    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]

    def facts(self) -> dict[str, Any]:
        """Return everything but the graph, as JSON holds it."""
        ports = {"inputs": self.inputs, "outputs": self.outputs}
        return {
            kind: {name: [each.tensor, each.dtype, each.shape] for name, each in given.items()}
            for kind, given in ports.items()
        }

    @classmethod
    def revived(cls, graph: bytes, facts: Mapping[str, Any]) -> "FrozenGraph":
        """Return the graph that `facts` described."""

        def ports(given: Mapping[str, Any]) -> dict[str, Port]:
            return {
                name: Port(tensor=tensor, dtype=dtype, shape=None if shape is None else tuple(shape))
                for name, (tensor, dtype, shape) in given.items()
            }

        return cls(graph=graph, inputs=ports(facts["inputs"]), outputs=ports(facts["outputs"]))


def freeze(session: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> FrozenGraph:
    """Return the part of a session's graph between tensors, with its variables' values as constants.

    Leaves out inputs that no output depends on. Raises `ConfigError` for a graph with lookup tables, whose content is
    no constant."""
    import tensorflow as tf

    definition = tf.compat.v1.graph_util.convert_variables_to_constants(
        session, session.graph.as_graph_def(add_shapes=True), [each.op.name for each in outputs.values()]
    )
    tables = [node.name for node in definition.node if node.op.startswith("HashTable")]
    if tables:
        raise ConfigError("graph", f"holds lookup tables ({', '.join(tables)}), whose content is no constant")
    kept = {node.name for node in definition.node}
    return FrozenGraph(
        graph=definition.SerializeToString(deterministic=True),
        inputs={name: port_of(each) for name, each in inputs.items() if each.op.name in kept},
        outputs={name: port_of(each) for name, each in outputs.items()},
    )


def freeze_signature(session: Any, meta: Any, name: str) -> FrozenGraph:
    """Return the graph of one signature of a MetaGraphDef whose variables a session holds.

    Raises `ConfigError` if there is no such signature."""
    if name not in meta.signature_def:
        there = ", ".join(map(repr, sorted(meta.signature_def)))
        raise ConfigError("signature_def_key", f"there is no {name!r}; there are {there}")
    chosen, graph = meta.signature_def[name], session.graph
    inputs = {key: graph.get_tensor_by_name(each.name) for key, each in chosen.inputs.items()}
    outputs = {key: graph.get_tensor_by_name(each.name) for key, each in chosen.outputs.items()}
    frozen = freeze(session, inputs, outputs)
    # The calls of functions, of which newer SavedModels consist, have no shapes; the signature has them.
    ports = {
        key: replace(port, shape=_row_shape(chosen.outputs[key].tensor_shape)) if port.shape is None else port
        for key, port in frozen.outputs.items()
    }
    return replace(frozen, outputs=ports)


def freeze_saved_model(folder: str, tags: str, signature: str) -> FrozenGraph:
    """Return the graph of a SavedModel's signature; `tags` is a list with commas."""
    import tensorflow as tf

    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        meta = tf.compat.v1.saved_model.load(session, tags.split(","), folder)
        return freeze_signature(session, meta, signature)


def _row_shape(shape: Any) -> tuple[int, ...] | None:
    sizes = [each.size for each in shape.dim]
    known = not shape.unknown_rank and sizes and min(sizes[1:], default=0) >= 0
    return tuple(sizes[1:]) if known else None


def port_of(tensor: Any) -> Port:
    """Describe a tensor whose first dimension is the batch."""
    shape = tensor.shape
    known = shape.rank is not None and shape.rank > 0 and shape[1:].is_fully_defined()
    return Port(
        tensor=tensor.name, dtype=tensor.dtype.name, shape=tuple(int(each) for each in shape[1:]) if known else None
    )
