"""The class `HorovodEstimator` of `sparkdl`, with compat installed on its ranks."""

from collections.abc import Callable

from farandole.compat.answering import answering
from farandole.spark.tensorflow import HorovodEstimator as Estimator
from farandole.spark.trainers.model_fn.job import ModelFnJob
from farandole.spark.trainers.tensorflow_graph import FrozenGraph

__all__ = ["HorovodEstimator"]


class HorovodEstimator(Estimator):
    """The class `sparkdl.estimators.horovod_estimator.estimator.HorovodEstimator`; see `farandole.spark.tensorflow`."""

    def _task(self, job: ModelFnJob) -> Callable[[], FrozenGraph | None]:
        return answering(super()._task(job))
