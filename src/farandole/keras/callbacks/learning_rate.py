"""Callbacks for learning rate schedules and warm-up with large batches (Goyal et al., arXiv:1706.02677)."""

import sys
from collections.abc import Callable

import keras

from farandole.core import default
from farandole.keras.backend import Optimizer
from farandole.keras.callbacks.base import BATCHES_BEFORE, Callback
from farandole.keras.generation import generation_of


class LearningRateScheduleCallback(Callback):
    """Sets the learning rate to `initial_lr * multiplier(epoch)` from `start_epoch` until before `end_epoch`.

    With `staircase` it does so once per epoch, else before each batch, with a fractional `epoch`; it then needs
    `steps_per_epoch` if `fit` does not know the number. `multiplier` may be a constant number. With
    `momentum_correction` it scales the optimizer's accumulated steps by the change of the rate. The logs hold the rate
    as `lr`."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: Callable[[float], float] | float,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self.staircase = staircase or not callable(multiplier)
        self.multiplier: Callable[[float], float] = multiplier if callable(multiplier) else lambda epoch: multiplier
        self.current_epoch = 0
        self._steps: int | None = None  # of an epoch of this training

    def on_train_begin(self, logs: object = None) -> None:
        """Find the steps per epoch. Raises `ValueError` if they are unknown, or if the optimizer has a schedule."""
        if generation_of(self.model.optimizer).has_schedule(self.model.optimizer):
            raise ValueError(f"{type(self).__name__}: the optimizer's learning rate follows a schedule of its own")
        self._steps = self.steps_per_epoch or (self.params or {}).get("steps")
        if not self.staircase and self._steps is None:
            raise ValueError(
                f"Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch "
                f"parameter to the {type(self).__name__}() or upgrade to the latest version of Keras."
            )

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Remember the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Set the rate if this batch changes it."""
        begun = self.current_epoch >= self.start_epoch
        if not begun or (self.end_epoch is not None and self.current_epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self._steps is not None
            done = batch + (self.params or {}).get(BATCHES_BEFORE, 0)
            self._set_rate(self.current_epoch + done / self._steps)
        elif batch == 0:
            self._set_rate(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Log the rate."""
        if logs is not None:
            logs["lr"] = _rate(self.model.optimizer)

    def _set_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before = _rate(optimizer)
        optimizer.learning_rate = self.initial_lr * self.multiplier(epoch)
        after = _rate(optimizer)
        if self.momentum_correction and 0 < before != after:
            # Horovod changes the momentum factor for one batch, which a compiled function would not notice. Scaling the
            # accumulated steps is equivalent.
            for velocity in generation_of(optimizer).velocities(optimizer):
                velocity.assign(velocity * (after / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate with each batch, from `initial_lr / size()` to `initial_lr` within `warmup_epochs`.

    With `verbose` it reports the end of the warm-up on the standard output."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            self._grow,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs, self.verbose = warmup_epochs, verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Reach `initial_lr` at the end of the warm-up, and report it; log the rate."""
        assert self._steps is not None
        if epoch == self.warmup_epochs - 1:
            # With `steps_per_execution` the last batches had the rate of the first one of their execution.
            self._set_rate(epoch + (self._steps - 1) / self._steps)
        super().on_epoch_end(epoch, logs)
        if self.verbose > 0 and epoch == self.warmup_epochs - 1:
            rate = _rate(self.model.optimizer)
            sys.stdout.write(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.\n")

    def _grow(self, epoch: float) -> float:
        assert self._steps is not None
        # One batch ahead, so that an epoch ends with a whole number.
        ahead = epoch + 1.0 / self._steps
        size = default.size()
        return (ahead * (size - 1) / self.warmup_epochs + 1) / size


def _rate(optimizer: Optimizer) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))
