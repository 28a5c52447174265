"""Strategy of a `LightningEstimator`, in whose steps a rank may have fewer rows than others, or none."""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torchmetrics import Metric

from farandole.core.operations.compression import Compressor
from farandole.errors import ConfigError
from farandole.estimators.trainers.checkpoint import restoring
from farandole.estimators.trainers.lightning.files import LightningState
from farandole.estimators.trainers.run import Run
from farandole.lightning.ranks import OverRanks

KEPT = "farandole"  # the path that stands for the checkpoint in memory


class InSteps(OverRanks):
    """Makes a step's gradient the mean over all ranks' rows. Steps without rows do not change metrics and buffers."""

    def __init__(
        self, *, run: Run, terminate_on_nan: bool, rate_factor: float, compression: Compressor[Tensor]
    ) -> None:
        super().__init__(rate_factor=rate_factor, compression=compression)
        self.checkpoint: LightningState = {"state_dict": {}}  # the last one saved, or the one to load; in memory
        self.loss: Tensor | None = None  # of the last training step; None if it returned none
        self.rows = 0  # of the last training step
        self.written: set[str] = set()  # paths of the files that callbacks have written
        self._run, self._terminate_on_nan = run, terminate_on_nan
        self._weight, self._validated = 1.0, 0

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Look up how many rows the step has."""
        super().on_train_batch_start(batch, batch_idx)
        plan, epoch = self._run.rows.train.plan, self.lightning_module.trainer.current_epoch
        place = self._run.place(epoch, batch_idx) % plan.steps
        self.rows, self._weight = plan.batch(self._run.rank, place), plan.weight(self._run.rank, place)

    def training_step(self, *args: object, **kwargs: object) -> object:
        """Run the user's step and keep its loss; raises `ConfigError` if `terminate_on_nan` forbids its value."""
        with self._without_effects() if not self.rows else nullcontext():
            output = super().training_step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, dict) else output
        self.loss = loss.detach() if isinstance(loss, Tensor) else None
        if self._terminate_on_nan and self.rows and self.loss is not None and not math.isfinite(self.loss.item()):
            raise ConfigError(
                "terminate_on_nan",
                f"the loss of rank {self._run.rank} is {self.loss.item()} in epoch "
                f"{self.lightning_module.trainer.current_epoch + 1}; lower the learning rate, or look for extreme "
                "values in the columns",
            )
        return output

    def backward(
        self, closure_loss: Tensor, optimizer: torch.optim.Optimizer | None, *args: object, **kwargs: object
    ) -> Tensor:
        """Weight the loss by this rank's rows, so that the average over ranks is the mean over all rows."""
        if not self.rows:
            closure_loss = torch.zeros((), device=closure_loss.device, requires_grad=True)
        elif self._weight != 1.0:
            closure_loss = closure_loss * self._weight
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def on_validation_start(self) -> None:
        """Begin to count batches."""
        super().on_validation_start()
        self._validated = 0

    def validation_step(self, *args: object, **kwargs: object) -> object:
        """Run the user's step."""
        held = self._run.rows.validate
        rows = 1 if held is None else held.plan.batch(self._run.rank, self._validated)
        self._validated += 1
        with self._without_effects() if not rows else nullcontext():
            return super().validation_step(*args, **kwargs)

    def save_checkpoint(self, checkpoint: LightningState, filepath: object, storage_options: object = None) -> None:
        """Keep the estimator's checkpoint in memory; write a callback's to its file."""
        if filepath == KEPT:
            self.checkpoint = checkpoint
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            self.written.add(str(filepath))

    def load_checkpoint(self, checkpoint_path: object, *args: object, **kwargs: object) -> LightningState:
        """Return the checkpoint in memory."""
        assert checkpoint_path == KEPT
        return self.checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, object], strict: bool = True) -> None:
        """Load the weights; raises `ConfigError` for those of another model."""
        with restoring(self._run.plan.store, self._run.plan.run_id):
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, object]) -> None:
        """Load the optimizers; raises `ConfigError` for those of another model."""
        with restoring(self._run.plan.store, self._run.plan.run_id):
            super().load_optimizer_state_dict(checkpoint)

    @contextmanager
    def _without_effects(self) -> Iterator[None]:
        """Restore metrics and buffers after a step whose rows do not count."""
        module, results = self.lightning_module, self.lightning_module.trainer._results
        metrics = [each for each in module.modules() if isinstance(each, Metric)]
        before = [(each, _states(each)) for each in [*metrics, *results.values()]]
        buffers = [(each, dict(each._buffers)) for each in module.modules()]
        values = [(buffer, buffer.clone()) for _, held in buffers for buffer in held.values() if buffer is not None]
        yield
        for metric, states in before:
            vars(metric).update(states)
        known = {id(metric) for metric, _ in before}
        for metric in results.values():
            if id(metric) not in known:  # reset, not removed: it takes part in the collectives at the end of the epoch
                vars(metric).update(copy.deepcopy(metric._defaults))
        for buffer, value in values:
            buffer.copy_(value)
        for owner, held in buffers:
            owner._buffers.update(held)  # the step may have put other tensors there


def _states(metric: Metric) -> dict[str, object]:
    names = [*metric._defaults, "_update_count", "_computed"]
    return {name: copy.deepcopy(getattr(metric, name)) for name in names}
