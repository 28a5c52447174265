"""Values of an estimator's epochs in MLflow: `TorchEstimator(..., loggers=[MLflowLogger()])`.

Needs MLflow: the extra `mlflow`."""

import time
from collections.abc import Mapping

from farandole.extras import importing
from farandole.spark.history import epoch_points

with importing(__name__):
    import mlflow
    from mlflow.entities import Metric

__all__ = ["MLflowLogger"]


class MLflowLogger:
    """Writes the values of each epoch to a run, while the fit goes on.

    The run is `run_id`, or this thread's active one; without either MLflow starts one, as its own functions do, which
    `mlflow.end_run` ends. MLflow's settings name the server (`MLFLOW_TRACKING_URI`). Metrics have the names of
    TensorBoard's curves, such as "train/loss", and the epoch as step. Raises MLflow's errors when no run can be had."""

    def __init__(self, run_id: str | None = None) -> None:
        # Epochs come on another thread, which has no active run; so the client names the run.
        self.run_id: str = run_id or (mlflow.active_run() or mlflow.start_run()).info.run_id

    def log_epoch(self, record: Mapping[str, float]) -> None:
        """Write an epoch's values; blocks until the server has them."""
        now, epoch = int(time.time() * 1000), int(record["epoch"])
        metrics = [Metric(name, value, now, epoch) for name, value in epoch_points(record).items()]
        mlflow.MlflowClient().log_batch(self.run_id, metrics=metrics)
