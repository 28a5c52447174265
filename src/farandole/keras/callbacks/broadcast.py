"""Callback that broadcasts the initial state of a model."""

from collections.abc import Iterable

import keras
import numpy as np

import farandole.numpy as hvd
from farandole.keras.backend import Optimizer, Variable
from farandole.keras.callbacks.base import Callback
from farandole.keras.generation import generation_of
from farandole.keras.state import broadcast_variables


class BroadcastGlobalVariablesCallback(Callback):
    """Broadcasts the weights and the optimizer's state of rank `root_rank` once in each `fit`, before its first batch.

    A model that its first batch builds is broadcast after that batch. `local_variables` keep their values, and so do
    the sums of a step of several passes that the last `fit` has left unfinished. `device` is an argument of Horovod's
    and is ignored."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Iterable[Variable] | None = None) -> None:
        super().__init__()
        self.root_rank, self.broadcast_done = root_rank, False
        # The variables too, because another variable may get the id of a deleted one.
        self._local = {id(variable): variable for variable in local_variables or ()}

    def register_local_var(self, var: Variable) -> None:
        """Exclude a variable from the broadcast."""
        self._local[id(var)] = var

    def on_train_begin(self, logs: object = None) -> None:
        """Prepare the broadcast of this training, of the same model or of another one."""
        self.broadcast_done = False

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Broadcast once. Blocks until every rank takes part."""
        if not self.broadcast_done:
            self._broadcast()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Broadcast after an epoch of one batch, as `on_train_batch_begin` does."""
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        model = self.model
        # All ranks wait until every model is built.
        built = np.array([model.built], np.int32)
        if not hvd.allreduce(built, name="model_is_built", op=hvd.Min)[0]:
            return
        optimizer = model.optimizer
        held = [*model.weights, *generation_of(optimizer).build(optimizer, model.trainable_variables)]
        kept = {*self._local, *map(id, _own_sums(optimizer))}
        broadcast_variables([variable for variable in held if id(variable) not in kept], self.root_rank)
        self.broadcast_done = True


def _own_sums(optimizer: Optimizer) -> list[Variable]:
    """Return the variables that hold sums of this rank's gradients, if all ranks have done as many passes.

    Otherwise one rank has loaded its sums, and the others have none."""
    sums = generation_of(optimizer).sums(optimizer)
    if sums:
        passes = getattr(optimizer, "inner_optimizer", optimizer)._iterations  # `iterations` counts whole steps
        done = int(keras.ops.convert_to_numpy(passes))
        least, most = hvd.allreduce(np.array([done, -done], np.int64), name="passes_done", op=hvd.Min)
        if least != -most:
            return []
    return sums
