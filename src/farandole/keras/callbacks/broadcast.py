"""Makes the ranks' models start alike."""

from collections.abc import Iterable
from typing import Any

import numpy as np

import farandole.numpy as hvd
from farandole.keras.callbacks.base import Callback
from farandole.keras.state import broadcast_variables

__all__ = ["BroadcastGlobalVariablesCallback"]


class BroadcastGlobalVariablesCallback(Callback):
    """Gives all ranks the weights and the optimizer's state of rank `root_rank`, once, before the first batch.

    A model that is built by its first batch gets them after that one. `local_variables` stay as they are. `device` is
    Horovod's, and has no meaning here."""

    def __init__(self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None) -> None:
        super().__init__()
        self.root_rank, self.broadcast_done = root_rank, False
        self._local = {id(variable) for variable in local_variables or ()}

    def register_local_var(self, var: Any) -> None:
        """Leave a variable as it is on each rank."""
        self._local.add(id(var))

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Broadcast, unless that is done; blocks until every rank has come."""
        if not self.broadcast_done:
            self._broadcast()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """As `on_train_batch_begin`, for an epoch of one batch."""
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        model = self.model
        # Where one rank's model is not built yet, the others' have to wait for it.
        built = np.array([model.built], np.int32)
        if not hvd.allreduce(built, name="model_is_built", op=hvd.Min)[0]:
            return
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        held = [*model.weights, *model.optimizer.variables]
        broadcast_variables([variable for variable in held if id(variable) not in self._local], self.root_rank)
        self.broadcast_done = True
