"""Elastic training with Keras 3 on all its backends and with tf_keras, with the names of Horovod's API.

state = hvd.elastic.KerasState(model, batch=0, epoch=0)

@hvd.elastic.run
def train(state):
    callbacks = [
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state),
    ]
    model.fit(dataset, steps_per_epoch=500 // hvd.size(), epochs=24 - state.epoch, callbacks=callbacks)

`fit` goes on with the functions that it has traced before ranks came or went."""

import logging

import keras
import numpy as np

from farandole.core import default
from farandole.core.operations.objects import allgather_object, broadcast_object
from farandole.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, StateHandler, run
from farandole.keras.backend import Model, Optimizer, Variable
from farandole.keras.callbacks.base import BATCHES_BEFORE, Callback
from farandole.keras.generation import generation_of
from farandole.keras.state import broadcast_variables

__all__ = [
    "CommitStateCallback",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


log = logging.getLogger(__name__)


class _ModelHandler(StateHandler[Model]):
    """Handler of a model's weights and of the variables of its optimizer."""

    def __init__(self, model: Model, optimizer: Optimizer | None) -> None:
        super().__init__(model)
        self._optimizer = optimizer
        if not model.built:
            raise ValueError("the model has no weights yet: build it, or call it once, before its state is made")
        self.save()

    def save(self) -> None:
        self._saved = [np.array(keras.ops.convert_to_numpy(variable)) for variable in self._all()]

    def has_other_weights(self) -> bool:
        """Return whether weights that are trained have changed since `save`."""
        trained = {id(variable) for variable in self.value.trainable_variables}
        pairs = [pair for pair in zip(self._all(), self._saved, strict=False) if id(pair[0]) in trained]
        # As bytes, so that a NaN equals itself.
        return any(
            np.asarray(keras.ops.convert_to_numpy(variable)).tobytes() != saved.tobytes() for variable, saved in pairs
        )

    def restore(self) -> None:
        self.reset()
        if getattr(self.value, "_jax_state", None) is not None:
            # On JAX, `fit` keeps the values outside of the variables. A step that has failed has consumed them.
            self.value._jax_state, self.value._jax_state_synced = None, True
        held = self._all()
        if _shapes(held) != [value.shape for value in self._saved]:
            raise ValueError(
                "the variables of the model and its optimizer are others than in the last commit, which cannot be "
                f"restored: {len(held)} now, {len(self._saved)} then; compile the model before its state is made, and "
                "commit after each change of its layers or optimizer"
            )
        for variable, value in zip(held, self._saved, strict=True):
            variable.assign(value)

    def sync(self) -> None:
        held = self._variables()
        shapes = allgather_object(_shapes(held), name="elastic.model")
        if others := [rank for rank, each in enumerate(shapes) if each != shapes[0]]:
            numbers = {rank: len(shapes[rank]) for rank in (0, *others)}
            raise ValueError(
                "ranks have other variables of the model and its optimizer than rank 0, in number (by rank) "
                f"{numbers}: build and compile the model alike on all ranks before elastic.run calls the function"
            )
        broadcast_variables(held, root_rank=0)

    def reset(self) -> None:
        optimizer = self._found_optimizer()
        if optimizer is not None:
            generation_of(optimizer).drop_sums(optimizer)

    def _found_optimizer(self) -> Optimizer | None:
        return self._optimizer or getattr(self.value, "optimizer", None)

    def _variables(self) -> list[Variable]:
        model, optimizer = self.value, self._found_optimizer()
        if optimizer is None:
            return list(model.weights)
        return [*model.weights, *generation_of(optimizer).build(optimizer, model.trainable_variables)]

    def _all(self) -> list[Variable]:
        """Return the variables that ranks have in common, and the states of this rank's random generators."""
        common = self._variables()
        known = {id(variable) for variable in common}
        return [*common, *(each for each in self.value.non_trainable_variables if id(each) not in known)]


def _shapes(variables: list[Variable]) -> list[tuple[int, ...]]:
    return [tuple(variable.shape) for variable in variables]


class KerasState(ObjectState):
    """State of a Keras model that is built, its optimizer, and any other objects by name: `state.epoch`.

    `optimizer` is the model's by default, also one that `compile` makes later. Assigning another model to `state.model`
    saves it. Raises `ValueError` for a model that is not built."""

    def __init__(self, model: Model, optimizer: Optimizer | None = None, **kwargs: object) -> None:
        super().__init__(broadcast_object, default.rank, **kwargs)
        # First: where saving it fails, because of a step on JAX that has failed, nothing is saved.
        self._handlers = {"model": _ModelHandler(model, optimizer), **self._handlers}
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "optimizer", optimizer or getattr(model, "optimizer", None))

    def has_other_weights(self) -> bool:
        """Return whether weights that are trained have changed since the state was saved."""
        handler = self._handlers["model"]
        assert isinstance(handler, _ModelHandler)
        return handler.has_other_weights()


