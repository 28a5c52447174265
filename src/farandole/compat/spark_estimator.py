"""The class `HorovodEstimator` of `sparkdl`, with compat installed on its ranks."""

from collections.abc import Callable

from farandole.compat.answering import answering
from farandole.estimators.tensorflow import HorovodEstimator as Estimator
from farandole.estimators.trainers.model_fn.frozen_graph import FrozenGraph
from farandole.estimators.trainers.model_fn.job import ModelFnJob


class HorovodEstimator(Estimator):
    """The class `sparkdl.estimators.horovod_estimator.estimator.HorovodEstimator`; see `farandole.spark.tensorflow`."""

    def _task(self, job: ModelFnJob) -> Callable[[], FrozenGraph | None]:
        return answering(super()._task(job))
