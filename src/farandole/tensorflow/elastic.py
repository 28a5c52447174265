"""Elastic training with TensorFlow, with the names of Horovod's API.

state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0, batch=0)

@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 90):
        ...
        state.commit()

Functions that were traced before ranks came or went go on with the ranks that there are."""

from collections.abc import Iterable
from importlib import import_module
from typing import TypeAlias

import tensorflow as tf

from farandole.core import default
from farandole.core.operations.objects import broadcast_object
from farandole.elastic import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    ObjectState,
    State,
    StateHandler,
    run,
)
from farandole.tensorflow.aggregation import SUMS
from farandole.tensorflow.broadcasting import broadcast_variables

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]

Variable: TypeAlias = tf.Variable
Session: TypeAlias = tf.compat.v1.Session


class _VariablesHandler(StateHandler[list[Variable]]):
    """Handler of variables, in eager mode or in a session of their graph."""

    def __init__(self, variables: list[Variable], session: Session | None) -> None:
        super().__init__(variables)
        self._session = session
        if session is not None:
            # The graph may be finalized later.
            with session.graph.as_default():
                self._broadcast = broadcast_variables(variables, root_rank=0)
                self._clear = tf.group(*(each.initializer for each in session.graph.get_collection(SUMS)))
        self.save()

    def save(self) -> None:
        read = self._session.run if self._session is not None else (lambda held: [each.numpy() for each in held])
        self._saved: list[object] = read(self.value) if self.value else []

    def restore(self) -> None:
        self.reset()
        for variable, value in zip(self.value, self._saved, strict=True):
            if self._session is None:
                variable.assign(value)
            else:
                variable.load(value, self._session)

    def sync(self) -> None:
        if self._session is not None:
            self._session.run(self._broadcast)
        else:
            broadcast_variables(self.value, root_rank=0)

    def reset(self) -> None:
        # The sums of an unfinished step: other ranks may have done other passes.
        if self._session is not None:
            self._session.run(self._clear)


class TensorFlowState(ObjectState):
    """State of variables, and of any other objects by name, which are attributes: `state.epoch`.

    In a graph of TensorFlow 1, `variables` are by default all of the graph's that the session has, and `session` is the
    default session. Raises `ValueError` in eager mode without variables, as nothing knows all of them."""

    def __init__(
        self, variables: Iterable[Variable] | None = None, session: Session | None = None, **kwargs: object
    ) -> None:
        if tf.executing_eagerly() and session is None:
            if variables is None:
                raise ValueError("variables= is needed in eager mode, in which nothing knows all variables")
        else:
            session = session or tf.compat.v1.get_default_session()
            if session is None:
                raise ValueError("session= is needed in a graph, outside of a `with` block of a session")
            with session.graph.as_default():
                variables = tf.compat.v1.global_variables() if variables is None else variables
        handled = list(variables or ())
        super().__init__(broadcast_object, default.rank, **kwargs)
        self._handlers["variables"] = _VariablesHandler(handled, session)
        object.__setattr__(self, "variables", handled)


def TensorFlowKerasState(
    model: object, optimizer: object = None, backend: object = None, **kwargs: object
) -> ObjectState:
    """Return a `farandole.keras.elastic.KerasState`; `backend` is Horovod's and is ignored."""
    # Imported by name, because farandole.keras is a layer above, and takes time to import.
    state: ObjectState = import_module("farandole.keras.elastic").KerasState(model, optimizer, **kwargs)
    return state
