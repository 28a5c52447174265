"""Wire names of operations, by which ranks match their requests."""

import re

import tensorflow as tf

_PREFIX = "farandole/"  # of names that are reserved in a graph


def wire_name(kind: str, name: str | None, tensors: list[tf.Tensor], ignore_name_scope: bool = False) -> str:
    """Return the wire name: `<kind>.<name>`, or the tensor's name; in a graph it is unique and includes the scope.

    Ranks that trace the same program get the same names. An eager operation without `name` gets a name that ends with
    a dot; the engine appends a count when it runs."""
    if tf.executing_eagerly():
        return f"{kind}.eager." if name is None else f"{kind}.{name}"
    graph = tf.compat.v1.get_default_graph()
    # A tensor's name already includes a scope.
    base = f"{function_prefix()}{_plain(tensors[0].name)}" if name is None and tensors else (name or "noname")
    scope = graph.get_name_scope()
    if name is not None and scope and not ignore_name_scope:
        base = f"{scope}/{base}"
    return _unique(graph, f"{kind}.{base}")


def require_no_xla(kind: str, name: str | None) -> None:
    """Raise `NotImplementedError` in a function that XLA compiles, which lacks the operations. For graphs only."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        if context is not None and context.IsXLAContext():
            shown = kind if name is None else f"{kind}.{name}"
            raise NotImplementedError(
                f"'{shown}' cannot be compiled by XLA (jit_compile=True). Compile what is around it, such as the "
                "function that computes the gradients, or pass jit_compile=False"
            )
        graph = getattr(graph, "outer_graph", None)


def function_prefix() -> str:
    """Return the beginning of names that no user has given, in the function that is being traced; "" elsewhere.

    A function that was traced before may be called in another one, which has tensors and variables of the same names.
    """
    name = str(getattr(_outermost(tf.compat.v1.get_default_graph()), "name", ""))
    # TensorFlow's own functions, such as branches and gradients, have numbers, which differ between ranks.
    return "" if not name or re.search(r"_\d+$", name) else f"{_plain(name)}/"


def backward_name(forward: str, part: str = "") -> str:
    """Return the wire name for the gradient of the operation `forward`, or for a part of the gradient."""
    if forward.endswith("."):
        return f"{forward}backward{part}."
    name = f"{forward}.backward{part}"
    return name if tf.executing_eagerly() else _unique(tf.compat.v1.get_default_graph(), name)


def _unique(graph: tf.Graph, name: str) -> str:
    graph = _outermost(graph)
    with graph.name_scope(None):
        unique: str = graph.unique_name(_PREFIX + name)
    return unique.removeprefix(_PREFIX)


def _outermost(graph: tf.Graph) -> tf.Graph:
    # Bodies of loops and branches are separate graphs, but run within the outer one.
    while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
        graph = graph.outer_graph
    return graph


def _plain(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)
