"""Lightning on Spark DataFrames: `LightningEstimator(...).fit(df)` returns a `LightningModel`, which predicts."""

import copy
import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, cast

from farandole.errors import ConfigError
from farandole.extras import importing

with importing("farandole.spark.lightning"):
    import lightning_utilities  # noqa: F401  # a dependency of both packages of Lightning
    import torch

    from farandole.estimators.history import NO_SCORES
    from farandole.estimators.lightning_params import LightningParams, check_package, check_trainer_args
    from farandole.estimators.params import check_together
    from farandole.estimators.torch import TorchEstimator, TorchModel, check_device
    from farandole.estimators.trainers.checkpoint import Checkpoint
    from farandole.estimators.trainers.lightning.data import Tensors
    from farandole.estimators.trainers.lightning.files import weights_of
    from farandole.estimators.trainers.lightning.training import LightningJob, train
    from farandole.estimators.trainers.run import RunPlan
    from farandole.estimators.trainers.torch.tensors import check_parameters
    from farandole.lightning.packages import PACKAGES, package_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

log = logging.getLogger(__name__)


class LightningEstimator(LightningParams, TorchEstimator):
    """Trains a `LightningModule` on a DataFrame's rows with a `lightning.Trainer` on each of `num_proc` ranks.

    `training_step` and `validation_step` receive a dictionary of tensors by column. Optimizers and schedulers are those
    of `configure_optimizers`; the learning rate is multiplied by the number of ranks while an optimizer steps. A step's
    gradient is the mean over all rows of the step. `self.log(..., sync_dist=True)` logs the mean over all ranks. If
    `callbacks` holds a `ModelCheckpoint`, the fitted model has the best weights of that callback.

    A `torch.nn.Module` is trained with `optimizer`, `loss` and `metrics`, as by a `TorchEstimator`. Rows, checkpoints,
    resumes and errors are those of `TorchEstimator`.
    """

    _kind = "lightning"

    @property
    def _package(self) -> ModuleType:
        """The Lightning package of the model; for a torch.nn.Module that of the callbacks, or the installed one."""
        package = package_of(self.getModel())
        if package is not None:
            return package
        for each in self.getCallbacks():
            if (package := package_of(each, "Callback")) is not None:
                return package
        found = next((name for name in PACKAGES if importlib.util.find_spec(name.partition(".")[0])), PACKAGES[0])
        return importlib.import_module(found)

    @property
    def _plain(self) -> bool:
        return package_of(self.getModel()) is None

    def _wanted_gpu(self) -> bool | None:
        asked, number = super()._wanted_gpu(), self.getNumGPUs()
        return asked if number is None else number == 1

    def _check(self) -> None:
        if self.getNumGPUs() is not None and self.getUseGpu() not in (None, self._wanted_gpu()):
            raise ConfigError("num_gpus", f"is {self.getNumGPUs()}, but use_gpu is {self.getUseGpu()}; set one of them")
        if self.getTrainMinibatchFn() is not None:
            raise ConfigError(
                "train_minibatch_fn", "is for TorchEstimator; write the training_step of a LightningModule"
            )
        if self._plain:
            super()._check()
        else:
            self._check_input_shapes()
            check_together(self, 1)
            made = self._made()
            check_parameters(made)
            check_device(made)
            unused = [each.name for each in (self.optimizer, self.loss, self.loss_constructors, self.metrics)]
            if unused := [name for name in unused if self.isSet(name)]:
                log.warning("%s have no effect: the model is a LightningModule, which has its own", ", ".join(unused))
        check_package(self._package, self.getCallbacks())
        check_trainer_args(self._package, self.getTrainerArgs() or {})

    def _made(self) -> torch.nn.Module:
        model = cast("LightningModule", self.getModel())
        if self._plain or type(model).configure_model is self._package.LightningModule.configure_model:
            return model
        model = copy.deepcopy(model)
        model.configure_model()
        return model

    def _batch_maker(self) -> Callable[..., object] | None:
        return self.getDataModule()

    def _task(self, plan: RunPlan) -> Callable[[], bytes | None]:
        job = LightningJob(
            plan=plan,
            package=self._package.__name__,
            model=self.getModel(),
            losses=self._losses() if self._plain else None,
            tensors=Tensors(
                inputs=self._inputs(),
                label_cols=plan.label_cols,
                label_shapes=plan.label_shapes,
                weight_col=plan.weight_col,
            ),
            callbacks=tuple(self.getCallbacks()),
            logger=self.getLogger(),
            profiler=self.getProfiler(),
            log_every_n_steps=self.getLogEveryNSteps(),
            trainer_args=self.getTrainerArgs() or {},
            queues=(self.getTrainAsyncDataLoaderQueueSize(), self.getValAsyncDataLoaderQueueSize()),
            debug_data_loader=self.getDebugDataLoader(),
            terminate_on_nan=self.getTerminateOnNan(),
        )
        return functools.partial(train, job)

    def _trained(self, run_id: str, checkpoint: Checkpoint) -> TorchModel:
        # A copy: fitting again, with another seed for example, starts from the weights that the user gave.
        model = cast("LightningModule", copy.deepcopy(self.getModel()))
        if not self._plain:
            model.configure_model()  # may create layers
        model.load_state_dict(weights_of(checkpoint.weights))
        return self._fitted(model, run_id, checkpoint)

    def get_model_class(self) -> type:
        """See `TorchEstimator`."""
        return LightningModel


class LightningModel(TorchModel):
    """A trained `LightningModule`; `transform` adds the outputs of `forward`, one column per label.

    Made by `LightningEstimator.fit`, or from any `LightningModule` or `torch.nn.Module`, as a `TorchModel` is.
    """

    def getHistory(self) -> dict[str, float]:  # type: ignore[override]  # the form that Horovod's Lightning model has
        """Return the values of the last epoch by name, as Horovod does; `history` has all epochs."""
        last = self.history[-1] if self.history else {}
        return {name: value for name, value in last.items() if name not in NO_SCORES}
