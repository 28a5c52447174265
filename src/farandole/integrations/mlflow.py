"""Logger of an estimator's epochs to MLflow: `TorchEstimator(..., loggers=[MLflowLogger()])`.

Needs MLflow: the extra `mlflow`."""

import time
from collections.abc import Mapping

from farandole.estimators.history import epoch_points
from farandole.extras import importing

with importing(__name__):
    import mlflow
    from mlflow.entities import Metric

__all__ = ["MLflowLogger"]


class MLflowLogger:
    """Logger that writes the values of each epoch to a run, during the fit.

    The run is `run_id`, or this thread's active run. Without either, MLflow starts a run, which `mlflow.end_run` ends.
    MLflow's settings determine the server (`MLFLOW_TRACKING_URI`). Metrics have the names of TensorBoard's curves, such
    as "train/loss", and the epoch as step. The constructor raises MLflow's errors if it cannot get a run."""

    def __init__(self, run_id: str | None = None) -> None:
        # `log_epoch` is called on another thread, which has no active run, so the run's id is needed.
        self.run_id: str = run_id or (mlflow.active_run() or mlflow.start_run()).info.run_id

    def log_epoch(self, record: Mapping[str, float]) -> None:
        """Write an epoch's values; blocks until the server has stored them."""
        now, epoch = int(time.time() * 1000), int(record["epoch"])
        metrics = [Metric(name, value, now, epoch) for name, value in epoch_points(record).items()]
        mlflow.MlflowClient().log_batch(self.run_id, metrics=metrics)
