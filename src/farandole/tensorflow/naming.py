"""The names under which ranks find each other's operations."""

import re
from typing import Any

import tensorflow as tf

__all__ = ["backward_name", "require_no_xla", "wire_name"]

_PREFIX = "farandole/"  # of what is marked as used in a graph


def wire_name(kind: str, name: str | None, tensors: list[tf.Tensor], ignore_name_scope: bool = False) -> str:
    """Return the name ranks agree on: `<kind>.<name>`, or one after the tensor; in a graph, with the scope and unique.

    Ranks that trace the same program get the same names. Without `name`, operations that run eagerly are counted: a
    name that ends with a dot gets its number when it runs."""
    if tf.executing_eagerly():
        return f"{kind}.eager." if name is None else f"{kind}.{name}"
    graph = tf.compat.v1.get_default_graph()
    # A tensor's name has the scope that it was made in; that of the call would only be said twice.
    base = _plain(tensors[0].name) if name is None and tensors else (name or "noname")
    scope = graph.get_name_scope()
    if name is not None and scope and not ignore_name_scope:
        base = f"{scope}/{base}"
    return _unique(graph, f"{kind}.{base}")


def require_no_xla(kind: str, name: str | None) -> None:
    """Refuse, with a remedy, a function that XLA is to compile: it has no such operations. Not to be called eagerly."""
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


def backward_name(forward: str, part: str = "") -> str:
    """Return the name for the gradient, or a part of it, of the operation that has the name `forward`."""
    if forward.endswith("."):
        return f"{forward}backward{part}."
    name = f"{forward}.backward{part}"
    return name if tf.executing_eagerly() else _unique(tf.compat.v1.get_default_graph(), name)


def _unique(graph: Any, name: str) -> str:
    # Bodies of loops and branches are graphs of their own, but run together with what is around them.
    while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
        graph = graph.outer_graph
    with graph.name_scope(None):
        unique: str = graph.unique_name(_PREFIX + name)
    return unique.removeprefix(_PREFIX)


def _plain(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)