class _StateCallback(Callback):
    def __init__(self, state: ObjectState) -> None:
        super().__init__()
        self.state = state


class CommitStateCallback(_StateCallback):
    """Commits the state after every `batches_per_commit` batches, and after each epoch.

    It should be the last callback, so that the state has what the others note. Before the first batch of a `fit` it
    warns if callbacks before it, such as BackupAndRestore, have loaded other weights than the state's, and raises
    `ValueError` if they have done so on some ranks only."""

    def __init__(self, state: ObjectState, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        self.batches_per_commit = self.batches_remaining = batches_per_commit
        self._has_compared = False

    def on_train_begin(self, logs: object = None) -> None:
        """Count from the first batch of this `fit`, as ranks that have joined do."""
        self.batches_remaining, self._has_compared = self.batches_per_commit, False

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Compare the weights with those of the state once, after BroadcastGlobalVariablesCallback."""
        if not self._has_compared:
            self._has_compared = True
            self._compare_weights()

    def _compare_weights(self) -> None:
        if not isinstance(self.state, KerasState):
            return
        mine = self.state.has_other_weights()
        changed = [rank for rank, each in enumerate(allgather_object(mine, name="elastic.weights")) if each]
        remedy = (
            "a callback such as BackupAndRestore may have loaded them; load checkpoints before elastic.run calls the "
            "function, which gives all ranks the weights of rank 0"
        )
        if 0 < len(changed) < default.size():
            raise ValueError(f"only ranks {changed} begin with other weights than those of the state: {remedy}")
        if changed and default.rank() == 0:
            log.warning("training begins with other weights than those of the state: %s", remedy)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Count the batch, and commit; raises `HostsUpdatedInterrupt` as `State.commit` does."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.commit()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Commit."""
        self.commit()

    def commit(self) -> None:
        """Commit the state."""
        _ = self.model  # on JAX, this gives the variables the values that `fit` keeps
        self.state.commit()


class UpdateBatchStateCallback(_StateCallback):
    """Keeps the number of batches done in the epoch in `state.batch`, which is 0 after an epoch.

    If `fit` begins with `state.batch` > 0, its first epoch has that many batches less, but at least one. Callbacks that
    stop the training, such as EarlyStopping, should come after it: it takes back the stop that ends such an epoch."""

    def __init__(self, state: ObjectState) -> None:
        super().__init__(state)
        self._before, self._cut = 0, False

    def on_train_begin(self, logs: object = None) -> None:
        """Note how many batches of the first epoch are done already, also for schedules of the learning rate."""
        self._cut = False
        self._note_before(self.state.batch)

    def _note_before(self, batches: int) -> None:
        self._before = batches
        if self.params is not None:
            self.params[BATCHES_BEFORE] = batches

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Note the batch, and end an epoch whose first batches were done before."""
        self.state.batch = self._before + batch + 1
        steps = (self.params or {}).get("steps")
        if self._before and steps and self.state.batch >= steps and not self.model.stop_training:
            self.model.stop_training = self._cut = True  # ends the epoch; taken back at its end

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Begin to count again."""
        self.state.batch = 0
        self._note_before(0)
        if self._cut:
            self.model.stop_training = self._cut = False


class UpdateEpochStateCallback(_StateCallback):
    """Keeps the number of epochs done in `state.epoch`, counted on from its value when `fit` began."""

    def on_train_begin(self, logs: object = None) -> None:
        """Note the epochs that were done before."""
        self.initial_epoch = self.state.epoch
        self._first: int | None = None

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Note the number of this `fit`'s first epoch, which `initial_epoch` may set."""
        self._first = epoch if self._first is None else self._first

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Count the epoch."""
        self.state.epoch = self.initial_epoch + epoch - (self._first or 0) + 1
