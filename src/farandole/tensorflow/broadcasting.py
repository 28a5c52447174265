"""Broadcast of one rank's variables to the others, so that all ranks start equal."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import tensorflow as tf

from farandole.core.process_sets.process_set import ProcessSet, global_process_set
from farandole.tensorflow.ops import grouped_broadcast
from farandole.tensorflow.tracing import as_written

Variable: TypeAlias = tf.Variable  # or a reference variable of tf.compat.v1, or a Keras variable


@as_written
def broadcast_variables(
    variables: Iterable[Variable],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Overwrite variables of TensorFlow or Keras with those of the job's rank `root_rank`.

    In eager mode it blocks until all of the root's values have arrived. In a graph of TensorFlow 1 it returns the
    operation. `inplace` is ignored. Raises `tf.errors.FailedPreconditionError` for variables that differ in shape or
    dtype between ranks, and `ValueError` for variables that do not hold numbers.
    """
    assigned = _broadcast(list(variables), root_rank, "broadcast_variables", process_set)
    # A function runs all operations with side effects.
    is_automatic = tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function
    return None if is_automatic else tf.group(*assigned)


@as_written
def broadcast_(
    variables: Sequence[Variable],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Overwrite variables with those of the job's rank `root_rank`, and return their values.

    In eager mode it blocks until all of the root's values have arrived. Raises `ValueError` for a mix of resource
    variables and reference variables.
    """
    kinds = {tf.as_dtype(variable.dtype).name.endswith("_ref") for variable in variables}
    if len(kinds) > 1:
        raise ValueError(
            "all variables passed to broadcast_() should be resource variables, or all reference variables"
        )
    return _broadcast(list(variables), root_rank, name or "broadcast_", process_set)


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Return the operation that overwrites all variables of the graph with those of rank `root_rank`.

    Raises `RuntimeError` in eager mode, which keeps no list of variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables() does not support eager execution, in which nothing knows all variables; use "
            "broadcast_variables(model.variables, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Session hook that overwrites all variables with those of rank `root_rank` once a session is made or restored."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self._root, self._device = root_rank, device
        self._operation: tf.Operation | None = None
        self._made_for: list[tf.Graph | Variable] = []  # the operation's graph and its variables

    def begin(self) -> None:
        """Add the operation to the graph, which cannot be changed after the session is made."""
        needed = [tf.compat.v1.get_default_graph(), *tf.compat.v1.global_variables()]
        # A later session of this graph finds it finalized, or with further variables.
        if [*map(id, needed)] != [*map(id, self._made_for)]:
            with tf.device(self._device):
                self._operation, self._made_for = broadcast_global_variables(self._root), needed

    def after_create_session(self, session: tf.compat.v1.Session, coord: tf.train.Coordinator) -> None:
        """Run the operation; blocks until the root's values have arrived."""
        session.run(self._operation)


def _broadcast(variables: list[Variable], root: int, name: str, process_set: ProcessSet) -> list[tf.Tensor]:
    values = [tf.convert_to_tensor(variable) for variable in variables]
    strangers = [
        f"'{variable.name}' ({value.dtype.name})"
        for variable, value in zip(variables, values, strict=True)
        if not (value.dtype.is_bool or value.dtype.is_integer or value.dtype.is_floating or value.dtype.is_complex)
    ]
    if strangers:
        raise ValueError(f"only numbers can be broadcast, which {', '.join(strangers)} does not hold; leave it out")
    # The engine has no complex dtypes, so complex numbers are sent as pairs.
    sent = [tf.bitcast(value, value.dtype.real_dtype) if value.dtype.is_complex else value for value in values]
    spread = grouped_broadcast(sent, root, name, ignore_name_scope=True, process_set=process_set)
    return [
        variable.assign(tf.bitcast(received, value.dtype) if value.dtype.is_complex else received)
        for variable, value, received in zip(variables, values, spread, strict=True)
    ]
