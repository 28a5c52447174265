"""Callbacks of a `TorchEstimator`: functions, or objects with methods named as those of Keras' callbacks."""

from collections.abc import Mapping, Sequence

from farandole.core.operations.objects import allgather_object

METHODS = (
    "set_model",
    "on_train_begin",
    "on_epoch_begin",
    "on_train_batch_end",
    "on_epoch_end",
    "on_train_end",
)


class Callbacks:
    """The callbacks of a fit, which run on every rank; epochs and batches are counted from 0.

    A callback that is a plain function is called with (epoch, values) after each epoch."""

    def __init__(self, callbacks: Sequence[object]) -> None:
        self._callbacks = callbacks

    def call(self, method: str, *args: object) -> None:
        """Call a method of the callbacks that have it."""
        for each in self._callbacks:
            if hasattr(each, method):
                getattr(each, method)(*args)
            elif method == "on_epoch_end" and callable(each):
                each(*args)

    def end_epoch(self, epoch: int, values: Mapping[str, float]) -> bool:
        """Call `on_epoch_end`; return whether any callback of any rank has set `stop_training`. A collective."""
        if not self._callbacks:
            return False
        self.call("on_epoch_end", epoch, dict(values))
        mine = any(getattr(each, "stop_training", False) for each in self._callbacks)
        return any(allgather_object(bool(mine)))
